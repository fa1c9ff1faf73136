#include <algorithm>

#include "copy.h"
#include "host_group.h"
#include "share.h"

namespace parallel_state {

Status HostGroup::all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op, double timeout_s) {
  const auto digest = static_cast<std::uint64_t>(dtype);
  begin(Kind::kAllReduce, count, Method::kAllReduce, timeout_s, digest, static_cast<int>(op));
  return reduce_all(out, in, count, dtype, op);
}

Status HostGroup::reduce_all(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op) {
  if (area_ranks_ != 0 && op != ReduceOp::kTreeSum && count != 0 && count * size_of(dtype) >= chain_bytes_) {
    const Status status = chained_all_reduce(static_cast<char*>(out), static_cast<const char*>(in), count, dtype, op);
    if (status == Status::kTimedOut && failure_.reporter < 0) failure_.suspect = last_of_all();
    return status;
  }
  if (count * size_of(dtype) <= tuning_.one_shot_bytes) return one_shot_all_reduce(out, in, count, dtype, op);
  return large_all_reduce(static_cast<char*>(out), static_cast<const char*>(in), count, dtype, op);
}

Status HostGroup::one_shot_all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op) {
  const std::size_t bytes = count * size_of(dtype);
  const Slot slot = next_slot(bytes);
  RETURN_IF_FAILED(reuse(*slot.used));
  const std::uint64_t flag = offer(in, bytes, out, bytes);
  if (flag == 0) copy(place(rank_, slot), in, bytes);
  const std::uint64_t tick = *slot.used = publish(flag);
  RETURN_IF_FAILED(wait_all(tick));
  Inputs inputs;
  RETURN_IF_FAILED(hear(inputs, tick, flag, bytes));
  if (inputs.shared == size_) return reduce_shared(out, inputs, count, dtype, op);
  const void* sources[kMaxRanks];
  for (int rank = 0; rank < size_; ++rank) {
    sources[rank] = inputs.of(rank, place(rank, slot));
    note_read(rank, bytes);
  }
  sources[rank_] = in;
  void* const to = flag != 0 && out == in ? place(rank_, slot) : out;
  reduce_function(dtype, op)(&to, 1, sources, size_, count);
  if (inputs.shared == 0) return Status::kDone;
  RETURN_IF_FAILED(close());
  if (to != out) copy(out, to, bytes);
  return Status::kDone;
}

// Per chunk: (A) copy the others' slices to the own slot; (B) reduce the own slice from all slots into the own slot and
// the output; (C) copy the others' reduced slices. Step i does B of chunk i-1, A of chunk i, C of chunk i-2. Four slots
// are enough: A of chunk c + 4 follows this rank's B of c + 3, which waits for all others' A of c + 3, and so for their
// C of chunk c. Only one rank per slice reads a shared input in place, in B, and overwrites it then.
Status HostGroup::large_all_reduce(char* out, const char* in, std::size_t count, Dtype dtype, ReduceOp op) {
  const std::size_t width = size_of(dtype);
  const Slices slices(count, width, size_, tuning_.large_slot_bytes);
  const ReduceFunction reduce = reduce_function(dtype, op);
  const std::uint64_t flag = offer(in, count * width, out, count * width);
  Inputs inputs;
  std::uint64_t written[kLargeSlots] = {}, reduced[kLargeSlots] = {};
  const auto slice = [&](int owner, std::size_t index, int rank) {
    return place(owner, large_slot(large_count_ + index)) + rank * slices.slice * width;
  };
  for (std::size_t step = 0; step < slices.chunks + 2; ++step) {
    if (step >= 1 && step <= slices.chunks) {
      const std::size_t index = step - 1, start = slices.start(index, rank_) * width;
      RETURN_IF_FAILED(wait_all(written[index % kLargeSlots]));
      if (index == 0) {
        RETURN_IF_FAILED(hear(inputs, written[0], flag, count * width));
        if (inputs.shared == size_) return reduce_shared(out, inputs, count, dtype, op);
      }
      const void* sources[kMaxRanks];
      for (int rank = 0; rank < size_; ++rank) {
        const bool is_shared = (inputs.is_shared >> rank & 1) != 0;
        sources[rank] = is_shared ? inputs.at[rank] + start : slice(rank, index, rank_);
        note_read(rank, slices.length(index, rank_) * width);
      }
      sources[rank_] = in + start;
      char* const outs[] = {out + start, slice(rank_, index, rank_)};
      reduce_and_share(outs, 2, sources, size_, slices.length(index, rank_), width, reduce);
      reduced[index % kLargeSlots] = publish(flag);
    }
    if (step < slices.chunks) {
      if (step < kLargeSlots) RETURN_IF_FAILED(reuse(*large_slot(large_count_ + step).used));
      for (int rank = 0; rank < size_; ++rank) {
        if (rank == rank_ || flag != 0) continue;
        copy(slice(rank_, step, rank), in + slices.start(step, rank) * width, slices.length(step, rank) * width);
      }
      written[step % kLargeSlots] = publish(flag);
    }
    if (step >= 2) {
      const std::size_t index = step - 2;
      RETURN_IF_FAILED(wait_all(reduced[index % kLargeSlots]));
      for (int offset = 1; offset < size_; ++offset) {
        const int rank = (rank_ + offset) % size_;
        copy(out + slices.start(index, rank) * width, slice(rank, index, rank), slices.length(index, rank) * width);
        note_read(rank, slices.length(index, rank) * width);
      }
    }
  }
  for (std::size_t back = 0; back < std::min<std::size_t>(slices.chunks, kLargeSlots); ++back) {
    *large_slot(large_count_ + slices.chunks - 1 - back).used = back < 3 ? tick_ : tick_ - 2;
  }
  large_count_ += slices.chunks;
  return Status::kDone;
}

}  // namespace parallel_state
