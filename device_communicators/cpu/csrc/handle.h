// The groups that this process has, for callers that must not hold a pointer: by number for the C interface, by the
// group's name for the registered ops.
//
// A handle owns its group and the memory that the group works in. Whoever is in the middle of a call keeps it alive, so
// that a group can be closed by another thread at any time: the call ends by itself, at its deadline at the latest, and
// the memory goes with the last one. A call that begins while another is under way fails with kBusy: no turn of threads
// on one rank would be that of the others. A forked child has none of them.
#pragma once

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

// What went wrong first: the group is of no use from then on, and each later call fails with this at once.
struct Failure {
  Status status = Status::kDone;
  int suspect = -1;
  int reporter = -1;  // who found out, where that was another rank
  Shown expected;
  Shown found;
  Misfit misfit;
  double elapsed_s = 0;
  std::string text;  // see Group::text
};

// Operations that the registered ops count by themselves.
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

// What the calls of a group took, by their method's number, and how often which of its ranks came last. Written by who
// is in a call, one at a time; read by any.
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

// Whether calls of all groups of this process are measured.
void measure_calls(bool on);
bool calls_are_measured();

// Good to some milliseconds, for a fifth of the price of the exact clock.
double coarse_now_s();

class Handle {
 public:
  // Of the memory that a handle works in.
  static std::size_t segment_bytes(int size) { return ends_offset(size) + sizeof(ReportedEnds); }

  // Takes over `memory`, a mapping of `bytes`; null for memory of its own, for a rank that is alone on its host.
  Handle(void* memory, std::size_t bytes, int rank, int size, WaitPolicy policy, double timeout_s);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Runs `call(group, timeout_s)`, unless a call is under way or the group failed before.
  template <typename Call>
  Status run(Call call) {
    if (!enter()) return is_held() ? run_entered(call) : Status::kBusy;
    const Leave leave{*this};
    return run_entered(call);
  }

  // Whether no other call was under way; until `leave` there can be none. Acquire and release pair: the next call sees
  // what this one wrote.
  bool enter() { return !busy_.exchange(true, std::memory_order_acquire); }
  void leave() { busy_.store(false, std::memory_order_release); }

  // As `run`, by who has entered; a signal handler that interrupts it can't.
  template <typename Call>
  Status run_entered(Call call) {
    if (in_call_) return Status::kBusy;  // a signal handler in the middle of the call
    if (liveness_.is_doomed()) doom();
    if (failed_) return failure_.status;
    const double started_s = coarse_now_s();
    const bool measured = calls_are_measured();
    group_->measure(measured);
    const std::int64_t started_ns = measured ? now_ns() : 0;
    in_call_ = true;
    Status status;
    try {
      status = call(*group_, timeout_s_.load(std::memory_order_relaxed));
    } catch (const std::bad_alloc&) {
      status = group_->out_of_memory();
    }
    in_call_ = false;
    if (measured) meter_->note(*group_, now_ns() - started_ns);
    // An unsupported call has done nothing: another way may carry it.
    if (status != Status::kDone && status != Status::kUnsupported) note(status, coarse_now_s() - started_s);
    return status;
  }

  // As `enter` and `leave`, around several calls of this thread.
  bool hold();
  void release();
  bool is_busy() const { return busy_.load(std::memory_order_relaxed); }

  Failure failure() {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    return failure_;
  }

  // Takes over the mappings of the first page of every rank's part of the memory for tensors, which may grow to `bytes`
  // each; this rank allocates from its own: see Arena. Once, before the handle is used.
  void set_arenas(void* const* first_pages, std::size_t bytes, int descriptor, std::size_t file_offset);

  // Null where there is none.
  Arena* arena() const { return arena_.get(); }
  Windows* arena_of(int rank) const { return windows_.empty() ? nullptr : windows_[rank].get(); }
  Lender* lender() const { return lender_.get(); }  // of tensors in this rank's arena

  GroupLiveness& liveness() { return liveness_; }  // of the ranks of this host

  // From now on the group spans several hosts: this one's ranks are those of the handle so far, in their order. See
  // HostsGroup. Once, before the handle is used.
  void span(int rank, std::vector<int> host_of_rank, std::unique_ptr<Connections> connections, bool meshed,
            bool rounded);
  HostsGroup* hosts() const { return hosts_.get(); }  // null on one host

  // Ranks below are those of the whole group. See GroupLiveness.
  void listen_to(const std::shared_ptr<control::EndListeners>& source, std::vector<int> ranks, std::vector<int> domain);
  Loss loss(int rank) const;
  // This rank leaves on purpose, or gave up outside of a call: ranks that wait for it, now or later, learn of it.
  void leave_group();
  void fail(int status, int suspect);
  bool has_left(int rank) const;

  Queues& queues() { return queues_; }  // of messages

  // Sends and receives of plain tensors; null where there are none. They keep the handle, and not the other way round.
  std::shared_ptr<Transfers> transfers() {
    const std::lock_guard<std::mutex> lock(transfers_mutex_);
    return transfers_.lock();
  }
  void set_transfers(const std::shared_ptr<Transfers>& transfers) {
    const std::lock_guard<std::mutex> lock(transfers_mutex_);
    transfers_ = transfers;
  }

  // Of the calls that begin from now on; where callers take turns.
  void set_timeout(double timeout_s) { timeout_s_.store(timeout_s, std::memory_order_relaxed); }

  const Meter& meter() const { return *meter_; }

  // See Group; before the handle is used.
  void set_areas(int ranks, std::int64_t from_bytes) { host_group_.set_areas(ranks, from_bytes); }
  std::uint64_t crossed_bytes() const { return host_group_.crossed_bytes(); }  // between calls

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }

 private:
  static std::size_t members_offset(int size) { return (HostGroup::segment_bytes(size) + 63) / 64 * 64; }
  static std::size_t ends_offset(int size) { return members_offset(size) + size * sizeof(Member); }
  struct Leave {
    Handle& handle;
    ~Leave() { handle.leave(); }
  };
  bool is_held() const;  // by this thread

  void note(Status status, double elapsed_s);
  void doom();

  std::atomic<bool> busy_{false};
  bool in_call_ = false;  // this and the next: written and read by who has entered
  bool failed_ = false;
  void* memory_;
  std::size_t bytes_;
  WaitPolicy policy_;
  std::atomic<double> timeout_s_;
  GroupLiveness liveness_;
  HostGroup host_group_;
  std::unique_ptr<HostsGroup> hosts_;
  Group* group_;  // that which carries the calls
  std::unique_ptr<Meter> meter_;
  std::mutex failure_mutex_;
  Failure failure_;
  std::vector<std::unique_ptr<Windows>> windows_;  // of the arenas, by rank
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Lender> lender_;
  Queues queues_;
  std::mutex transfers_mutex_;
  std::weak_ptr<Transfers> transfers_;
};

// Numbers begin at 1 and are never used again.
std::uint64_t keep(std::shared_ptr<Handle> handle);
std::shared_ptr<Handle> find(std::uint64_t number);
void forget(std::uint64_t number);

// One operation, for whoever asks later what a rank was doing. Written by one thread at a time, read by any, even while
// the writer is stuck: each word is atomic, and a record that is half overwritten shows a number that doesn't fit.
struct Record {
  static constexpr int kDims = 6;

  std::atomic<std::uint64_t> sequence{0};
  std::atomic<std::int64_t> operation{0}, dtype{0}, dims{0};  // dtype by torch's numbers
  std::atomic<std::int64_t> sizes[kDims];
  std::atomic<std::int64_t> peer{-1};            // the other rank of a transfer
  std::atomic<std::int64_t> method{0};           // of a transfer, or the word of `Told` of a message to all
  std::atomic<double> started_s{0}, ended_s{0};  // on the monotonic clock; 0: not yet

  void begin(std::uint64_t number, Counted what);
  void describe(int tensor_dtype, const std::int64_t* tensor_sizes, std::size_t tensor_dims);
};

// A group as the ops that are called with one name see it.
class Served {
 public:
  static constexpr std::uint64_t kRecords = 64;

  explicit Served(std::shared_ptr<Handle> handle) : handle_(std::move(handle)) {}

  Handle& handle() const { return *handle_; }
  std::shared_ptr<Handle> share() const { return handle_; }

  // The number of the next operation of the group, whoever carries it.
  std::uint64_t next() { return sequence_.fetch_add(1, std::memory_order_relaxed) + 1; }
  void go_on_after(std::uint64_t sequence) { sequence_.store(sequence, std::memory_order_relaxed); }

  Record& begin(Counted operation, int dtype, const std::int64_t* sizes, std::size_t dims);
  // A message to all, as the group's next operation.
  Record& begin_broadcast(Counted operation, Told told);
  // A transfer, which has the number of the operation before it. Any thread may be in one. `method`: see ToOne.
  Record& begin_transfer(Counted operation, int peer, int method);
  void end_transfer() { transfers_under_way_.fetch_sub(1, std::memory_order_relaxed); }
  bool has_transfers() const { return transfers_under_way_.load(std::memory_order_relaxed) != 0; }

  // Forgets a transfer, or the broadcast that has just begun, which Python is to begin again.
  void drop_transfer(Record& record) { record.started_s.store(0, std::memory_order_relaxed); }
  void drop_broadcast(Record& record) {
    record.started_s.store(0, std::memory_order_relaxed);
    sequence_.fetch_sub(1, std::memory_order_relaxed);
  }

  // Notes that an operation of so many bytes is done.
  void end(Record& record, Counted operation, std::size_t bytes) {
    record.ended_s.store(coarse_now_s(), std::memory_order_relaxed);
    count(operation, bytes);
  }

  void count(Counted operation, std::size_t bytes) {
    Traffic& traffic = traffic_[static_cast<int>(operation)];
    traffic.calls.fetch_add(1, std::memory_order_relaxed);
    traffic.bytes.fetch_add(bytes, std::memory_order_relaxed);
  }

  // Runs `call(group, timeout_s)` as the group's next operation, on a tensor of `sizes`: recorded, and counted with its
  // `bytes` where it succeeds.
  template <typename Call>
  Status carry(Counted operation, int dtype, const std::int64_t* sizes, std::size_t dims, std::size_t bytes,
               Call call) {
    return handle_->run([&](Group& group, double timeout_s) {
      Record& record = begin(operation, dtype, sizes, dims);  // a call that doesn't begin has no number
      const Status status = call(group, timeout_s);
      if (status != Status::kDone) return status;
      end(record, operation, bytes);
      return status;
    });
  }

  const Traffic& traffic(Counted operation) const { return traffic_[static_cast<int>(operation)]; }
  // The first kRecords are operations of all ranks, as many more transfers.
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

// Records a transfer as started until this object is destroyed. A transfer that hasn't ended by then is dropped from
// the records.
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

// A call of this thread that the registered ops found in the middle of another one: the Python route, which they hand
// it on to, must refuse it, too. It is taken once.
void note_overlap(const Handle* handle);
bool take_overlap(const Handle* handle);

// Exists while the Python twin of an op runs, which repeats the op's call from its begin. `began_s`: when the op was
// called, on the monotonic clock; the twin's errors count from there. What the op noted for its twin ends with it.
class Repetition {
 public:
  explicit Repetition(double began_s);
  ~Repetition();
  Repetition(const Repetition&) = delete;
  Repetition& operator=(const Repetition&) = delete;

 private:
  const double outer_s_;  // of the twin that called this op, which began earlier
};

// When the op was called that this thread repeats in Python; 0 outside of such a call.
double repeated_since_s();

// Notes when a call began that failed and that this thread's next op repeats. It is taken once; 0: there is none.
void leave_to_op(double began_s);
double take_left_to_op();

// See ps_call_as.
void call_as(int method);
Told as_called(Told told);

// A name that nobody serves goes to the Python route.
void serve(const std::string& key, std::shared_ptr<Handle> handle);
void stop_serving(const std::string& key);
std::shared_ptr<Served> find_served(std::string_view key);

}  // namespace parallel_state
