// Which ranks of a host are lost to the others: their process has ended, or they gave up.
//
// A rank that waits for one which is alive may wait in vain all the same: that one has failed, or waits itself for one
// that died. So a wait ends with the death of any rank of the group, and with the failure of any, whose reason is
// passed on. A rank that left on purpose is missed only by who still waits for it: what it owed has been published.
//
// The awaited rank may also have failed in another group, by the death of a rank that isn't in this one. So this
// process dooms the group when it hears of a death in the group's failure domain, and all waits end.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "wait.h"

namespace parallel_state {

// What a rank says of itself, in shared memory, on a line that nobody looks at while all goes well.
struct alignas(64) Member {
  std::atomic<std::uint32_t> has_left{0};  // on purpose
  std::atomic<std::uint32_t> failed{0};    // 0, or 1 + suspect, above it 8 bits of the status
};

// To blame for the end of a doomed group: a rank that isn't in it, known to the caller.
constexpr int kOutside = 64;

struct Loss {
  int rank = -1;      // who is to blame; -1: nobody is lost
  int reporter = -1;  // who found out, where that was another rank
  int status = 0;     // with which status it failed there
};

// A descriptor that reports a process's exit; all groups of this process share it. Without `pidfd_open` (kernels before
// 5.3, sandboxes) it is that of /proc/PID/stat, which can't be read after the process has exited.
class Pidfd {
 public:
  explicit Pidfd(std::int64_t pid);
  ~Pidfd();
  Pidfd(const Pidfd&) = delete;
  Pidfd& operator=(const Pidfd&) = delete;

  bool has_ended() const;  // false for a process that can't be watched
  bool is_alive() const { return (descriptor_ >= 0 || stat_ >= 0) && !has_ended(); }

 private:
  const int descriptor_;
  const int stat_;  // -1 with a pidfd
};

class ProcessLiveness : public Liveness {
 public:
  // `members`: one for each of `count` ranks, for as long as this lives; null where they say nothing.
  ProcessLiveness(const std::int64_t* pids, int count, Member* members = nullptr, int me = -1);
  ProcessLiveness(const ProcessLiveness&) = delete;
  ProcessLiveness& operator=(const ProcessLiveness&) = delete;

  // Why there is no sense in waiting for `awaited`, if there is none.
  Loss loss(int awaited) const;
  bool is_alive(int awaited) const override {
    const Loss found = loss(awaited);
    return found.rank < 0 && found.reporter < 0;
  }

  // This rank tells the others that it goes, or that it gave up and why.
  void leave();
  void fail(int status, int suspect);
  // This process heard of a rank's end by other ways than its pid.
  void note_end(int rank) { ended_.fetch_or(std::uint64_t{1} << rank, std::memory_order_release); }
  bool has_left(int rank) const;

  // A rank of the group's failure domain has died: from any thread, for good.
  void doom() { doomed_.store(true, std::memory_order_relaxed); }  // carries no data
  bool is_doomed() const { return doomed_.load(std::memory_order_relaxed); }

 private:
  bool has_ended(int rank) const;

  std::vector<std::shared_ptr<const Pidfd>> pidfds_;  // null: not to be watched
  std::atomic<std::uint64_t> ended_{0};               // by rank, a bit each
  std::atomic<bool> doomed_{false};
  Member* const members_;
  const int me_;
};

}  // namespace parallel_state
