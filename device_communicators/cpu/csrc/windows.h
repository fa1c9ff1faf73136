// A stretch of a shared file as far as this process uses it: windows that are mapped when they are asked for, each
// about twice as large as the one before, and never moved. So the address space that is taken follows the use, and what
// was handed out stays valid while the object lives.
//
// No descriptor is kept: from a size of 0, mremap maps the file of a shared mapping once more, beginning with the page
// that it is given. A kernel that can't, or a process without address space, gets null from `at`.
// Thread-safe: looking up takes no lock, mapping does.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace parallel_state {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = 2 << 20;

// Puts memory behind `bytes` at `at`, a mapping of a file from `offset` on. False where there is none left: a full file
// system is an answer, and not a SIGBUS at the first write. Without a descriptor (-1) the kernel must have
// MADV_POPULATE_WRITE (Linux 5.14).
bool back_with_memory(void* at, std::size_t bytes, int descriptor, std::size_t offset);
bool has_populate();

// From now on this process has what it backs with memory made of huge pages, and maps windows so that these can be used
// as such. Answers 0, or the errno with which the kernel (before Linux 6.1, or told to deny them) makes none: nothing
// is changed then.
int want_huge_pages();

// Where in a stretch a block of `bytes` begins that has `used` bytes before it: on a huge page, if it fills one.
std::size_t block_offset(std::size_t used, std::size_t bytes);

class Windows {
 public:
  static constexpr std::uint64_t kOutside = ~std::uint64_t{0};

  // Takes over `first_page`, a mapping of the stretch's first page; offsets count from it, up to `capacity`. For huge
  // pages it begins at a multiple of one in its file.
  Windows(void* first_page, std::size_t capacity, std::size_t first_window_bytes);
  ~Windows();
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;

  std::size_t capacity() const { return capacity_; }
  bool holds(std::uint64_t offset, std::size_t bytes) const {
    return bytes <= capacity_ && offset <= capacity_ - bytes;
  }

  // Where `bytes` from `offset` on, which the stretch holds, are mapped; null where they can't be.
  char* at(std::uint64_t offset, std::size_t bytes);

  // The other way round; kOutside where `bytes` at `address` aren't in one window.
  std::uint64_t offset_of(const void* address, std::size_t bytes) const;

 private:
  // Each is twice the one before, so there are few; only where the address space ran short they are as small as can be.
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
  std::mutex mutex_;           // who maps
  std::atomic<int> count_{0};  // release after a window was written, acquire before it is read
  Window windows_[kMost];
};

}  // namespace parallel_state
