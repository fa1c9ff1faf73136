#include "wait.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "interrupt.h"

namespace parallel_state {
namespace {

constexpr std::int64_t kSliceNs = 20'000'000;
constexpr std::int64_t kBusySliceNs = 1'000'000;
constexpr std::int64_t kUnsureSliceNs = 1'000'000;  // a wake-up may be lost
constexpr int kProbes = 8;                          // a rank about to publish does so within 100 ns
constexpr int kSpinsPerLook = 32;                   // reading the clock costs as much as a pause or two
constexpr int kYieldsToNeighbour = 100;
constexpr std::int64_t kStrangerNs = 1'000'000;  // a longer yield gave another process its time slice
constexpr int kLeastWaryWaits = 8;
constexpr int kMostWaryWaits = 512;

// The kernel compares the lower 32 bits of the counter.
std::uint32_t* futex_word(std::atomic<std::uint64_t>& value) {
  auto* word = reinterpret_cast<std::uint32_t*>(&value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  ++word;
#endif
  return word;
}

bool futex_wait(Counter& counter, std::uint64_t seen, std::int64_t slice_ns) {
  timespec limit{static_cast<time_t>(slice_ns / 1'000'000'000), static_cast<long>(slice_ns % 1'000'000'000)};
  return syscall(SYS_futex, futex_word(counter.value), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &limit, nullptr,
                 0) != 0 &&
         errno == EINTR;
}

bool membarrier(int command) { return syscall(SYS_membarrier, command, 0, 0) == 0; }

std::uint16_t current_core() { return static_cast<std::uint16_t>(sched_getcpu() + 1); }

// This thread's next waits that sleep without yielding: beside a foreign process on the core, a yielding rank waits for
// its time slice (1.9 ms a call against 0.2). Yielding is tried again after twice as many waits.
thread_local int wary_waits = 0;
thread_local int wary_next = kLeastWaryWaits;

thread_local bool gentle = false;

bool yield_until(const Counter& counter, std::uint64_t target, int count, SideWork* side_work) {
  if (count == 0 || gentle) return false;
  if (wary_waits > 0) {
    --wary_waits;
    return false;
  }
  const std::int64_t started = now_ns();
  for (int yield = 1; yield <= count; ++yield) {
    sched_yield();
    if (side_work != nullptr) side_work->advance();
    if (counter.read() < target && yield < count) continue;
    const bool stranger = now_ns() - started > kStrangerNs * yield;
    wary_waits = stranger ? wary_next : 0;
    wary_next = stranger ? std::min(2 * wary_next, kMostWaryWaits) : kLeastWaryWaits;
    return counter.read() >= target;
  }
  return false;
}

WaitResult sleep_for(Counter& counter, std::uint64_t target, std::int64_t deadline_ns, const Liveness& liveness,
                     int owner, SideWork* side_work) {
  counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
  // If the barrier runs before the owner checks for sleepers, the check sees this one; if after, the value stored
  // before the check is seen below.
  const bool sure = membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) || counter.fences.load(std::memory_order_relaxed) != 0;
  WaitResult result = WaitResult::kReached;
  for (bool signal = false;;) {
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
    if (interrupted(signal)) {
      result = WaitResult::kInterrupted;
      break;
    }
    const bool is_busy = side_work != nullptr && side_work->advance();
    const std::int64_t slice_ns = is_busy ? kBusySliceNs : sure ? kSliceNs : kUnsureSliceNs;
    signal = futex_wait(counter, seen, std::min(left_ns, slice_ns));
  }
  counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return result;
}

}  // namespace

void wait_gently(bool gently) { gentle = gently; }

bool waits_gently() { return gentle; }

std::int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

void Counter::own() {
  const bool barriers = membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED);
  fences.store(barriers ? 0 : 1, std::memory_order_relaxed);
}

// The store of the value and the check for sleepers must not be reordered. A fence here would cost 0.4 us of 2.1 at 8
// KiB, so the sleeper makes all cores pass a barrier.
void Counter::publish(std::uint64_t next, std::uint64_t note) {
  // Release: a rank that sees this note also sees the value before it.
  notes[next % kNotes].store(note, std::memory_order_release);
  const std::uint16_t here = current_core();
  if (core.load(std::memory_order_relaxed) != here) core.store(here, std::memory_order_relaxed);
  value.store(next, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (fences.load(std::memory_order_relaxed) != 0) std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_relaxed) != 0) {
    syscall(SYS_futex, futex_word(value), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  }
}

bool Counter::begin_sleep(std::uint64_t target, std::uint64_t* seen) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const bool sure = membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) || fences.load(std::memory_order_relaxed) != 0;
  *seen = value.load(std::memory_order_seq_cst);
  if (sure && *seen < target) return true;
  end_sleep();
  return false;
}

std::uint32_t* Counter::word() { return futex_word(value); }

bool Counter::flagged(std::uint64_t reached) const {
  // The note is overwritten after value `reached + kNotes - 1` is published.
  const std::uint64_t note = notes[reached % kNotes].load(std::memory_order_acquire);
  return (note & kFlag) != 0 && read() < reached + kNotes - 1;
}

bool Counter::shares_core() const {
  const std::uint16_t there = core.load(std::memory_order_relaxed);
  return there != 0 && there == current_core();
}

WaitResult wait_for(Counter& counter, std::uint64_t target, const WaitPolicy& policy, Deadline& deadline,
                    const Liveness& liveness, int owner) {
  for (int probe = 0; probe < kProbes; ++probe) {
    if (counter.read() >= target) return WaitResult::kReached;
  }
  const bool neighbour = counter.shares_core();
  const std::int64_t started = now_ns();
  const std::int64_t deadline_ns = deadline.at_ns(started);
  const std::int64_t spin_until = std::min(started + (gentle ? kGentleSpinNs : policy.spin_ns), deadline_ns);
  if (!neighbour) {
    do {
      for (int spin = 0; spin < kSpinsPerLook; ++spin) {
        if (counter.read() >= target) return WaitResult::kReached;
        pause_cpu();
      }
      if (policy.side_work != nullptr) policy.side_work->advance();
    } while (now_ns() < spin_until);
  }
  const int yields = neighbour ? std::max(policy.yields, kYieldsToNeighbour) : policy.yields;
  if (yield_until(counter, target, yields, policy.side_work)) return WaitResult::kReached;
  return sleep_for(counter, target, deadline_ns, liveness, owner, policy.side_work);
}

}  // namespace parallel_state
