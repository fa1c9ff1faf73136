#pragma once

namespace parallel_state {

// Returns how often this process and its ancestors forked since the library was loaded. An object of another generation
// is an ancestor's, whose other threads may have held its locks.
int fork_generation();

// Calls `function` in each later forked child, before fork returns. vfork and posix_spawn don't call it.
void in_forked_children(void (*function)());

}  // namespace parallel_state
