#include "host_group.h"

#include <algorithm>

namespace parallel_state {

HostGroup::HostGroup(void* segment, int rank, int size, const GroupLiveness& liveness, WaitPolicy policy)
    : Group(rank, size),
      lines_(static_cast<Counter*>(segment)),
      archives_(reinterpret_cast<Archive*>(static_cast<char*>(segment) + archive_offset(size))),
      data_(static_cast<char*>(segment) + data_offset(size)),
      tuning_(tuning_of(size)),
      policy_(policy),
      liveness_(liveness) {
  lines_[rank_].own();
}

void HostGroup::begin(double timeout_s) {
  deadline_.set(timeout_s);
  forget_failure();
  parts_ = 0;
}

std::uint64_t HostGroup::call_of(Kind kind, std::uint64_t size, Method method, std::uint64_t digest, int reduction,
                                 int root) {
  if (told_.word == 0) told_ = told_of(method, std::array{size}, 0, reduction, -1, root);
  const std::uint64_t told = note_of_call(kind, told_, digest, reduction, root);
  // A rank that only sent a different call differs from then on.
  history_ = mixed(told + size + history_);
  return (history_ & ~Counter::kFlag) | 1;  // never kNoCall
}

void HostGroup::tell_parts(const std::size_t* bytes) {
  parts_ = size_;
  for (int rank = 0; rank < size_; ++rank) {
    archives_[rank_].part_bytes[rank].store(bytes[rank], std::memory_order_relaxed);
  }
}

HostGroup::Slot HostGroup::large_slot(std::uint64_t count) {
  const std::size_t slot = count % kLargeSlots;
  return {kSmallSlots * tuning_.small_slot_bytes + slot * tuning_.large_slot_bytes, &large_used_[slot]};
}

HostGroup::Slot HostGroup::next_slot(std::size_t bytes) {
  if (bytes > tuning_.small_slot_bytes) return large_slot(large_count_++);
  const std::size_t slot = small_count_++ % kSmallSlots;
  return {slot * tuning_.small_slot_bytes, &small_used_[slot]};
}

void HostGroup::tell_even_parts(std::size_t bytes) { parts_ = size_ | (bytes + 1) << kEvenShift; }

bool HostGroup::find_even_parts(int rank, std::uint64_t tick, std::uint64_t* bytes, std::size_t count) const {
  const std::uint64_t even = archives_[rank].entries[tick % kKept].parts.load(std::memory_order_relaxed) >> kEvenShift;
  if (even != 0) std::fill_n(bytes, count, even - 1);
  return even != 0;
}

std::uint64_t HostGroup::publish(std::uint64_t call, std::uint64_t note) {
  constexpr auto relaxed = std::memory_order_relaxed;
  Archive::Entry& entry = archives_[rank_].entries[(tick_ + 1) % kKept];
  entry.note.store(call & ~Counter::kFlag, relaxed);
  entry.word.store(told_.word, relaxed);
  entry.shape.store(told_.shape, relaxed);
  entry.parts.store(parts_, relaxed);
  lines_[rank_].publish(++tick_, note);
  return tick_;
}

Status HostGroup::wait_one(int rank, std::uint64_t tick, std::uint64_t call) {
  const WaitResult result =
      measures_ ? measured_wait(rank, tick) : wait_for(lines_[rank], tick, policy_, deadline_, liveness_, rank);
  if (result != WaitResult::kReached) {
    suspect_ = rank;
    if (result == WaitResult::kInterrupted) return Status::kInterrupted;
    if (result == WaitResult::kTimedOut) return Status::kTimedOut;
    const Loss loss = liveness_.loss(rank);
    // If this rank's call differs, too, its facts are better than the reporter's.
    if (loss.reporter >= 0 && loss.status == static_cast<int>(Status::kMismatch) && in_another_call()) {
      return Status::kMismatch;
    }
    if (loss.rank >= 0 || loss.reporter >= 0) suspect_ = loss.rank;
    reporter_ = loss.reporter;
    expected_ = {loss.expected};
    found_ = {loss.found};
    misfit_ = loss.misfit;
    return loss.reporter < 0 ? Status::kPeerDied : static_cast<Status>(loss.status);
  }
  return differs(rank, tick, call) ? Status::kMismatch : Status::kDone;
}

WaitResult HostGroup::measured_wait(int rank, std::uint64_t tick) {
  if (lines_[rank].read() >= tick) return WaitResult::kReached;
  const std::int64_t started = now_ns();
  const WaitResult result = wait_for(lines_[rank], tick, policy_, deadline_, liveness_, rank);
  waited_ns_ += now_ns() - started;
  last_ = rank;
  return result;
}

// The note is on the awaited line unless the rank has continued.
bool HostGroup::differs(int rank, std::uint64_t tick, std::uint64_t call) {
  if (call == kNoCall) return false;
  std::uint64_t note;
  if (lines_[rank].note_of(tick, &note) && note == (call & ~Counter::kFlag)) return false;
  note = archives_[rank].entries[tick % kKept].note.load(std::memory_order_relaxed);
  return note != (call & ~Counter::kFlag) && (in_another_call() || remember(rank, tick));
}

// Both publish before they look, so of two ranks that wait for no other, the later sees the earlier.
Status HostGroup::look(std::uint64_t tick, std::uint64_t call) {
  if (is_part_) return Status::kDone;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int step = 1; step < size_; ++step) {
    const int rank = (rank_ + step) % size_;
    if (lines_[rank].read() >= tick && differs(rank, tick, call)) return Status::kMismatch;
  }
  return Status::kDone;
}

bool HostGroup::in_another_call() {
  const auto note = [&](int of, std::uint64_t tick) {
    return archives_[of].entries[tick % kKept].note.load(std::memory_order_relaxed);
  };
  std::uint64_t first = UINT64_MAX;
  int other = -1;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const std::uint64_t theirs = lines_[rank].read(), both = std::min(tick_, theirs), last = std::max(tick_, theirs);
    for (std::uint64_t tick = last > kKept - 4 ? last - (kKept - 4) : 1; tick <= both && tick < first; ++tick) {
      if (note(rank, tick) == note(rank_, tick)) continue;
      first = tick;
      other = rank;
    }
  }
  return other >= 0 && remember(other, first);
}

Status HostGroup::compare(double timeout_s) {
  begin(timeout_s);
  return in_another_call() ? Status::kMismatch : Status::kDone;
}

bool HostGroup::remember(int rank, std::uint64_t tick) {
  constexpr auto relaxed = std::memory_order_relaxed;
  const auto show = [&](int of, Shown& shown) {
    const Archive::Entry& entry = archives_[of].entries[tick % kKept];
    shown.told = {entry.word.load(relaxed), entry.shape.load(relaxed)};
    shown.count = static_cast<int>(std::min<std::uint64_t>(entry.parts.load(relaxed) & kPartsMask, size_));
    if (find_even_parts(of, tick, shown.parts, shown.count)) return;
    for (int part = 0; part < shown.count; ++part) shown.parts[part] = archives_[of].part_bytes[part].load(relaxed);
  };
  suspect_ = rank;
  show(rank_, expected_);
  show(rank, found_);
  return true;
}

Status HostGroup::wait_all(std::uint64_t tick, std::uint64_t call) {
  RETURN_IF_FAILED(wait_ranks(0, size_, tick, call));
  all_reached_ = std::max(all_reached_, tick);
  return Status::kDone;
}

// [begin, end) includes this rank.
Status HostGroup::wait_ranks(int begin, int end, std::uint64_t tick, std::uint64_t call) {
  if (policy_.yields != 0) {
    // First the ranks on this core: spinning for others would keep them from publishing.
    for (int rank = begin; rank < end; ++rank) {
      if (rank != rank_ && lines_[rank].read() < tick && lines_[rank].shares_core()) {
        RETURN_IF_FAILED(wait_one(rank, tick, call));
      }
    }
  }
  const int count = end - begin;
  for (int step = 1; step < count; ++step) {
    RETURN_IF_FAILED(wait_one(begin + (rank_ - begin + step) % count, tick, call));
  }
  return Status::kDone;
}

// Afterwards no rank reads the data of `tick`, or archive entries that the next ticks overwrite.
Status HostGroup::reuse(std::uint64_t tick) {
  if (tick_ + 4 > kKept) tick = std::max(tick, tick_ + 4 - kKept);
  return tick == 0 || all_reached_ > tick ? Status::kDone : wait_all(tick + 1, 0);
}

Status HostGroup::barrier(double timeout_s) {
  begin(timeout_s);
  const std::uint64_t call = call_of(Kind::kBarrier, 0, Method::kBarrier);
  return wait_all(publish(call), call);
}

Status HostGroup::pass(double timeout_s) {
  begin(timeout_s);
  const std::uint64_t call = call_of(Kind::kPass, 0, Method::kNone);
  RETURN_IF_FAILED(reuse(0));
  publish(call);
  return Status::kDone;
}

Status HostGroup::announce(int src, double timeout_s, std::int64_t spin_ns) {
  begin(timeout_s);
  const std::uint64_t call = call_of(Kind::kMessage, 0, Method::kNone, 0, -1, src);
  RETURN_IF_FAILED(reuse(0));
  const std::uint64_t tick = publish(call);
  if (rank_ == src) return look(tick, call);
  const std::int64_t usual_ns = policy_.spin_ns;
  policy_.spin_ns = spin_ns;
  const Status status = wait_one(src, tick, call);
  policy_.spin_ns = usual_ns;
  return status;
}

}  // namespace parallel_state
