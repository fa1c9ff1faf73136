// Forked children of this process: they inherit its objects, but are no ranks.
#pragma once

namespace parallel_state {

// Returns how often this process and its ancestors forked since the library was loaded. An object of another generation
// belongs to an ancestor, whose other threads may have held its locks at the fork.
int fork_generation();

// Calls `function` in each forked child from now on, before fork returns there. Children of vfork or posix_spawn don't
// call it.
void in_forked_children(void (*function)());

}  // namespace parallel_state
