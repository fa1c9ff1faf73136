// Allocates tensors from this rank's part of the memory that all ranks of a group map.
//
// The part is a range of a sparse file, mapped as it is used. Freed blocks keep their memory for reuse, up to
// kIdleBytes in total; the memory beyond that returns to the system. Addresses stay valid. On a full file system
// `allocate` returns null; it doesn't leave a SIGBUS to the first write. Thread-safe.
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

  // `windows` maps the file behind `descriptor` from `file_offset` on. It must outlive this object. The descriptor is
  // duplicated; -1 if back_with_memory needs none.
  Arena(Windows& windows, int descriptor, std::size_t file_offset);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns at least `bytes`, page-aligned; null if memory, addresses or the range are used up.
  void* allocate(std::size_t bytes);
  void release(void* block);

  // Returns free memory to the system after a group ended in good order. Tensors may outlive the group.
  void end();

  // Stops allocating and reusing blocks: a failed peer may still write to them.
  void retire();

 private:
  struct Block {
    char* at;
    bool backed;  // has memory behind it
  };

  bool back(char* at, std::size_t bytes);
  void shrink();

  Windows& windows_;
  const int descriptor_;
  const std::size_t file_offset_;
  const int generation_;
  std::mutex mutex_;
  std::size_t used_ = 0;  // addresses handed out so far
  std::size_t idle_ = 0;  // free bytes that still have memory
  std::size_t most_idle_ = kIdleBytes;
  bool retired_ = false;
  std::map<std::size_t, std::deque<Block>> free_;  // by class size; the last freed, being cached, is reused first
  std::unordered_map<void*, std::size_t> live_;
};

}  // namespace parallel_state
