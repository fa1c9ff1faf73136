// Processes that were forked from this one: they share its memory, but are no ranks.
#pragma once

namespace parallel_state {

// How often this process and its ancestors were forked since the library was loaded: what was made when it was another
// number belongs to an ancestor, whose other threads may have held its locks when it forked.
int fork_generation();

// Calls `function` in each child that is forked from now on, before the fork returns there. A child that goes on to
// another program by vfork or posix_spawn isn't told.
void in_forked_children(void (*function)());

}  // namespace parallel_state
