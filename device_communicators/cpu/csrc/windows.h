// Maps a range of a shared file on demand, in windows that never move. It keeps no descriptor: from size 0, mremap maps
// the file again. Thread-safe: look-ups take no lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace parallel_state {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = 2 << 20;

// False without memory, instead of a SIGBUS at the first write. Without a descriptor (-1) it needs MADV_POPULATE_WRITE
// (Linux 5.14).
bool back_with_memory(void* at, std::size_t bytes, int descriptor, std::size_t offset);
bool has_populate();

// Returns 0, or the errno (before Linux 6.1, or denied).
int want_huge_pages();

// On a huge page if the block fills one.
std::size_t block_offset(std::size_t used, std::size_t bytes);

class Windows {
 public:
  static constexpr std::uint64_t kOutside = ~std::uint64_t{0};

  // Owns `first_page`. For huge pages the range must begin at a multiple of one in its file.
  Windows(void* first_page, std::size_t capacity, std::size_t first_window_bytes);
  ~Windows();
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;

  std::size_t capacity() const { return capacity_; }
  bool holds(std::uint64_t offset, std::size_t bytes) const {
    return bytes <= capacity_ && offset <= capacity_ - bytes;
  }

  // Null if the kernel can't map them, or there is no address space left.
  char* at(std::uint64_t offset, std::size_t bytes);

  // kOutside if the bytes aren't in one window.
  std::uint64_t offset_of(const void* address, std::size_t bytes) const;

 private:
  static constexpr int kMost = 64;

  struct Window {
    char* base;
    std::size_t offset;
    std::size_t bytes;
  };

  char* find(std::uint64_t offset, std::size_t bytes) const;
  bool map(std::size_t start, std::size_t bytes);

  char* const first_page_;
  const std::size_t capacity_;
  const std::size_t first_window_bytes_;
  std::mutex mutex_;
  std::atomic<int> count_{0};  // release after a window is written, acquire before it is read
  Window windows_[kMost];
};

}  // namespace parallel_state
