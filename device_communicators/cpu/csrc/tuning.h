// How big the slots are, at which sizes one way of doing a collective hands over to the next, and how a large one is
// cut. The values were measured.
#pragma once

#include <algorithm>
#include <cstddef>

namespace parallel_state {

constexpr int kMaxRanks = 64;
constexpr int kSmallSlots = 16;  // with two, the slot stays in the other core's cache and writing it costs twice
constexpr int kLargeSlots = 4;   // what the pipeline of large_all_reduce needs

// By the number of ranks. With two, one exchange won up to 256 KiB (19 us against 21 in two phases, cores without a
// common cache), with four up to 16 KiB, with eight up to 8: each rank reads what all have written. Chunks of 128 KiB
// and 256 KiB came out alike. Many ranks have smaller slots, or a segment would fill /dev/shm.
// From where on a chain of areas pays wasn't measured, as no machine with two nodes was at hand: it saves traffic
// between them by the number of ranks an area, and costs two more exchanges. Symmetric tensors need two exchanges but
// no copy: that pays from 8 KiB on with two ranks, from 16 with four.
struct Tuning {
  std::size_t small_slot_bytes;
  std::size_t large_slot_bytes;       // a chunk of a large tensor
  std::size_t one_shot_bytes;         // up to here, all_reduce is one exchange in which each rank reads all inputs
  std::size_t symmetric_slots_bytes;  // up to here, symmetric tensors go through slots like others
  std::size_t chain_bytes;            // from here on, all_reduce goes from area to area, where there are several
};

inline Tuning tuning_of(int ranks) {
  constexpr std::size_t kKiB = 1024;
  if (ranks <= 2) return {64 * kKiB, 256 * kKiB, 256 * kKiB, 4 * kKiB, 1024 * kKiB};
  if (ranks <= 4) return {64 * kKiB, 256 * kKiB, 16 * kKiB, 8 * kKiB, 1024 * kKiB};
  if (ranks <= 8) return {64 * kKiB, 256 * kKiB, 8 * kKiB, 8 * kKiB, 256 * kKiB};
  return {16 * kKiB, 128 * kKiB, 4 * kKiB, 4 * kKiB, 64 * kKiB};
}

// `count` elements cut into chunks that fit `chunk_bytes`, and each chunk into a slice for each rank, as even as can
// be. Slices are whole cache lines; at the end they are shorter, or empty.
struct Slices {
  Slices(std::size_t count, std::size_t width, int ranks, std::size_t chunk_bytes) : count(count), ranks(ranks) {
    const std::size_t line = std::max<std::size_t>(1, 64 / width);
    const std::size_t longest = std::max(line, chunk_bytes / width / ranks / line * line) * ranks;  // of a chunk
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
