// Which ranks of a host are lost to the others: their process has ended, or they gave up.
//
// A rank that waits for one which is alive may wait in vain all the same: that one has failed, or waits itself for one
// that died. So a wait ends with the death of any rank of the group, and with the failure of any, whose reason is
// passed on. A rank that left on purpose is missed only by who still waits for it: what it owed has been published.
//
// The control plane's thread writes ends into the group's shared memory, and waits read them there. The thread of one
// rank is enough: a rank whose own thread is late reads what a neighbour wrote. Without a control plane a wait ends at
// its deadline.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "call.h"
#include "progress.h"
#include "wait.h"

namespace parallel_state {

namespace control {
class EndListeners;
}

// What a rank says of itself, in shared memory, on a line that nobody looks at while all goes well.
struct alignas(64) Member {
  std::atomic<std::uint32_t> has_left{0};  // on purpose
  std::atomic<std::uint32_t> failed{0};    // 0, or 1 + suspect, above it 8 bits of the status
  // Written before `failed`: words and shapes of two calls that differ, or a misfit: 1 + its ranks, above 32 bits the
  // second, and the bytes that are sent and expected. Else zeros.
  std::atomic<std::uint64_t> calls[4], misfit;
};

// What the control plane reported, in shared memory; ranks are a bit each. Bits are only ever set, by any rank.
struct alignas(64) ReportedEnds {
  std::atomic<std::uint64_t> died{0};
  std::atomic<std::uint64_t> left{0};
  std::atomic<std::uint32_t> doomed{0};  // 1: a rank of the failure domain died
};

// To blame for the end of a doomed group: a rank that isn't in it, known to the caller.
constexpr int kOutside = 1 << 15;

struct Loss {
  explicit Loss(int rank = -1, int reporter = -1, int status = 0) : rank(rank), reporter(reporter), status(status) {}

  int rank;              // who is to blame; -1: nobody is lost
  int reporter;          // who found out, where that was another rank
  int status;            // with which status it failed there
  Told expected, found;  // the two calls, if that was a mismatch and the reporter knows them
  Misfit misfit;
};

class Losses : public Liveness {
 public:
  // Returns the loss that ends a wait for `awaited`; an empty one if the wait may go on.
  virtual Loss loss(int awaited) const = 0;
  // Adds the words whose change, or a call of wake_progress, tells of a loss. False if nothing tells of some.
  virtual bool watch(Sleep*) const { return false; }
  bool is_alive(int awaited) const override {
    const Loss found = loss(awaited);
    return found.rank < 0 && found.reporter < 0;
  }
};

class GroupLiveness final : public Losses {
 public:
  // `members` and `ends` outlive this. `members`: one for each of `size` ranks.
  GroupLiveness(Member* members, ReportedEnds* ends, int size, int me);
  ~GroupLiveness();
  GroupLiveness(const GroupLiveness&) = delete;
  GroupLiveness& operator=(const GroupLiveness&) = delete;

  // Has the control plane write deaths and farewells here until stop_listening. `ranks`: the group's global ranks, in
  // its order. `domain`: all global ranks whose death fails the group, ascending. Call it once, before waits.
  void listen_to(std::shared_ptr<control::EndListeners> source, std::vector<int> ranks, std::vector<int> domain);

  void stop_listening();

  Loss loss(int awaited) const override;
  bool watch(Sleep* sleep) const override;

  // This rank tells the others that it goes, or that it gave up and why.
  void leave();
  void fail(int status, int suspect, Told expected = {}, Told found = {}, Misfit misfit = {});
  bool has_left(int rank) const;

  // Fails all calls of this process in the group: from any thread, for good.
  void doom() { doomed_.store(true, std::memory_order_relaxed); }  // carries no data
  bool is_doomed() const {
    return doomed_.load(std::memory_order_relaxed) || ends_->doomed.load(std::memory_order_relaxed) != 0;
  }

 private:
  class Listener;
  bool has_died(int rank) const;

  Member* const members_;
  ReportedEnds* const ends_;
  const int size_;
  const int me_;
  std::atomic<bool> doomed_{false};
  std::unique_ptr<Listener> listener_;
};

}  // namespace parallel_state
