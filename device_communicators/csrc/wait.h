// Waiting for another process on a shared counter: spin, then yield, then sleep in the kernel.
//
// A counter only grows. Its owner stores it, the others wait until it has reached a value. The owner wakes sleepers
// only when there are some, so an exchange between ranks that spin makes no system call.
#pragma once

#include <atomic>
#include <cstdint>

namespace parallel_state {

// How long a wait spins and yields before it sleeps. Measured (../shared numbers in benchmarks/): with a core for each
// rank 100-200 us of spinning beat everything; with more ranks than cores a spinning rank holds the core that the rank
// it waits for needs, so at most a few us, then some yields.
struct WaitPolicy {
  std::int64_t spin_ns = 100'000;
  std::int32_t yields = 0;
};

enum class WaitResult { kReached, kTimedOut, kPeerDied };

// Tells whether a rank is still alive; asked by a sleeping waiter now and then, never on the fast path.
class Liveness {
 public:
  virtual ~Liveness() = default;
  virtual bool is_alive(int rank) const = 0;
};

// A counter in shared memory, alone on its two cache lines (adjacent lines are prefetched in pairs), with a note about
// each of its last values on the line that a waiter reads anyway.
struct alignas(128) Counter {
  static constexpr std::uint64_t kNotes = 6;

  std::atomic<std::uint64_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};
  std::atomic<std::uint64_t> notes[kNotes];  // by value % kNotes

  std::uint64_t read() const { return value.load(std::memory_order_acquire); }

  // Owner only. Pairs with the acquire in `read`: what was written before is seen by who sees the value.
  void publish(std::uint64_t next, std::uint64_t note);

  // Whether the note about `reached`, a value that was seen, is another than `note`. False where it is no longer known.
  bool differs(std::uint64_t reached, std::uint64_t note, std::uint64_t* found) const;
};
static_assert(sizeof(Counter) == 128, "one counter, two cache lines");

// Returns once `counter` is at least `target`; `deadline_ns` is on the monotonic clock.
WaitResult wait_for(Counter& counter, std::uint64_t target, const WaitPolicy& policy, std::int64_t deadline_ns,
                    const Liveness& liveness, int owner);

std::int64_t now_ns();

}  // namespace parallel_state
