#pragma once

namespace parallel_state {

// Counts forks of this process and its ancestors. An object of another generation is an ancestor's, whose other threads
// may have held its locks.
int fork_generation();

// Calls `function` in each later forked child. vfork and posix_spawn don't call it.
void in_forked_children(void (*function)());

}  // namespace parallel_state
