// Memory for tensors that all ranks of a group have mapped: this rank's part, from which it allocates by itself.
//
// The part is a stretch of a sparse file. Freed blocks keep their memory for the next tensor of about their size, up to
// kIdleBytes in all; the memory of others goes back to the system, their addresses stay. A full file system is an answer
// of `allocate`, and not a SIGBUS at the first write.
// Thread-safe: a tensor may be freed by any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>

namespace parallel_state {

class Arena {
 public:
  static constexpr std::size_t kIdleBytes = 256 << 20;

  // `base` maps `capacity` bytes of the file behind `descriptor` from `file_offset` on, and is the caller's; the
  // descriptor is duplicated.
  Arena(void* base, std::size_t capacity, int descriptor, std::size_t file_offset);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // At least `bytes`, aligned to a page; null where there is no room.
  void* allocate(std::size_t bytes);
  void release(void* block);

  // From now on nothing is used again: a peer that was given up may still write where it was told to.
  void retire();

  bool contains(const void* address) const {
    const auto* const at = static_cast<const char*>(address);
    return at >= base_ && at < base_ + capacity_;
  }

 private:
  struct Block {
    char* at;
    bool backed;  // has memory behind it
  };

  bool back(char* at, std::size_t bytes);
  void shrink();

  char* const base_;
  const std::size_t capacity_;
  const int descriptor_;
  const std::size_t file_offset_;
  const int generation_;
  std::mutex mutex_;
  std::size_t used_ = 0;  // addresses handed out at one time or another
  std::size_t idle_ = 0;  // bytes of memory behind blocks that are free
  bool retired_ = false;
  std::map<std::size_t, std::deque<Block>> free_;  // by size of the class; the last freed is warm, and taken first
  std::unordered_map<void*, std::size_t> live_;
};

}  // namespace parallel_state
