#include "wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace parallel_state {
namespace {

constexpr std::int64_t kSliceNs = 20'000'000;  // a sleeper looks this often whether the other still lives
constexpr int kSpinsPerLook = 64;              // a look at the clock costs as much as some twenty pauses

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The kernel compares 32 bits: those of the counter that change first.
std::uint32_t* futex_word(std::atomic<std::uint64_t>& value) {
  auto* word = reinterpret_cast<std::uint32_t*>(&value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  ++word;
#endif
  return word;
}

void futex_wait(Counter& counter, std::uint64_t seen, std::int64_t slice_ns) {
  timespec limit{static_cast<time_t>(slice_ns / 1'000'000'000), static_cast<long>(slice_ns % 1'000'000'000)};
  syscall(SYS_futex, futex_word(counter.value), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &limit, nullptr, 0);
}

}  // namespace

std::int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

void Counter::publish(std::uint64_t next, std::uint64_t note) {
  // Release: who sees this note sees the value before it, and so knows which value the note is about (`differs`).
  notes[next % kNotes].store(note, std::memory_order_release);
  // Sequentially consistent with the sleeper's announcement: either it sees the value, or we see it sleep.
  value.store(next, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, futex_word(value), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  }
}

bool Counter::differs(std::uint64_t reached, std::uint64_t note, std::uint64_t* found) const {
  *found = notes[reached % kNotes].load(std::memory_order_acquire);
  // The note is overwritten after value `reached + kNotes - 1` was published: if that isn't seen, it is still this one.
  return *found != note && read() < reached + kNotes - 1;
}

WaitResult wait_for(Counter& counter, std::uint64_t target, const WaitPolicy& policy, std::int64_t deadline_ns,
                    const Liveness& liveness, int owner) {
  if (counter.read() >= target) return WaitResult::kReached;
  const std::int64_t started = now_ns();
  const std::int64_t spin_until = std::min(started + policy.spin_ns, deadline_ns);
  do {
    for (int spin = 0; spin < kSpinsPerLook; ++spin) {
      if (counter.read() >= target) return WaitResult::kReached;
      pause_cpu();
    }
  } while (now_ns() < spin_until);
  for (int yield = 0; yield < policy.yields; ++yield) {
    if (counter.read() >= target) return WaitResult::kReached;
    sched_yield();
  }
  counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
  WaitResult result = WaitResult::kReached;
  for (;;) {
    const std::uint64_t seen = counter.value.load(std::memory_order_seq_cst);
    if (seen >= target) break;
    const std::int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0) {
      result = WaitResult::kTimedOut;
      break;
    }
    if (!liveness.is_alive(owner) && counter.read() < target) {
      result = WaitResult::kPeerDied;
      break;
    }
    futex_wait(counter, seen, std::min(left_ns, kSliceNs));
  }
  counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return result;
}

}  // namespace parallel_state
