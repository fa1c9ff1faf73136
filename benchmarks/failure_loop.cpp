#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"
#include "handle.h"

using namespace parallel_state;

namespace {

constexpr double kTimeoutS = 10;
constexpr int kDtype = 6;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kLinesBytes = kPage;  // the counters of two exchanges, of up to 16 ranks
const WaitPolicy kSpins{20'000'000, 0};     // a wake-up costs a thousand times what is measured

std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// In the order of CANDIDATES in failure_costs.py.
enum What {
  kNothing,
  kLock,
  kChecked,
  kRecord,
  kTick,
  kNotedTick,
  kComparedTick,
  kAlone,
  kCarried,
  kExchange,
  kComparedExchange
};

// Not inlined, as Counter::publish isn't.
[[gnu::noinline]] void publish_without_note(Counter& own, std::uint64_t next) {
  const auto here = static_cast<std::uint16_t>(sched_getcpu() + 1);
  if (own.core.load(std::memory_order_relaxed) != here) own.core.store(here, std::memory_order_relaxed);
  own.value.store(next, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (own.fences.load(std::memory_order_relaxed) != 0) std::atomic_thread_fence(std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_relaxed) != 0) {
    syscall(SYS_futex, &own.value, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  }
}

bool differs(const Counter& line, std::uint64_t tick, std::uint64_t call) {
  std::uint64_t note;
  return line.note_of(tick, &note) && note != call;
}

template <typename Body>
[[gnu::noinline]] double seconds_of(int calls, Body body) {
  const std::int64_t started = now_ns();
  for (int call = 0; call < calls; ++call) {
    if (!body()) return -1;
    asm volatile("" ::: "memory");
  }
  return static_cast<double>(now_ns() - started) * 1e-9;
}

class Ranks {
 public:
  Ranks(int descriptor, int rank, int size, std::size_t count)
      : rank_(rank), size_(size), in_(count), out_(count), sizes_{static_cast<std::int64_t>(count)} {
    const std::size_t bytes = pages(Handle::segment_bytes(size));
    liveness_ = std::make_unique<GroupLiveness>(members_, &ends_, size, rank);
    group_ = std::make_unique<HostGroup>(map(descriptor, bytes, 0), rank, size, *liveness_, kSpins);
    served_ = std::make_unique<Served>(
        std::make_shared<Handle>(map(descriptor, bytes, bytes), bytes, rank, size, kSpins, kTimeoutS));
    lines_ = static_cast<Counter*>(map(descriptor, kLinesBytes, 2 * bytes));
    compared_lines_ = lines_ + size;
    lines_[rank].own();
    compared_lines_[rank].own();
    own_.own();
  }

  // All ranks must call it for exchanges.
  double run(What what, int calls) {
    switch (what) {
      case kNothing: return seconds_of(calls, [] { return true; });
      case kLock: return seconds_of(calls, [this] { return locked([](Group&, double) { return Status::kDone; }); });
      case kChecked:
        return seconds_of(calls, [this] {
          return served_->handle().run([](Group&, double) { return Status::kDone; }) == Status::kDone;
        });
      case kRecord: return seconds_of(calls, [this] { return record(); });
      case kTick: return seconds_of(calls, [this] { return publish_without_note(own_, ++tick_), true; });
      case kNotedTick: return seconds_of(calls, [this] { return own_.publish(++tick_, kNote), true; });
      case kComparedTick:
        return seconds_of(calls, [this] { return own_.publish(++tick_, kNote), !differs(own_, tick_, kNote); });
      case kAlone: return seconds_of(calls, [this] { return alone(); });
      case kCarried: return seconds_of(calls, [this] { return carry(); });
      case kExchange: return seconds_of(calls, [this] { return exchange(lines_, exchanges_, false); });
      case kComparedExchange:
        return seconds_of(calls, [this] { return exchange(compared_lines_, compared_exchanges_, true); });
    }
    return -1;
  }

  std::string check(What what) {
    for (float& each : in_) each = static_cast<float>(rank_ + 1);
    const std::uint64_t before = served_->traffic(Counted::kAllReduceInPlace).calls;
    if (run(what, 1) < 0) return "it fails";
    if ((what == kAlone || what == kCarried) && !is_sum()) return "the sum is wrong";
    if ((what == kRecord || what == kCarried) && !is_recorded(before + 1)) return "it is not recorded";
    if (what == kChecked && !refuses_after_failure()) return "a failed group goes on";
    if (what == kComparedTick && !differs(own_, tick_, kNote + 1)) return "another call is not noticed";
    if (what == kComparedExchange && !notices_peers()) return "another call of a peer is not noticed";
    for (float& each : in_) each = 0;
    return "";
  }

 private:
  static constexpr std::uint64_t kNote = static_cast<std::uint64_t>(Kind::kAllReduce) << 56;

  static void* map(int descriptor, std::size_t bytes, std::size_t offset) {
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, static_cast<off_t>(offset));
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return memory;
  }

  Status all_reduce(Group& group, double timeout_s) {
    return group.all_reduce(out_.data(), in_.data(), in_.size(), Dtype::kFloat32, ReduceOp::kSum, timeout_s);
  }

  template <typename Call>
  bool locked(Call call) {
    const std::lock_guard<std::mutex> turn(turn_);
    return call(*group_, kTimeoutS) == Status::kDone;
  }

  bool alone() {
    return locked([this](Group& group, double timeout_s) { return all_reduce(group, timeout_s); });
  }

  Told told() const { return told_of(Method::kAllReduceInPlace, sizes_, kDtype, static_cast<int>(ReduceOp::kSum)); }

  bool carry() {
    const auto call = [this](Group& group, double timeout_s) { return all_reduce(group, timeout_s); };
    const std::size_t bytes = in_.size() * sizeof(float);
    return served_->carry(Counted::kAllReduceInPlace, told(), kDtype, sizes_.data(), sizes_.size(), bytes, call) ==
           Status::kDone;
  }

  bool record() {
    Record& record = served_->begin(Counted::kAllReduceInPlace, told());
    record.describe(kDtype, sizes_.data(), sizes_.size());
    record.ended_s.store(coarse_now_s(), std::memory_order_relaxed);
    served_->count(Counted::kAllReduceInPlace, in_.size() * sizeof(float));
    return true;
  }

  bool exchange(Counter* lines, std::uint64_t& tick, bool with_notes) {
    if (with_notes) lines[rank_].publish(++tick, kNote);
    else publish_without_note(lines[rank_], ++tick);
    Deadline deadline;
    deadline.set(kTimeoutS);
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      if (wait_for(lines[peer], tick, kSpins, deadline, *liveness_, peer) != WaitResult::kReached) return false;
      if (with_notes && differs(lines[peer], tick, kNote)) return false;
    }
    return true;
  }

  bool is_sum() const {
    const auto sum = static_cast<float>(size_ * (size_ + 1) / 2);
    for (const float each : out_) {
      if (each != sum) return false;
    }
    return true;
  }

  bool is_recorded(std::uint64_t calls) const {
    if (served_->traffic(Counted::kAllReduceInPlace).calls != calls) return false;
    const Record& record = served_->record(calls % Served::kRecords);
    return record.sequence == calls && record.operation == static_cast<int>(Counted::kAllReduceInPlace) &&
           record.dtype == kDtype && record.dims == 1 && record.sizes[0] == sizes_[0] && record.started_s > 0 &&
           record.ended_s >= record.started_s;
  }

  static bool refuses_after_failure() {
    const std::size_t bytes = pages(Handle::segment_bytes(1));
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    Handle failed(memory, bytes, 0, 1, kSpins, kTimeoutS);
    failed.run([](Group&, double) { return Status::kMismatch; });
    return failed.run([](Group&, double) { return Status::kDone; }) == Status::kMismatch;
  }

  bool notices_peers() {
    for (int peer = 0; peer < size_; ++peer) {
      if (!differs(compared_lines_[peer], compared_exchanges_, kNote + 1)) return false;
    }
    return true;
  }

  int rank_;
  int size_;
  std::vector<float> in_, out_;
  std::array<std::int64_t, 1> sizes_;
  std::mutex turn_;
  Member members_[64];
  ReportedEnds ends_;
  std::unique_ptr<GroupLiveness> liveness_;
  std::unique_ptr<HostGroup> group_;
  std::unique_ptr<Served> served_;
  Counter own_;
  std::uint64_t tick_ = 0;
  Counter* lines_;
  Counter* compared_lines_;
  std::uint64_t exchanges_ = 0;
  std::uint64_t compared_exchanges_ = 0;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

std::size_t failure_loop_bytes(int size) { return 2 * pages(Handle::segment_bytes(size)) + kLinesBytes; }

void* failure_loop_new(int descriptor, int rank, int size, std::size_t count) {
  return new Ranks(descriptor, rank, size, count);
}

double failure_loop_run(void* ranks, int what, int calls) {
  return static_cast<Ranks*>(ranks)->run(static_cast<What>(what), calls);
}

// Valid until the next call.
const char* failure_loop_check(void* ranks, int what) {
  static std::string found;
  found = static_cast<Ranks*>(ranks)->check(static_cast<What>(what));
  return found.c_str();
}

}  // extern "C"
#pragma GCC visibility pop
