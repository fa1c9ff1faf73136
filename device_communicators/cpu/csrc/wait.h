// Waiting for another process on a shared counter: spin, then yield, then sleep in the kernel.
//
// A counter only grows. Its owner stores it, the others wait until it has reached a value. The owner wakes sleepers
// only when there are some, so an exchange between ranks that spin makes no system call.
#pragma once

#include <atomic>
#include <cstdint>

namespace parallel_state {

// Work of the waiting thread that goes on while it waits: see connections.h.
class SideWork {
 public:
  virtual ~SideWork() = default;
  // Returns false if nothing is left to do.
  virtual bool advance() = 0;
};

// How long a wait spins and yields before it sleeps. Measured: with a core for each
// rank 100-200 us of spinning beat everything; with more ranks than cores a spinning rank holds the core that the rank
// it waits for needs, so at most a few us, then some yields.
struct WaitPolicy {
  std::int64_t spin_ns = 100'000;
  std::int32_t yields = 0;
  SideWork* side_work = nullptr;
};

enum class WaitResult { kReached, kTimedOut, kPeerDied, kInterrupted };

// Tells whether a rank is still alive; asked by a sleeping waiter now and then, never on the fast path.
class Liveness {
 public:
  virtual ~Liveness() = default;
  virtual bool is_alive(int rank) const = 0;
};

// By when a call must be done. The clock is read when a wait first takes long, and not in each call: the time until
// then doesn't count.
class Deadline {
 public:
  void set(double timeout_s) {
    timeout_s_ = timeout_s;
    at_ns_ = 0;
  }
  std::int64_t at_ns(std::int64_t now) {
    if (at_ns_ == 0) at_ns_ = now + static_cast<std::int64_t>(timeout_s_ * 1e9);
    return at_ns_;
  }

 private:
  double timeout_s_ = 0;
  std::int64_t at_ns_ = 0;
};

// A counter in shared memory, alone on its two cache lines (adjacent lines are prefetched in pairs), with a note about
// each of its last values on the line that a waiter reads anyway.
struct alignas(128) Counter {
  static constexpr std::uint64_t kNotes = 4;
  static constexpr std::uint64_t kFlag = 1ULL << 47;  // a bit of a note in which ranks may differ

  std::atomic<std::uint64_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};
  std::atomic<std::uint16_t> core{0};        // 1 + that on which the owner published last
  std::atomic<std::uint8_t> fences{0};       // whether the owner publishes with a fence, see `publish`
  std::atomic<std::uint64_t> notes[kNotes];  // by value % kNotes
  // Where the owner's tensors lie, for collectives on symmetric memory; written before a value, read after it.
  std::atomic<std::uint64_t> in_at{0};
  std::atomic<std::uint64_t> out_at{0};

  std::uint64_t read() const { return value.load(std::memory_order_acquire); }

  // Owner only, once, before the first `publish`.
  void own();

  // Owner only. Pairs with the acquire in `read`: what was written before is seen by who sees the value.
  void publish(std::uint64_t next, std::uint64_t note);

  // Whether the note about `reached`, a value that was seen, has the flag. False where it is no longer known.
  bool flagged(std::uint64_t reached) const;

  // That note, without the flag. False where it is no longer known.
  bool note_of(std::uint64_t reached, std::uint64_t* note) const {
    *note = notes[reached % kNotes].load(std::memory_order_acquire) & ~kFlag;
    return read() < reached + kNotes - 1;
  }

  // For a thread that sleeps on several words, see progress.h. Returns false if it must not: the counter has reached
  // `target`, or its owner might not see the sleeper. Each `begin_sleep` that returned true is followed by `end_sleep`.
  bool begin_sleep(std::uint64_t target, std::uint64_t* seen);
  void end_sleep() { sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  std::uint32_t* word();  // on which its sleepers sleep

  // Whether the owner was last seen on the core that runs this: then it needs this core to get on.
  bool shares_core() const;
};
static_assert(sizeof(Counter) == 128, "one counter, two cache lines");

// Returns once `counter` is at least `target`.
WaitResult wait_for(Counter& counter, std::uint64_t target, const WaitPolicy& policy, Deadline& deadline,
                    const Liveness& liveness, int owner);

// Whether waits of this thread sleep soon, whatever their policy says: for threads that work beside those that compute.
void wait_gently(bool gently);
bool waits_gently();

constexpr std::int64_t kGentleSpinNs = 2'000;

std::int64_t now_ns();

// Between two reads of a spinning thread: leaves the core's resources to its sibling for some cycles.
inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace parallel_state
