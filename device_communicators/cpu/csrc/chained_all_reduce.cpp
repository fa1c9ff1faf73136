// All-reduce on a host whose memory is not equally near: each area, a NUMA node say, has ranks that follow each other.
//
// In two phases of all ranks each slice would be read from every rank's slot: (size - ranks of an area) times the
// tensor would cross between areas, twice. Here a sum goes along the areas: the ranks of the first one add up their
// inputs, a slice each; the rank of the same index in the next area begins with that sum and adds its own area's
// inputs, and so on. The last area has the result, which the ranks of the other areas fetch, a slice each, and then
// share among themselves. What crosses is each sum once per boundary, and each result once per area but the last:
// (areas - 1) * (wide + width) bytes an element, and no sum in this order takes less. Elements are added in the order
// of the ranks, with one rounding, as in the other ways: the bits are the same.
#include <algorithm>

#include "copy.h"
#include "host_group.h"

namespace parallel_state {

void HostGroup::set_areas(int ranks, std::int64_t from_bytes) {
  area_ranks_ = ranks;
  chain_bytes_ = from_bytes < 0 ? tuning_.chain_bytes : static_cast<std::size_t>(from_bytes);
}

// Chunk c: (A) write the slices of the area's other ranks into one's slot; (B) add up one's own slice, after the area
// before; (C) fetch the result of one's slice from the last area; (D) copy the others' results from their slots. Step i
// does B of chunk i-1, A of chunk i, C of chunk i-3, D of chunk i-4, in this order: an area that waits for the one
// before has B behind it for as long as that one's C and D are late. Each of A, B and C is a tick on every rank.
//
// Who has published B of chunk c + 4 has done step c + 4, with D of chunk c: before A of chunk c + 8 all have, and
// eight slots are enough. They are halves of the large ones.
Status HostGroup::chained_all_reduce(char* out, const char* in, std::size_t count, Dtype dtype, ReduceOp op,
                                     std::uint64_t call) {
  constexpr std::size_t kSlots = 2 * kLargeSlots, kFetch = 3, kShare = 4;
  const int ranks = area_ranks_, first = rank_ / ranks * ranks, index = rank_ - first;
  const bool begins = first == 0, ends = first + ranks == size_;
  const int finisher = size_ - ranks + index;  // of this rank's slice
  const std::size_t width = size_of(dtype), wide = wide_size_of(dtype);
  const std::size_t slot_bytes = tuning_.large_slot_bytes / 2;
  const Slices slices(count, width, ranks, slot_bytes * ranks * width / (ranks * width + wide));
  const PartFunction reduce = part_function(dtype, op);
  std::uint64_t written[kSlots] = {}, reduced[kSlots] = {}, fetched[kSlots] = {};
  const auto slice = [&](int owner, std::size_t chunk, int which) {
    return place(owner, large_slot(0)) + chunk % kSlots * slot_bytes + which * slices.slice * width;
  };
  const auto sums = [&](int owner, std::size_t chunk) { return slice(owner, chunk, ranks); };
  RETURN_IF_FAILED(reuse(0));
  publish(call);  // the call before may have read the slots last: all ranks say that they are out of it
  for (int slot = 0; slot < kLargeSlots; ++slot) RETURN_IF_FAILED(reuse(large_used_[slot]));
  for (std::size_t step = 0; step < slices.chunks + kShare; ++step) {
    RETURN_IF_FAILED(reuse(0));
    if (step >= 1 && step <= slices.chunks) {
      const std::size_t chunk = step - 1, start = slices.start(chunk, index) * width;
      const std::size_t length = slices.length(chunk, index);
      RETURN_IF_FAILED(wait_ranks(first, first + ranks, written[chunk % kSlots], call));
      if (!begins) RETURN_IF_FAILED(wait_one(rank_ - ranks, tick_ + 1, call));  // the tick that this B will be
      const void* sources[kMaxRanks];
      int sources_count = 0;
      if (!begins) {
        sources[sources_count++] = sums(rank_ - ranks, chunk);
        note_read(rank_ - ranks, length * wide);
      }
      for (int other = 0; other < ranks; ++other) {
        sources[sources_count++] = other == index ? in + start : slice(first + other, chunk, index);
      }
      char* const to = ends ? slice(rank_, chunk, index) : sums(rank_, chunk);
      reduce(to, sources, begins ? 0 : 1, sources_count, length, ends ? size_ : 0);
      if (ends) copy(out + start, to, length * width);
      reduced[chunk % kSlots] = publish(call);
    }
    if (step < slices.chunks) {
      if (step >= kSlots) RETURN_IF_FAILED(wait_all(reduced[(step - kSlots + kShare) % kSlots], call));
      for (int other = 0; other < ranks; ++other) {
        if (other == index) continue;
        copy(slice(rank_, step, other), in + slices.start(step, other) * width, slices.length(step, other) * width);
      }
      written[step % kSlots] = publish(call);
    }
    if (step >= kFetch && step < slices.chunks + kFetch) {
      const std::size_t chunk = step - kFetch, bytes = slices.length(chunk, index) * width;
      if (!ends) {
        RETURN_IF_FAILED(wait_one(finisher, reduced[chunk % kSlots], call));
        char* const to = slice(rank_, chunk, index);
        copy(to, slice(finisher, chunk, index), bytes);
        note_read(finisher, bytes);
        copy(out + slices.start(chunk, index) * width, to, bytes);
      }
      fetched[chunk % kSlots] = publish(call);
    }
    if (step >= kShare) {
      const std::size_t chunk = step - kShare;
      RETURN_IF_FAILED(wait_ranks(first, first + ranks, fetched[chunk % kSlots], call));
      for (int away = 1; away < ranks; ++away) {
        const int other = (index + away) % ranks;
        copy(out + slices.start(chunk, other) * width, slice(first + other, chunk, other),
             slices.length(chunk, other) * width);
      }
    }
  }
  // And that they are out of this one: who waits to use the slots again has published nothing since.
  std::fill_n(large_used_, kLargeSlots, publish(call) - 1);
  return Status::kDone;
}

// Where ranks wait for each other in a row, the awaited one may wait itself: who has published least holds up all.
int HostGroup::last_of_all() const {
  int last = suspect_;
  for (int rank = 0; rank < size_; ++rank) {
    if (lines_[rank].read() < lines_[last].read()) last = rank;
  }
  return last;
}

}  // namespace parallel_state
