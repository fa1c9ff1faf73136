// A wait ends with the death or failure of any rank of the group: a living rank may wait for a dead one. A rank that
// left on purpose ends only waits for that rank. Any rank's control plane writes exits to the group's shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../../control/csrc/end_listeners.h"
#include "call.h"
#include "progress.h"
#include "wait.h"

namespace parallel_state {

// Calls `on_end` in the control plane's thread. `rank`: its index in `ranks`; their number for another rank.
class EndWatch final : private control::EndListener {
 public:
  using OnEnd = std::function<void(int rank, int global_rank, bool died)>;

  EndWatch(std::shared_ptr<control::EndListeners> source, std::vector<int> ranks, OnEnd on_end);
  ~EndWatch();
  EndWatch(const EndWatch&) = delete;
  EndWatch& operator=(const EndWatch&) = delete;

 private:
  void on_end(int global_rank, bool died) noexcept override;

  const std::shared_ptr<control::EndListeners> source_;
  const std::vector<int> ranks_;
  const OnEnd on_end_;
};

struct alignas(64) Member {
  std::atomic<std::uint32_t> has_left{0};
  std::atomic<std::uint32_t> failed{0};  // 0, or 1 + suspect; the status from bit 16 on
  // Written before `failed`. After a mismatch: words and shapes of both calls. After a misfit: 1 + each of its ranks,
  // the second from bit 32 on, and in `calls` the bytes sent and expected.
  std::atomic<std::uint64_t> calls[4], misfit;
};

struct alignas(64) ReportedEnds {
  std::atomic<std::uint64_t> died{0};
  std::atomic<std::uint64_t> left{0};
  std::atomic<std::uint32_t> doomed{0};
};

constexpr int kOutside = 1 << 15;

struct Loss {
  explicit Loss(int rank = -1, int reporter = -1, int status = 0) : rank(rank), reporter(reporter), status(status) {}

  int rank;
  int reporter;  // -1: this rank
  int status;    // of the reporter's failure; without a reporter: 1 if `rank` left
  Told expected, found;
  Misfit misfit;
};

class Losses : public Liveness {
 public:
  // Empty unless a loss ends a wait for `awaited`.
  virtual Loss loss(int awaited) const = 0;
  // Adds words whose change reports a loss; wake_progress reports others. False if some losses have neither.
  virtual bool watch(Sleep*) const { return false; }
  bool is_alive(int awaited) const override {
    const Loss found = loss(awaited);
    return found.rank < 0 && found.reporter < 0;
  }
};

class GroupLiveness final : public Losses {
 public:
  GroupLiveness(Member* members, ReportedEnds* ends, int size, int me);
  GroupLiveness(const GroupLiveness&) = delete;
  GroupLiveness& operator=(const GroupLiveness&) = delete;

  // `ranks`: global ranks of the group; `domain`: those whose death fails it, ascending. Call it once, before waits.
  void listen_to(std::shared_ptr<control::EndListeners> source, std::vector<int> ranks, std::vector<int> domain);

  void stop_listening();

  Loss loss(int awaited) const override;
  bool watch(Sleep* sleep) const override;

  void leave();
  void fail(int status, int suspect, Told expected = {}, Told found = {}, Misfit misfit = {});
  bool has_left(int rank) const;

  // Fails all calls of this process in the group, for good. Thread-safe.
  void doom() { doomed_.store(true, std::memory_order_relaxed); }
  bool is_doomed() const {
    return doomed_.load(std::memory_order_relaxed) || ends_->doomed.load(std::memory_order_relaxed) != 0;
  }

 private:
  bool has_died(int rank) const;

  Member* const members_;
  ReportedEnds* const ends_;
  const int size_;
  const int me_;
  std::atomic<bool> doomed_{false};
  std::unique_ptr<EndWatch> listener_;
};

}  // namespace parallel_state
