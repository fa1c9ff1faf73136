#include "host_group.h"

#include <algorithm>
#include <cstring>

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

void HostGroup::begin(Kind kind, std::uint64_t size, Method method, double timeout_s, std::uint64_t digest,
                      int reduction, int root) {
  deadline_.set(timeout_s);
  make_record(kind, size, method, digest, reduction, root);
}

void HostGroup::tell_parts(const std::size_t* bytes) {
  record_.bytes = size_;
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

void HostGroup::SharedRecord::store(const CallRecord& record) {
  std::uint64_t words[kWords];
  std::memcpy(words, &record, sizeof words);
  for (std::size_t word = 0; word < kWords; ++word) words_[word].store(words[word], std::memory_order_relaxed);
}

CallRecord HostGroup::SharedRecord::load() const {
  std::uint64_t words[kWords];
  for (std::size_t word = 0; word < kWords; ++word) words[word] = words_[word].load(std::memory_order_relaxed);
  CallRecord record;
  std::memcpy(&record, words, sizeof words);
  return record;
}

std::uint64_t HostGroup::publish_as(std::uint64_t note) {
  archives_[rank_].records[(tick_ + 1) % kKept].store(record_);
  lines_[rank_].publish(++tick_, note);
  return tick_;
}

Status HostGroup::wait_one(int rank, std::uint64_t tick, bool compares) {
  const WaitResult result =
      measures_ ? measured_wait(rank, tick) : wait_for(lines_[rank], tick, policy_, deadline_, liveness_, rank);
  if (result != WaitResult::kReached) {
    failure_.suspect = rank;
    if (result == WaitResult::kInterrupted) return Status::kInterrupted;
    if (result == WaitResult::kTimedOut) return Status::kTimedOut;
    const Loss loss = liveness_.loss(rank);
    // If this rank's call differs, too, its facts are better than the reporter's.
    if (loss.reporter >= 0 && loss.status == static_cast<int>(Status::kMismatch) && in_another_call()) {
      return Status::kMismatch;
    }
    if (loss.rank >= 0 || loss.reporter >= 0) failure_.suspect = loss.rank;
    failure_.reporter = loss.reporter;
    failure_.expected = {loss.expected};
    failure_.found = {loss.found};
    failure_.misfit = loss.misfit;
    return loss.reporter < 0 ? Status::kPeerDied : static_cast<Status>(loss.status);
  }
  return compares && differs(rank, tick) ? Status::kMismatch : Status::kDone;
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
bool HostGroup::differs(int rank, std::uint64_t tick) {
  std::uint64_t note;
  if (lines_[rank].note_of(tick, &note) && note == own_note()) return false;
  return !is_same_call(record_, record_of(rank, tick)) && (in_another_call() || remember(rank, tick));
}

// Both publish before they look, so of two ranks that wait for no other, the later sees the earlier.
Status HostGroup::look(std::uint64_t tick) {
  if (is_part_) return Status::kDone;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int step = 1; step < size_; ++step) {
    const int rank = (rank_ + step) % size_;
    if (lines_[rank].read() >= tick && differs(rank, tick)) return Status::kMismatch;
  }
  return Status::kDone;
}

bool HostGroup::in_another_call() {
  std::uint64_t first = UINT64_MAX;
  int other = -1;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    const std::uint64_t theirs = lines_[rank].read(), both = std::min(tick_, theirs), last = std::max(tick_, theirs);
    for (std::uint64_t tick = last > kKept - 4 ? last - (kKept - 4) : 1; tick <= both && tick < first; ++tick) {
      if (is_same_call(record_of(rank_, tick), record_of(rank, tick))) continue;
      first = tick;
      other = rank;
    }
  }
  return other >= 0 && remember(other, first);
}

Status HostGroup::compare(double) {
  forget_failure();
  return in_another_call() ? Status::kMismatch : Status::kDone;
}

bool HostGroup::remember(int rank, std::uint64_t tick) {
  const auto show = [&](int of, Shown& shown) {
    const CallRecord record = record_of(of, tick);
    shown.told = record.told;
    shown.count = static_cast<int>(std::min<std::uint64_t>(record.bytes, size_));
    for (int part = 0; part < shown.count; ++part) {
      const auto& bytes = archives_[of].part_bytes[part];
      shown.parts[part] = record.sizes != 0 ? record.sizes - 1 : bytes.load(std::memory_order_relaxed);
    }
  };
  failure_.suspect = rank;
  show(rank_, failure_.expected);
  show(rank, failure_.found);
  return true;
}

Status HostGroup::wait_all(std::uint64_t tick, bool compares) {
  RETURN_IF_FAILED(wait_ranks(0, size_, tick, compares));
  all_reached_ = std::max(all_reached_, tick);
  return Status::kDone;
}

// [begin, end) includes this rank.
Status HostGroup::wait_ranks(int begin, int end, std::uint64_t tick, bool compares) {
  if (policy_.yields != 0) {
    // First the ranks on this core: spinning for others would keep them from publishing.
    for (int rank = begin; rank < end; ++rank) {
      if (rank != rank_ && lines_[rank].read() < tick && lines_[rank].shares_core()) {
        RETURN_IF_FAILED(wait_one(rank, tick, compares));
      }
    }
  }
  const int count = end - begin;
  for (int step = 1; step < count; ++step) {
    RETURN_IF_FAILED(wait_one(begin + (rank_ - begin + step) % count, tick, compares));
  }
  return Status::kDone;
}

// Afterwards no rank reads the data of `tick`, or archive entries that the next ticks overwrite.
Status HostGroup::reuse(std::uint64_t tick) {
  if (tick_ + 4 > kKept) tick = std::max(tick, tick_ + 4 - kKept);
  return tick == 0 || all_reached_ > tick ? Status::kDone : wait_all(tick + 1, false);
}

Status HostGroup::barrier(double timeout_s) {
  begin(Kind::kBarrier, 0, Method::kBarrier, timeout_s);
  return wait_all(publish());
}

Status HostGroup::pass(double timeout_s) {
  begin(Kind::kPass, 0, Method::kNone, timeout_s);
  RETURN_IF_FAILED(reuse(0));
  publish();
  return Status::kDone;
}

Status HostGroup::announce(int src, double timeout_s, std::int64_t spin_ns) {
  begin(Kind::kMessage, 0, Method::kNone, timeout_s, 0, -1, src);
  RETURN_IF_FAILED(reuse(0));
  const std::uint64_t tick = publish();
  if (rank_ == src) return look(tick);
  const std::int64_t usual_ns = policy_.spin_ns;
  policy_.spin_ns = spin_ns;
  const Status status = wait_one(src, tick);
  policy_.spin_ns = usual_ns;
  return status;
}

}  // namespace parallel_state
