// This rank's range of the sparse file that all ranks map. Returns null instead of a SIGBUS if the file system is full.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>

#include "windows.h"

namespace parallel_state {

class Arena {
 public:
  static constexpr std::size_t kIdleBytes = 256 << 20;

  // `windows` outlives this. Descriptor -1: back_with_memory needs none.
  Arena(Windows& windows, int descriptor, std::size_t file_offset);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(std::size_t bytes);
  void release(void* block);

  // Returns free memory to the system. Tensors may outlive the group.
  void end();

  std::size_t bytes();
  void trim();

  // A failed peer may still write to blocks, so none is reused.
  void retire();

 private:
  struct Block {
    char* at;
    bool backed;
  };

  bool back(char* at, std::size_t bytes);
  void shrink();

  Windows& windows_;
  const int descriptor_;
  const std::size_t file_offset_;
  const int generation_;
  std::mutex mutex_;
  std::size_t used_ = 0;
  std::size_t idle_ = 0;
  std::size_t most_idle_ = kIdleBytes;
  bool retired_ = false;
  std::map<std::size_t, std::deque<Block>> free_;
  std::unordered_map<void*, std::size_t> live_;
};

}  // namespace parallel_state
