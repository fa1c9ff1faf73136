#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace parallel_state {

struct SignalPipe {
  std::atomic<int> reader{-1};
  std::atomic<std::uint64_t> inode{0};
};

// Main thread only.
inline bool has_signal(const SignalPipe& pipe) {
  const int reader = pipe.reader.load(std::memory_order_relaxed);
  if (reader < 0) return true;
  // A program that closes all descriptors may reuse the number.
  struct stat info;
  const std::uint64_t inode = pipe.inode.load(std::memory_order_relaxed);
  if (inode != 0 && (fstat(reader, &info) != 0 || info.st_ino != inode)) return true;
  bool found = false;
  char numbers[64];
  while (read(reader, numbers, sizeof(numbers)) > 0) found = true;
  return found;
}

}  // namespace parallel_state
