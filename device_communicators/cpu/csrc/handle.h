// The groups of this process. Running calls keep a group alive, so any thread may close it. Overlapping calls fail with
// kBusy: ranks can't agree on an order of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arena.h"
#include "host_group.h"
#include "hosts_group.h"
#include "loans.h"
#include "open_queue.h"

namespace parallel_state {

class Transfers;

struct Failure : FailureNote {
  double elapsed_s = 0;
  std::string text;
};

enum class Counted : int {
  kAllReduce,
  kAllReduceInPlace,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kBroadcastInPlace,
  kAllToAll,
  kBarrier,
  kFused,
  kGather,
  kScatter,
  kAllGatherv,
  kReduceScatterv,
  kSendList,
  kReceiveList,
  kBroadcastList,
  kSendMessage,
  kReceiveMessage,
  kBroadcastMessage,
  kSend,
  kReceive,
  kCount
};

struct Traffic {
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> bytes{0};
};

// Written by the thread in a call, read by any.
struct Meter {
  static constexpr int kMethods = 256;
  struct Row {
    std::atomic<std::uint64_t> calls{0}, took_ns{0}, waited_ns{0};
  };
  explicit Meter(int size) : last(static_cast<std::size_t>(size)) {}

  Row rows[kMethods];
  std::vector<std::atomic<std::uint64_t>> last;

  void note(const Group& group, std::int64_t took_ns);
};

void measure_calls(bool on);
bool calls_are_measured();

// Accurate to a few ms, at a fifth of the exact clock's cost.
double coarse_now_s();

class Handle final : public Losses {
 public:
  static std::size_t segment_bytes(int size) { return ends_offset(size) + sizeof(ReportedEnds); }

  // Owns `memory`, a mapping of `bytes`; null: private memory, for a rank alone on its host.
  Handle(void* memory, std::size_t bytes, int rank, int size, WaitPolicy policy, double timeout_s);
  ~Handle() override;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  template <typename Call>
  Status run(Call call) {
    if (!enter()) return is_held() ? run_entered(call) : Status::kBusy;
    const Leave leave{*this};
    return run_entered(call);
  }

  bool enter() { return !busy_.exchange(true, std::memory_order_acquire); }
  void leave() { busy_.store(false, std::memory_order_release); }

  template <typename Call>
  Status run_entered(Call call) {
    if (in_call_) return Status::kBusy;  // in a signal handler
    if (liveness_.is_doomed()) doom();
    if (failed_) return static_cast<Status>(failure_.status);
    const double started_s = coarse_now_s();
    const bool measured = calls_are_measured();
    group_->measure(measured);
    const std::int64_t started_ns = measured ? now_ns() : 0;
    in_call_ = true;
    Status status;
    try {
      status = call(*group_, timeout_s());
    } catch (const std::bad_alloc&) {
      status = group_->out_of_memory();
    }
    in_call_ = false;
    if (measured) meter_->note(*group_, now_ns() - started_ns);
    if (status != Status::kDone && status != Status::kUnsupported) note(status, coarse_now_s() - started_s);
    return status;
  }

  bool hold();
  void release();
  bool is_held() const;
  bool is_busy() const { return busy_.load(std::memory_order_relaxed); }

  Failure failure() {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    return failure_;
  }

  // Owns `first_pages`, mappings of every rank's arena. Call it once, before use.
  void set_arenas(void* const* first_pages, std::size_t bytes, int descriptor, std::size_t file_offset);

  Arena* arena() const { return arena_.get(); }
  Windows* arena_of(int rank) const { return windows_.empty() ? nullptr : windows_[rank].get(); }
  Lender* lender() const { return lender_.get(); }
  Windows* windows_of(int rank) const;
  const WaitPolicy& wait_policy() const { return policy_; }

  GroupLiveness& liveness() { return liveness_; }

  // The ranks become those of `host_of_rank`. Call it once, before use.
  void span(int rank, std::vector<int> host_of_rank, std::unique_ptr<Connections> connections, bool meshed,
            bool rounded);
  HostsGroup* hosts() const { return hosts_.get(); }

  void listen_to(const std::shared_ptr<control::EndListeners>& source, std::vector<int> ranks, std::vector<int> domain);
  Loss loss(int rank) const override;
  void leave_group();
  void fail(int status, int suspect);
  bool has_left(int rank) const;

  Queues& queues() { return queues_; }

  std::shared_ptr<Transfers> transfers() {
    const std::lock_guard<std::mutex> lock(transfers_mutex_);
    return transfers_.lock();
  }
  void set_transfers(const std::shared_ptr<Transfers>& transfers) {
    const std::lock_guard<std::mutex> lock(transfers_mutex_);
    transfers_ = transfers;
  }

  void set_timeout(double timeout_s) { timeout_s_.store(std::min(timeout_s, kLongestS), std::memory_order_relaxed); }
  double timeout_s() const { return timeout_s_.load(std::memory_order_relaxed); }

  const Meter& meter() const { return *meter_; }

  void set_areas(int ranks, std::int64_t from_bytes) { host_group_.set_areas(ranks, from_bytes); }
  std::uint64_t crossed_bytes() const { return host_group_.crossed_bytes(); }

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }

 private:
  static constexpr double kLongestS = 1e9;
  static std::size_t members_offset(int size) { return (HostGroup::segment_bytes(size) + 63) / 64 * 64; }
  static std::size_t ends_offset(int size) { return members_offset(size) + size * sizeof(Member); }
  struct Leave {
    Handle& handle;
    ~Leave() { handle.leave(); }
  };
  void note(Status status, double elapsed_s);
  void doom();

  std::atomic<bool> busy_{false};
  bool in_call_ = false;  // this and the next: only for the thread that has entered
  bool failed_ = false;
  void* memory_;
  std::size_t bytes_;
  WaitPolicy policy_;
  std::atomic<double> timeout_s_;
  GroupLiveness liveness_;
  HostGroup host_group_;
  std::unique_ptr<HostsGroup> hosts_;
  Group* group_;
  std::unique_ptr<Meter> meter_;
  std::mutex failure_mutex_;
  Failure failure_;
  std::vector<std::unique_ptr<Windows>> windows_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Lender> lender_;
  Queues queues_;
  std::mutex transfers_mutex_;
  std::weak_ptr<Transfers> transfers_;
};

// Other calls fail meanwhile, also those of this thread's signal handlers.
class Entered {
 public:
  explicit Entered(Handle& handle) : handle_(handle), has_it_(handle.enter()) {}
  ~Entered() {
    if (has_it_) handle_.leave();
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  explicit operator bool() const { return has_it_; }

 private:
  Handle& handle_;
  const bool has_it_;
};

// Numbers are never reused.
std::uint64_t keep(std::shared_ptr<Handle> handle);
std::shared_ptr<Handle> find(std::uint64_t number);
void forget(std::uint64_t number);

// One thread writes; any thread reads, and detects a half-overwritten record by its number.
struct Record {
  static constexpr int kDims = 6;

  std::atomic<std::uint64_t> sequence{0};
  std::atomic<std::int64_t> operation{0}, dtype{0}, dims{0};
  std::atomic<std::int64_t> sizes[kDims];
  std::atomic<std::int64_t> peer{-1};
  std::atomic<std::int64_t> method{0};           // of a call of all ranks: the word of its `Told`
  std::atomic<double> started_s{0}, ended_s{0};  // monotonic clock; 0: not yet

  void begin(std::uint64_t number, Counted what);
  bool is_open() const {
    return started_s.load(std::memory_order_relaxed) != 0 && ended_s.load(std::memory_order_relaxed) == 0;
  }
  void describe(int tensor_dtype, const std::int64_t* tensor_sizes, std::size_t tensor_dims);
};

class Served {
 public:
  static constexpr std::uint64_t kRecords = 64;

  explicit Served(std::shared_ptr<Handle> handle) : handle_(std::move(handle)) {}

  Handle& handle() const { return *handle_; }
  std::shared_ptr<Handle> share() const { return handle_; }

  std::uint64_t next() { return sequence_.fetch_add(1, std::memory_order_relaxed) + 1; }
  // Python repeats a failed call under the call's number.
  std::uint64_t next_in_python() {
    const std::uint64_t last = sequence_.load(std::memory_order_relaxed);
    Record& record = records_[last % kRecords];
    const bool is_of_another_thread = handle_->is_busy() && !handle_->is_held();
    if (record.sequence.load(std::memory_order_relaxed) == last && record.is_open() && !is_of_another_thread) {
      record.started_s.store(0, std::memory_order_relaxed);
      return last;
    }
    return next();
  }
  void go_on_after(std::uint64_t sequence) { sequence_.store(sequence, std::memory_order_relaxed); }

  Record& begin(Counted operation, Told told);
  // Any thread may call it.
  Record& begin_transfer(Counted operation, int peer, int method);
  void end_transfer() { transfers_under_way_.fetch_sub(1, std::memory_order_relaxed); }
  bool has_transfers() const { return transfers_under_way_.load(std::memory_order_relaxed) != 0; }

  void drop_transfer(Record& record) { record.started_s.store(0, std::memory_order_relaxed); }
  void drop_broadcast(Record& record) {
    record.started_s.store(0, std::memory_order_relaxed);
    sequence_.fetch_sub(1, std::memory_order_relaxed);
  }

  void end(Record& record, Counted operation, std::size_t bytes) {
    record.ended_s.store(coarse_now_s(), std::memory_order_relaxed);
    count(operation, bytes);
  }

  void count(Counted operation, std::size_t bytes) {
    Traffic& traffic = traffic_[static_cast<int>(operation)];
    traffic.calls.fetch_add(1, std::memory_order_relaxed);
    traffic.bytes.fetch_add(bytes, std::memory_order_relaxed);
  }

  template <typename Call>
  Status carry(Counted operation, Told told, int dtype, const std::int64_t* sizes, std::size_t dims, std::size_t bytes,
               Call call) {
    return handle_->run([&](Group& group, double timeout_s) {
      Record& record = begin(operation, told);  // inside `run`: a refused call gets no number
      record.describe(dtype, sizes, dims);
      group.tell(told);
      const Status status = call(group, timeout_s);
      if (status != Status::kDone) return status;
      end(record, operation, bytes);
      return status;
    });
  }

  const Traffic& traffic(Counted operation) const { return traffic_[static_cast<int>(operation)]; }
  const Record& record(std::uint64_t index) const {
    return index < kRecords ? records_[index] : transfers_[index - kRecords];
  }

 private:
  std::shared_ptr<Handle> handle_;
  std::atomic<std::uint64_t> sequence_{0};
  Traffic traffic_[static_cast<int>(Counted::kCount)];
  Record records_[kRecords], transfers_[kRecords];
  std::atomic<std::uint64_t> next_transfer_{0};
  std::atomic<int> transfers_under_way_{0};
};

class RecordedTransfer {
 public:
  RecordedTransfer(Served& served, Counted operation, int peer, int method)
      : served_(served), record_(served.begin_transfer(operation, peer, method)) {}
  ~RecordedTransfer() {
    if (record_.ended_s.load(std::memory_order_relaxed) == 0) served_.drop_transfer(record_);
    served_.end_transfer();
  }
  RecordedTransfer(const RecordedTransfer&) = delete;
  RecordedTransfer& operator=(const RecordedTransfer&) = delete;
  Record& record() const { return record_; }

 private:
  Served& served_;
  Record& record_;
};

// The Python kernel of an op refused with kBusy takes this note once and refuses it, too.
void note_overlap(const Handle* handle);
bool take_overlap(const Handle* handle);

// Exists while an op's Python kernel repeats the call of `began_s` (monotonic clock).
class Repetition {
 public:
  explicit Repetition(double began_s);
  ~Repetition();
  Repetition(const Repetition&) = delete;
  Repetition& operator=(const Repetition&) = delete;

 private:
  const double outer_s_;
};

double repeated_since_s();

// The time of the failed call that this thread's next op repeats. The op takes it once; 0: none.
void leave_to_op(double began_s);
double take_left_to_op();

void call_as(int method);
Told as_called(Told told);

void serve(const std::string& key, std::shared_ptr<Handle> handle);
void stop_serving(const std::string& key);
std::shared_ptr<Served> find_served(std::string_view key);

}  // namespace parallel_state
