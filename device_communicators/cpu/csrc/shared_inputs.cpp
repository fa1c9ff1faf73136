// With its first tick of a call a rank publishes whether (a flag in the note) and where its input is in its arena. If
// any input is shared, a closing tick ends the call: no rank writes to its tensor before all have read it.
#include <algorithm>
#include <memory>

#include "copy.h"
#include "host_group.h"
#include "share.h"

namespace parallel_state {

void HostGroup::set_arenas(const std::vector<std::unique_ptr<Windows>>& arenas) {
  for (int rank = 0; rank < size_; ++rank) arenas_[rank] = arenas[rank].get();
  has_arenas_ = true;
}

std::uint64_t HostGroup::offer(const void* in, std::size_t in_bytes, const void* out, std::size_t out_bytes) {
  if (!has_arenas_ || in_bytes <= tuning_.symmetric_slots_bytes) return 0;
  const std::uint64_t in_at = arenas_[rank_]->offset_of(in, in_bytes);
  if (in_at == kPrivate) return 0;
  lines_[rank_].in_at.store(in_at, std::memory_order_relaxed);
  lines_[rank_].out_at.store(arenas_[rank_]->offset_of(out, out_bytes), std::memory_order_relaxed);
  return Counter::kFlag;
}

Status HostGroup::hear(Inputs& inputs, std::uint64_t tick, std::uint64_t own_flag, std::size_t bytes) {
  inputs.shared = 0;
  inputs.is_shared = 0;
  if (!has_arenas_ || bytes <= tuning_.symmetric_slots_bytes) return Status::kDone;
  for (int rank = 0; rank < size_; ++rank) {
    // If the note was overwritten, the rank has continued, so it shared no input.
    if (rank == rank_ ? own_flag == 0 : !lines_[rank].flagged(tick)) continue;
    RETURN_IF_FAILED(look_up(rank, lines_[rank].in_at, bytes, &inputs.at[rank]));
    inputs.is_shared |= std::uint64_t{1} << rank;
    ++inputs.shared;
  }
  return Status::kDone;
}

// The suspect is that rank if the offset is invalid, this one if no addresses are left.
Status HostGroup::look_up(int rank, const std::atomic<std::uint64_t>& at, std::size_t bytes, const char** found) {
  const std::uint64_t offset = at.load(std::memory_order_relaxed);
  if (!arenas_[rank]->holds(offset, bytes)) {
    remember(rank, tick_);
    return Status::kMismatch;
  }
  *found = arenas_[rank]->at(offset, bytes);
  if (*found != nullptr) return Status::kDone;
  failure_.suspect = rank_;
  return Status::kUnmapped;
}

Status HostGroup::close() { return wait_all(publish()); }

Status HostGroup::reduce_shared(void* out, const Inputs& inputs, std::size_t count, Dtype dtype, ReduceOp op) {
  const std::size_t width = size_of(dtype), bytes = count * width;
  const ReduceFunction reduce = reduce_function(dtype, op);
  const void* sources[kMaxRanks];
  char* outs[kMaxRanks];
  std::copy(inputs.at, inputs.at + size_, sources);
  bool private_out = false;
  for (int rank = 0; rank < size_; ++rank) {
    private_out = private_out || lines_[rank].out_at.load(std::memory_order_relaxed) == kPrivate;
  }
  if (private_out) {  // each rank reduces everything, and writes in place after all have read
    std::unique_ptr<char[]> kept(out == inputs.at[rank_] ? new char[bytes] : nullptr);
    void* const to = kept == nullptr ? out : kept.get();
    reduce(&to, 1, sources, size_, count);
    RETURN_IF_FAILED(close());
    if (kept != nullptr) copy(out, kept.get(), bytes);
    return Status::kDone;
  }
  for (int rank = 0; rank < size_; ++rank) {
    const char* place;
    RETURN_IF_FAILED(look_up(rank, lines_[rank].out_at, bytes, &place));
    outs[rank] = const_cast<char*>(place);
  }
  const Slices slices(count, width, size_, bytes + 64 * width * size_);
  const std::size_t start = slices.start(0, rank_) * width;
  for (int rank = 0; rank < size_; ++rank) {
    sources[rank] = static_cast<const char*>(sources[rank]) + start;
    outs[rank] += start;
  }
  std::swap(outs[0], outs[rank_]);
  reduce_and_share(outs, size_, sources, size_, slices.length(0, rank_), width, reduce);
  return close();
}

}  // namespace parallel_state
