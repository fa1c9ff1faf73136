// Waits for another process on a shared counter: spins, yields, then sleeps in the kernel.
#pragma once

#include <atomic>
#include <cstdint>

namespace parallel_state {

class SideWork {
 public:
  virtual ~SideWork() = default;
  virtual bool advance() = 0;
};

// See wait_policy in host_memory.py.
struct WaitPolicy {
  std::int64_t spin_ns = 100'000;
  std::int32_t yields = 0;
  SideWork* side_work = nullptr;
};

enum class WaitResult { kReached, kTimedOut, kPeerDied, kInterrupted };

class Liveness {
 public:
  virtual ~Liveness() = default;
  virtual bool is_alive(int rank) const = 0;
};

// The clock is first read when a wait takes long; the time before that doesn't count.
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

// Alone on two cache lines: adjacent lines are prefetched in pairs. Only grows.
struct alignas(128) Counter {
  static constexpr std::uint64_t kNotes = 4;
  static constexpr std::uint64_t kFlag = 1ULL << 47;

  std::atomic<std::uint64_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};
  std::atomic<std::uint16_t> core{0};  // 1 + core of the last publish
  std::atomic<std::uint8_t> fences{0};
  std::atomic<std::uint64_t> notes[kNotes];  // by value % kNotes
  // Of the owner's symmetric tensors. Written before a value, read after it.
  std::atomic<std::uint64_t> in_at{0};
  std::atomic<std::uint64_t> out_at{0};

  std::uint64_t read() const { return value.load(std::memory_order_acquire); }

  // Owner only, once, before the first `publish`.
  void own();

  // Owner only. Pairs with the acquire in `read`.
  void publish(std::uint64_t next, std::uint64_t note);

  // False if the note of `reached`, a value that was read, was overwritten.
  bool flagged(std::uint64_t reached) const;

  bool note_of(std::uint64_t reached, std::uint64_t* note) const {
    *note = notes[reached % kNotes].load(std::memory_order_acquire) & ~kFlag;
    return read() < reached + kNotes - 1;
  }

  // For a thread that sleeps on several words. False if the counter has reached `target`, or its owner might miss the
  // sleeper. Each true must be followed by `end_sleep`.
  bool begin_sleep(std::uint64_t target, std::uint64_t* seen);
  void end_sleep() { sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  std::uint32_t* word();  // the futex of its sleepers

  // The owner last published on this core, and so needs it to continue.
  bool shares_core() const;
};
static_assert(sizeof(Counter) == 128, "one counter, two cache lines");

WaitResult wait_for(Counter& counter, std::uint64_t target, const WaitPolicy& policy, Deadline& deadline,
                    const Liveness& liveness, int owner);

// Whatever their policy, this thread's waits sleep early.
void wait_gently(bool gently);
bool waits_gently();

constexpr std::int64_t kGentleSpinNs = 2'000;

std::int64_t now_ns();
inline std::int64_t us_since(std::int64_t started_ns) { return (now_ns() - started_ns) / 1000; }

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace parallel_state
