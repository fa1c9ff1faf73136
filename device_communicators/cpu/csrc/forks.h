#pragma once

namespace parallel_state {

// Objects of another generation are an ancestor's, whose threads may have held their locks.
int fork_generation();

// vfork and posix_spawn don't call it.
void in_forked_children(void (*function)());

}  // namespace parallel_state
