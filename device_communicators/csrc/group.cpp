#include "group.h"

#include <algorithm>

#include "call.h"

namespace parallel_state {

Group::Group(void* segment, int rank, int size, const ProcessLiveness& liveness, WaitPolicy policy)
    : lines_(static_cast<Counter*>(segment)),
      data_(static_cast<char*>(segment) + static_cast<std::size_t>(size) * sizeof(Counter)),
      rank_(rank),
      size_(size),
      tuning_(tuning_of(size)),
      policy_(policy),
      liveness_(liveness) {
  lines_[rank_].own();
}

std::size_t Group::segment_bytes(int size) {
  return static_cast<std::size_t>(size) * (sizeof(Counter) + rank_bytes(tuning_of(size)));
}

void Group::begin(double timeout_s) {
  deadline_.set(timeout_s);
  suspect_ = reporter_ = -1;
}

Group::Slot Group::large_slot(std::uint64_t count) {
  const std::size_t slot = count % kLargeSlots;
  return {kSmallSlots * tuning_.small_slot_bytes + slot * tuning_.large_slot_bytes, &large_used_[slot]};
}

// The next slot of a size for `bytes`, which must fit a large one.
Group::Slot Group::next_slot(std::size_t bytes) {
  if (bytes > tuning_.small_slot_bytes) return large_slot(large_count_++);
  const std::size_t slot = small_count_++ % kSmallSlots;
  return {slot * tuning_.small_slot_bytes, &small_used_[slot]};
}

std::uint64_t Group::publish(std::uint64_t call) {
  lines_[rank_].publish(++tick_, call);
  return tick_;
}

Status Group::wait_one(int rank, std::uint64_t tick, std::uint64_t call) {
  const WaitResult result = wait_for(lines_[rank], tick, policy_, deadline_, liveness_, rank);
  if (result != WaitResult::kReached) {
    suspect_ = rank;
    if (result == WaitResult::kInterrupted) return Status::kInterrupted;
    if (result == WaitResult::kTimedOut) return Status::kTimedOut;
    const Loss loss = liveness_.loss(rank);
    // One rank saw a mismatch before the others; who is in another call than this rank can tell it better than a word.
    if (loss.reporter >= 0 && loss.status == static_cast<int>(Status::kMismatch) && in_another_call(tick, call)) {
      return Status::kMismatch;
    }
    if (loss.rank >= 0) suspect_ = loss.rank;
    reporter_ = loss.reporter;
    return loss.reporter < 0 ? Status::kPeerDied : static_cast<Status>(loss.status);
  }
  return differs(rank, tick, call) ? Status::kMismatch : Status::kDone;
}

// Whether `rank`, which has published `tick`, did so in another call.
bool Group::differs(int rank, std::uint64_t tick, std::uint64_t call) {
  if (call == 0 || !lines_[rank].differs(tick, call, &found_)) return false;
  suspect_ = rank;
  expected_ = call;
  return true;
}

bool Group::in_another_call(std::uint64_t tick, std::uint64_t call) {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && lines_[rank].read() >= tick && differs(rank, tick, call)) return true;
  }
  return false;
}

Status Group::wait_all(std::uint64_t tick, std::uint64_t call) {
  if (policy_.yields != 0) {
    // Who needs this core comes first: to spin for another meanwhile would keep it from publishing.
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_ && lines_[rank].read() < tick && lines_[rank].shares_core()) {
        RETURN_IF_FAILED(wait_one(rank, tick, call));
      }
    }
  }
  for (int step = 1; step < size_; ++step) RETURN_IF_FAILED(wait_one((rank_ + step) % size_, tick, call));
  all_reached_ = std::max(all_reached_, tick);
  return Status::kDone;
}

// Waits until nobody reads any more what was published with `tick`.
Status Group::reuse(std::uint64_t tick) {
  return tick == 0 || all_reached_ > tick ? Status::kDone : wait_all(tick + 1, 0);
}

Status Group::barrier(double timeout_s) {
  begin(timeout_s);
  const std::uint64_t call = call_of(Kind::kBarrier, 0);
  return wait_all(publish(call), call);
}

}  // namespace parallel_state
