#include "liveness.h"

#include <algorithm>
#include <utility>

namespace parallel_state {

EndWatch::EndWatch(std::shared_ptr<control::EndListeners> source, std::vector<int> ranks, OnEnd on_end)
    : source_(std::move(source)), ranks_(std::move(ranks)), on_end_(std::move(on_end)) {
  source_->add(this);
}

EndWatch::~EndWatch() { source_->remove(this); }

void EndWatch::on_end(int global_rank, bool died) noexcept {
  on_end_(static_cast<int>(std::find(ranks_.begin(), ranks_.end(), global_rank) - ranks_.begin()), global_rank, died);
  wake_progress();
}

GroupLiveness::GroupLiveness(Member* members, ReportedEnds* ends, int size, int me)
    : members_(members), ends_(ends), size_(size), me_(me) {}

void GroupLiveness::listen_to(std::shared_ptr<control::EndListeners> source, std::vector<int> ranks,
                              std::vector<int> domain) {
  const auto note = [this, domain = std::move(domain)](int rank, int global_rank, bool died) {
    if (rank == me_) {  // not reported to peers
      if (died) doom();
      return;
    }
    // Release: a wait that reads the bit also sees all that the rank published before.
    if (rank < size_) (died ? ends_->died : ends_->left).fetch_or(std::uint64_t{1} << rank, std::memory_order_release);
    if (died && std::binary_search(domain.begin(), domain.end(), global_rank)) {
      ends_->doomed.store(1, std::memory_order_release);  // after the bit, so that waits can name the rank
    }
  };
  listener_ = std::make_unique<EndWatch>(std::move(source), std::move(ranks), note);
}

void GroupLiveness::stop_listening() { listener_.reset(); }

bool GroupLiveness::has_died(int rank) const {
  return (ends_->died.load(std::memory_order_acquire) >> rank & 1) != 0 && !has_left(rank);
}

Loss GroupLiveness::loss(int awaited) const {
  const bool doomed = is_doomed();  // before the bits, which are set before it
  std::atomic_thread_fence(std::memory_order_acquire);
  if (has_died(awaited)) return Loss(awaited);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != me_ && has_died(rank)) return Loss(rank);
  }
  if (doomed) return Loss(kOutside);
  for (int rank = 0; rank < size_; ++rank) {
    const std::uint32_t failed = members_[rank].failed.load(std::memory_order_acquire);
    if (rank == me_ || failed == 0) continue;
    const auto word = [&](int index) { return members_[rank].calls[index].load(std::memory_order_relaxed); };
    Loss found(static_cast<int>(failed & 0xffffU) - 1, rank, static_cast<int>(failed >> 16));
    const std::uint64_t misfit = members_[rank].misfit.load(std::memory_order_relaxed);
    if (misfit != 0) {
      found.misfit = {static_cast<int>(misfit & 0xffffffffU) - 1, static_cast<int>(misfit >> 32) - 1, word(0), word(1)};
    } else {
      found.expected = {word(0), word(1)};
      found.found = {word(2), word(3)};
    }
    return found;
  }
  return has_left(awaited) ? Loss(awaited, -1, 1) : Loss();
}

bool GroupLiveness::watch(Sleep* sleep) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == me_) continue;
    for (std::atomic<std::uint32_t>* const word : {&members_[rank].has_left, &members_[rank].failed}) {
      if (word->load(std::memory_order_relaxed) == 0) sleep->add(reinterpret_cast<std::uint32_t*>(word), 0);
    }
  }
  return true;
}

void GroupLiveness::leave() {
  // Release: a peer also sees all that this rank published before.
  members_[me_].has_left.store(1, std::memory_order_release);
  wake_sleepers(reinterpret_cast<std::uint32_t*>(&members_[me_].has_left));
}

void GroupLiveness::fail(int status, int suspect, Told expected, Told found, Misfit misfit) {
  if (members_[me_].failed.load(std::memory_order_relaxed) != 0) return;
  if (misfit.from >= 0) {
    expected = {misfit.sent_bytes, misfit.expected_bytes};
    found = {};
    members_[me_].misfit.store(static_cast<std::uint64_t>(misfit.from + 1) | static_cast<std::uint64_t>(misfit.to + 1)
                                                                                 << 32,
                               std::memory_order_relaxed);
  }
  int index = 0;
  for (const std::uint64_t word : {expected.word, expected.shape, found.word, found.shape}) {
    members_[me_].calls[index++].store(word, std::memory_order_relaxed);
  }
  const auto told = static_cast<std::uint32_t>((status << 16) | (suspect + 1));
  members_[me_].failed.store(told, std::memory_order_release);
  wake_sleepers(reinterpret_cast<std::uint32_t*>(&members_[me_].failed));
}

bool GroupLiveness::has_left(int rank) const {
  return members_[rank].has_left.load(std::memory_order_acquire) != 0 ||
         (ends_->left.load(std::memory_order_acquire) >> rank & 1) != 0;
}

}  // namespace parallel_state
