#include "windows.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace parallel_state {
namespace {

constexpr std::size_t kHop = 64 << 20;

std::atomic<bool> huge{false};

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

bool populate(void* at, std::size_t bytes) {
  int result;
  do {
    result = madvise(at, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

char* reserve(std::size_t bytes, std::size_t offset) {
  void* const found = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  const std::size_t before = (offset - reinterpret_cast<std::uintptr_t>(found)) % kHugePage;
  char* const made = static_cast<char*>(found) + before;
  if (before != 0) munmap(found, before);
  munmap(made + bytes, kHugePage - before);
  return made;
}

char* map_again(void* page, std::size_t bytes, std::size_t offset = 0) {
  char* const at = huge && bytes >= kHugePage ? reserve(bytes, offset) : nullptr;
  void* const made = at == nullptr ? mremap(page, 0, bytes, MREMAP_MAYMOVE)
                                   : mremap(page, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at);
  if (made != MAP_FAILED) return static_cast<char*>(made);
  if (at != nullptr) munmap(at, bytes);
  return nullptr;
}

int collapse(void* at, std::size_t bytes) {
  const auto begin = (reinterpret_cast<std::uintptr_t>(at) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<std::uintptr_t>(at) + bytes) / kHugePage * kHugePage;
  if (begin >= end) return 0;
  void* const first = reinterpret_cast<void*>(begin);
  madvise(first, end - begin, MADV_HUGEPAGE);  // so that other processes map them as huge pages, too
  return madvise(first, end - begin, MADV_COLLAPSE) == 0 ? 0 : errno;
}

}  // namespace

int want_huge_pages() {
  static const int problem = [] {
    const int file = memfd_create("parallel_state-huge", MFD_CLOEXEC);
    char* const at = reserve(kHugePage, 0);
    int error = file < 0 || at == nullptr || ftruncate(file, kHugePage) != 0 ? errno : 0;
    if (error == 0 && mmap(at, kHugePage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
      error = errno;
    }
    if (error == 0) {
      *at = 1;
      error = collapse(at, kHugePage);
    }
    if (at != nullptr) munmap(at, kHugePage);
    if (file >= 0) close(file);
    return error;
  }();
  huge = problem == 0;
  return problem;
}

std::size_t block_offset(std::size_t used, std::size_t bytes) {
  return huge && bytes >= kHugePage ? (used + kHugePage - 1) / kHugePage * kHugePage : used;
}

bool has_populate() {
  static const bool can = madvise(nullptr, 0, MADV_POPULATE_WRITE) == 0;  // an unknown advice fails even on 0 bytes
  return can;
}

bool back_with_memory(void* at, std::size_t bytes, int descriptor, std::size_t offset) {
  // Faults now, not in the first collective.
  if (descriptor >= 0) {
    if (posix_fallocate(descriptor, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) return false;
    populate(at, bytes);
    if (huge) collapse(at, bytes);
    return true;
  }
  if (populate(at, bytes)) {
    if (huge) collapse(at, bytes);
    return true;
  }
  madvise(at, bytes, MADV_REMOVE);
  return false;
}

Windows::Windows(void* first_page, std::size_t capacity, std::size_t first_window_bytes)
    : first_page_(static_cast<char*>(first_page)), capacity_(capacity), first_window_bytes_(first_window_bytes) {}

Windows::~Windows() {
  for (int index = 0; index < count_.load(std::memory_order_acquire); ++index) {
    munmap(windows_[index].base, windows_[index].bytes);
  }
  munmap(first_page_, kPage);
}

char* Windows::find(std::uint64_t offset, std::size_t bytes) const {
  for (int index = count_.load(std::memory_order_acquire) - 1; index >= 0; --index) {
    const Window& window = windows_[index];
    if (offset < window.offset) continue;
    const std::size_t inside = offset - window.offset;
    if (inside <= window.bytes && bytes <= window.bytes - inside) return window.base + inside;
  }
  return nullptr;
}

std::uint64_t Windows::offset_of(const void* address, std::size_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (int index = count_.load(std::memory_order_acquire) - 1; index >= 0; --index) {
    const Window& window = windows_[index];
    const auto base = reinterpret_cast<std::uintptr_t>(window.base);
    if (at < base || at - base >= window.bytes) continue;
    return bytes <= window.bytes - (at - base) ? window.offset + (at - base) : kOutside;
  }
  return kOutside;
}

char* Windows::at(std::uint64_t offset, std::size_t bytes) {
  if (!holds(offset, bytes)) return nullptr;
  if (char* const found = find(offset, bytes)) return found;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (char* const found = find(offset, bytes)) return found;
  const int count = count_.load(std::memory_order_relaxed);
  if (count == kMost) return nullptr;
  const std::size_t start = offset / kPage * kPage;
  const std::size_t needed = (offset + bytes - start + kPage - 1) / kPage * kPage;
  std::size_t wanted = count == 0 ? first_window_bytes_ : std::min(capacity_, 2 * windows_[count - 1].bytes);
  wanted = std::min(std::max(wanted, needed), capacity_);
  // A window that would exceed the capacity begins earlier, and overlaps others.
  if (!map(std::min(start, capacity_ - wanted), wanted) && !map(start, needed)) return nullptr;
  return find(offset, bytes);
}

bool Windows::map(std::size_t start, std::size_t bytes) {
  const int count = count_.load(std::memory_order_relaxed);
  char* page = first_page_;
  std::size_t at = 0;
  for (int index = 0; index < count; ++index) {
    const Window& window = windows_[index];
    if (window.offset > start) continue;
    const std::size_t last = std::min(start, window.offset + window.bytes - kPage);
    if (last < at) continue;
    at = last;
    page = window.base + (last - window.offset);
  }
  char* hop = nullptr;  // skips unrequested bytes, to save address space
  std::size_t hop_bytes = 0;
  while (page != nullptr && at < start) {
    const std::size_t step = std::min(start - at, kHop);
    char* const next = map_again(page, step + kPage);
    if (hop != nullptr) munmap(hop, hop_bytes);
    hop = next;
    hop_bytes = step + kPage;
    page = next == nullptr ? nullptr : next + step;
    at += step;
  }
  char* const made = page == nullptr ? nullptr : map_again(page, bytes, start);
  if (hop != nullptr) munmap(hop, hop_bytes);
  if (made == nullptr) return false;
  windows_[count] = {made, start, bytes};
  count_.store(count + 1, std::memory_order_release);
  return true;
}

}  // namespace parallel_state
