// For hosts whose memory has areas, such as NUMA nodes, each with consecutive ranks. In the first area each rank adds
// up one slice of its area's inputs. The rank of the same index in the next area begins with that sum, and so on. The
// other areas' ranks fetch the last area's result and share it.
#include <algorithm>

#include "copy.h"
#include "host_group.h"

namespace parallel_state {

void HostGroup::set_areas(int ranks, std::int64_t from_bytes) {
  area_ranks_ = ranks;
  chain_bytes_ = from_bytes < 0 ? tuning_.chain_bytes : static_cast<std::size_t>(from_bytes);
}

// Per chunk: (A) copy the slices of the area's other ranks to the own slot; (B) add up the own slice, after the
// previous area; (C) fetch the own slice's result from the last area; (D) copy the area's other results. Step i does B
// of chunk i-1, A of chunk i, C of chunk i-3, D of chunk i-4, which hides delays of the previous area. Eight slots,
// halves of the large ones, are enough: a rank that published B of chunk c + 4 has done D of chunk c, and all have
// before A of chunk c + 8.
Status HostGroup::chained_all_reduce(char* out, const char* in, std::size_t count, Dtype dtype, ReduceOp op) {
  constexpr std::size_t kSlots = 2 * kLargeSlots, kFetch = 3, kShare = 4;
  const int ranks = area_ranks_, first = rank_ / ranks * ranks, index = rank_ - first;
  const bool begins = first == 0, ends = first + ranks == size_;
  const int finisher = size_ - ranks + index;
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
  publish();
  for (int slot = 0; slot < kLargeSlots; ++slot) RETURN_IF_FAILED(reuse(large_used_[slot]));
  for (std::size_t step = 0; step < slices.chunks + kShare; ++step) {
    RETURN_IF_FAILED(reuse(0));
    if (step >= 1 && step <= slices.chunks) {
      const std::size_t chunk = step - 1, start = slices.start(chunk, index) * width;
      const std::size_t length = slices.length(chunk, index);
      RETURN_IF_FAILED(wait_ranks(first, first + ranks, written[chunk % kSlots]));
      if (!begins) RETURN_IF_FAILED(wait_one(rank_ - ranks, tick_ + 1));
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
      reduced[chunk % kSlots] = publish();
    }
    if (step < slices.chunks) {
      if (step >= kSlots) RETURN_IF_FAILED(wait_all(reduced[(step - kSlots + kShare) % kSlots]));
      for (int other = 0; other < ranks; ++other) {
        if (other == index) continue;
        copy(slice(rank_, step, other), in + slices.start(step, other) * width, slices.length(step, other) * width);
      }
      written[step % kSlots] = publish();
    }
    if (step >= kFetch && step < slices.chunks + kFetch) {
      const std::size_t chunk = step - kFetch, bytes = slices.length(chunk, index) * width;
      if (!ends) {
        RETURN_IF_FAILED(wait_one(finisher, reduced[chunk % kSlots]));
        char* const to = slice(rank_, chunk, index);
        copy(to, slice(finisher, chunk, index), bytes);
        note_read(finisher, bytes);
        copy(out + slices.start(chunk, index) * width, to, bytes);
      }
      fetched[chunk % kSlots] = publish();
    }
    if (step >= kShare) {
      const std::size_t chunk = step - kShare;
      RETURN_IF_FAILED(wait_ranks(first, first + ranks, fetched[chunk % kSlots]));
      for (int away = 1; away < ranks; ++away) {
        const int other = (index + away) % ranks;
        copy(out + slices.start(chunk, other) * width, slice(first + other, chunk, other),
             slices.length(chunk, other) * width);
      }
    }
  }
  // All ranks have left this call if they publish anything later.
  std::fill_n(large_used_, kLargeSlots, publish() - 1);
  return Status::kDone;
}

// The awaited rank may wait itself: the rank with the lowest tick holds up all.
int HostGroup::last_of_all() const {
  int last = failure_.suspect;
  for (int rank = 0; rank < size_; ++rank) {
    if (lines_[rank].read() < lines_[last].read()) last = rank;
  }
  return last;
}

}  // namespace parallel_state
