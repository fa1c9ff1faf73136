// Memory for tensors that all ranks of a group have mapped: this rank's part, from which it allocates by itself.
//
// The part is a stretch of a sparse file, mapped as it is used. Freed blocks keep their memory for the next tensor of
// about their size, up to kIdleBytes while the group lives; the memory of others goes back to the system, their
// addresses stay. A full file system is an answer of `allocate`, and not a SIGBUS at the first write.
// Thread-safe: a tensor may be freed by any thread.
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

  // In `windows`, of the file behind `descriptor` from `file_offset` on, for as long as this lives. The descriptor is
  // duplicated; -1 where back_with_memory needs none.
  Arena(Windows& windows, int descriptor, std::size_t file_offset);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // At least `bytes`, aligned to a page; null where there is no room: of memory, of addresses, or in the stretch.
  void* allocate(std::size_t bytes);
  void release(void* block);

  // The group has ended in good order: what is free goes back to the system, though tensors may live on.
  void end();

  // From now on nothing is used again: a peer that was given up may still write where it was told to.
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
  std::size_t used_ = 0;  // addresses handed out at one time or another
  std::size_t idle_ = 0;  // bytes of memory behind blocks that are free
  std::size_t most_idle_ = kIdleBytes;
  bool retired_ = false;
  std::map<std::size_t, std::deque<Block>> free_;  // by size of the class; the last freed is warm, and taken first
  std::unordered_map<void*, std::size_t> live_;
};

}  // namespace parallel_state
