#include "windows.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>

namespace parallel_state {
namespace {

constexpr std::size_t kHop = 64 << 20;

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

bool populate(void* at, std::size_t bytes) {
  int result;
  do {
    result = madvise(at, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

// Maps the file behind `page` once more, from that page on.
char* map_again(void* page, std::size_t bytes) {
  void* const made = mremap(page, 0, bytes, MREMAP_MAYMOVE);
  return made == MAP_FAILED ? nullptr : static_cast<char*>(made);
}

}  // namespace

bool has_populate() {
  static const bool can =
      madvise(nullptr, 0, MADV_POPULATE_WRITE) == 0;  // an advice that is unknown fails on nothing, too
  return can;
}

bool back_with_memory(void* at, std::size_t bytes, int descriptor, std::size_t offset) {
  // Faults are taken here, all at once, and not in the first collective; where the kernel can't, they come later.
  if (descriptor >= 0) {
    if (posix_fallocate(descriptor, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) return false;
    populate(at, bytes);
    return true;
  }
  if (populate(at, bytes)) return true;
  madvise(at, bytes, MADV_REMOVE);  // gives back what it got
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
  for (int index = count_.load(std::memory_order_acquire) - 1; index >= 0; --index) {  // the last is the largest
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
  if (char* const found = find(offset, bytes)) return found;  // another thread was here
  const int count = count_.load(std::memory_order_relaxed);
  if (count == kMost) return nullptr;
  const std::size_t start = offset / kPage * kPage;
  const std::size_t needed = (offset + bytes - start + kPage - 1) / kPage * kPage;
  std::size_t wanted = count == 0 ? first_window_bytes_ : std::min(capacity_, 2 * windows_[count - 1].bytes);
  wanted = std::min(std::max(wanted, needed), capacity_);
  // A window that would go beyond the end begins earlier: it overlaps others then, which show the same bytes.
  if (!map(std::min(start, capacity_ - wanted), wanted) && !map(start, needed)) return nullptr;
  return find(offset, bytes);
}

bool Windows::map(std::size_t start, std::size_t bytes) {
  const int count = count_.load(std::memory_order_relaxed);
  // From the page that is mapped and lies nearest before the start.
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
  char* hop = nullptr;  // over what nobody has asked for, in steps that take little address space
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
  char* const made = page == nullptr ? nullptr : map_again(page, bytes);
  if (hop != nullptr) munmap(hop, hop_bytes);
  if (made == nullptr) return false;
  windows_[count] = {made, start, bytes};
  count_.store(count + 1, std::memory_order_release);
  return true;
}

}  // namespace parallel_state
