#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "forks.h"

namespace parallel_state {
namespace {

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Steps of at most an eighth of the size, so that freed blocks fit again.
std::size_t class_of(std::size_t bytes) {
  std::size_t step = kPage;
  while (step * 16 < bytes) step *= 2;
  return round_up(std::max(bytes, kPage), step);
}

}  // namespace

Arena::Arena(Windows& windows, int descriptor, std::size_t file_offset)
    : windows_(windows),
      descriptor_(descriptor < 0 ? -1 : fcntl(descriptor, F_DUPFD_CLOEXEC, 0)),
      file_offset_(file_offset),
      generation_(fork_generation()) {}

Arena::~Arena() {
  if (descriptor_ >= 0) close(descriptor_);
}

void* Arena::allocate(std::size_t bytes) {
  if (bytes > windows_.capacity()) return nullptr;
  const std::size_t size = class_of(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto found = free_.lower_bound(size); found != free_.end() && found->first <= size + size / 4; ++found) {
    if (found->second.empty()) continue;
    const Block block = found->second.back();
    if (!block.backed && !back(block.at, found->first)) return nullptr;
    found->second.pop_back();
    if (block.backed) idle_ -= found->first;
    live_.emplace(block.at, found->first);
    return block.at;
  }
  const std::size_t start = block_offset(used_, size);
  char* const block = retired_ ? nullptr : windows_.at(start, size);
  if (block == nullptr || !back(block, size)) return nullptr;
  used_ = start + size;
  live_.emplace(block, size);
  return block;
}

bool Arena::back(char* at, std::size_t bytes) {
  return back_with_memory(at, bytes, descriptor_, file_offset_ + windows_.offset_of(at, bytes));
}

void Arena::release(void* block) {
  if (generation_ != fork_generation()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(block);
  if (found == live_.end()) return;
  if (!retired_) {
    free_[found->second].push_back({static_cast<char*>(block), true});
    idle_ += found->second;
    shrink();
  }
  live_.erase(found);
}

void Arena::shrink() {
  for (auto found = free_.rbegin(); found != free_.rend() && idle_ > most_idle_; ++found) {
    for (Block& block : found->second) {
      if (idle_ <= most_idle_) break;
      if (!block.backed) continue;
      if (madvise(block.at, found->first, MADV_REMOVE) != 0) return;
      block.backed = false;
      idle_ -= found->first;
    }
  }
}

void Arena::end() {
  if (generation_ != fork_generation()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  most_idle_ = 0;
  shrink();
}

std::size_t Arena::bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t all = idle_;
  for (const auto& [block, bytes] : live_) all += bytes;
  return all;
}

void Arena::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t most_idle = std::exchange(most_idle_, 0);
  shrink();
  most_idle_ = most_idle;
}

void Arena::retire() {
  const std::lock_guard<std::mutex> lock(mutex_);
  retired_ = true;
  free_.clear();
}

}  // namespace parallel_state
