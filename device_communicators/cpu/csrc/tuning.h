#pragma once

#include <algorithm>
#include <cstddef>

namespace parallel_state {

constexpr int kMaxRanks = 64;
constexpr int kSmallSlots = 16;  // with 2, writing costs twice as much
constexpr int kLargeSlots = 4;

// Measured, except `chain_bytes`. With larger slots many ranks would fill /dev/shm.
struct Tuning {
  std::size_t small_slot_bytes;
  std::size_t large_slot_bytes;
  std::size_t one_shot_bytes;         // all_reduce is one exchange up to here
  std::size_t symmetric_slots_bytes;  // symmetric tensors use slots up to here
  std::size_t chain_bytes;            // all_reduce goes from area to area from here on
};

inline Tuning tuning_of(int ranks) {
  constexpr std::size_t kKiB = 1024;
  if (ranks <= 2) return {64 * kKiB, 256 * kKiB, 256 * kKiB, 4 * kKiB, 1024 * kKiB};
  if (ranks <= 4) return {64 * kKiB, 256 * kKiB, 16 * kKiB, 8 * kKiB, 1024 * kKiB};
  if (ranks <= 8) return {64 * kKiB, 256 * kKiB, 8 * kKiB, 8 * kKiB, 256 * kKiB};
  return {16 * kKiB, 128 * kKiB, 4 * kKiB, 4 * kKiB, 64 * kKiB};
}

// Slices are whole cache lines; the last ones are shorter, or empty.
struct Slices {
  Slices(std::size_t count, std::size_t width, int ranks, std::size_t chunk_bytes) : count(count), ranks(ranks) {
    const std::size_t line = std::max<std::size_t>(1, 64 / width);
    const std::size_t longest = std::max(line, chunk_bytes / width / ranks / line * line) * ranks;
    const std::size_t parts = std::max<std::size_t>(1, (count + longest - 1) / longest) * ranks;
    slice = (count + parts * line - 1) / (parts * line) * line;
    chunks = (count + slice * ranks - 1) / (slice * ranks);
  }

  std::size_t start(std::size_t chunk, int rank) const { return std::min(count, (chunk * ranks + rank) * slice); }
  std::size_t length(std::size_t chunk, int rank) const { return std::min(slice, count - start(chunk, rank)); }

  std::size_t count;
  std::size_t ranks;
  std::size_t chunks;
  std::size_t slice;
};

}  // namespace parallel_state
