// Tells the main thread of a Python program that a signal has come, without the interpreter lock.
#pragma once

#include <unistd.h>

#include <atomic>

namespace parallel_state {

// `descriptor`: readable once Python's signal handler has run, see base/wakeup.py; -1: unknown. Returns true if a
// signal may have come since the last call, then the caller runs Python's handlers. Main thread only.
inline bool has_signal(const std::atomic<int>& descriptor) {
  const int reader = descriptor.load(std::memory_order_relaxed);
  if (reader < 0) return true;
  bool found = false;
  char numbers[64];
  while (read(reader, numbers, sizeof(numbers)) > 0) found = true;
  return found;
}

}  // namespace parallel_state
