// What a call of the backend returns, and the queue in which calls wait for their turn.
//
// A group has one *lane*: its collectives run one after the other, in the order of the calls, on every rank alike. Who
// runs one is whoever has the time: the caller itself where it waits and nothing is queued, a thread in `wait`, which
// takes over what is queued before its own call, or the lane's thread, which takes what nobody has come for. While that
// one is in the callbacks of a future, which may wait for further calls of the lane, another thread stands in for it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace parallel_state {

using Clock = std::chrono::steady_clock;

// What a handler of signals raised in this thread, if it is the one that runs them and a signal has come: Ctrl-C, for
// one. Else null, and it takes no lock.
using Interruption = std::function<std::exception_ptr()>;

// A started call. Whoever ran it calls `settle` once, and then `announce`, outside of every lock: callbacks of the
// future may begin calls of their own.
class Operation : public c10d::Work {
 public:
  Operation(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> inputs,
            std::vector<at::Tensor> outputs, std::uint64_t sequence);

  bool isCompleted() override { return done_.load(std::memory_order_acquire); }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override { return source_rank_; }
  std::uint64_t getSequencenumber() const override { return sequence_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void synchronize() override;

  // Raises what the call failed with; DistBackendError where the time is over, which ends the wait and not the call.
  bool wait(std::chrono::milliseconds timeout) override;

  void settle(std::exception_ptr error);
  void announce() { announce(take_future()); }
  void finish(std::exception_ptr error) {
    settle(std::move(error));
    announce();
  }
  // In two steps: the future, null where nobody has asked for it, and then the rest with it.
  c10::intrusive_ptr<c10::ivalue::Future> take_future();
  void announce(const c10::intrusive_ptr<c10::ivalue::Future>& future);
  // Of a settled call: whether `announce` has anything to do.
  bool has_announcement() const;
  void set_source_rank(int rank) { source_rank_ = rank; }
  // Makes the future's value lists of `length` outputs instead of one list. Call it before the call starts.
  void set_list_length(std::size_t length) { list_length_ = length; }

 protected:
  // Returns once the call is done, or false at the deadline; by default what `wait` does without one.
  virtual bool await(std::optional<Clock::time_point> deadline) = 0;

 private:
  c10::IValue value() const;
  void complete_future(c10::ivalue::Future& future) const;

  std::atomic<bool> done_{false};
  std::vector<at::Tensor> outputs_;
  std::uint64_t sequence_;
  std::size_t list_length_ = 0;  // 0: one list of all outputs
  int source_rank_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // this, the next and the error: by mutex_
  c10::intrusive_ptr<c10::ivalue::Future> future_to_complete_;
};

class Lane : public std::enable_shared_from_this<Lane> {
 public:
  // A call in the lane.
  class Call final : public Operation {
   public:
    using Operation::Operation;
    std::function<void()> body;  // raises what goes wrong; dropped, with the tensors it holds, once it has run
    std::shared_ptr<Lane> lane;

   protected:
    bool await(std::optional<Clock::time_point> deadline) override { return lane->await(*this, deadline); }
  };

  // `interruption` is asked now and then by who waits for a call of another thread: what it returns ends that wait.
  Lane(void (*wait_gently)(int), Interruption interruption)
      : wait_gently_(wait_gently), interruption_(std::move(interruption)) {}

  // Whether nothing is queued and nothing runs: then the caller runs its call now, and calls `end_inline`.
  bool begin_inline();
  void end_inline();

  // Queues a call. One that is `prompt` is taken by the thread at once, another after a moment in which its caller may
  // come to wait for it.
  void post(c10::intrusive_ptr<Call> call, bool prompt);

  bool await(Call& call, std::optional<Clock::time_point> deadline);

  // Fails what is queued with `error` and ends the thread, after the call that it is in. Nothing is posted afterwards.
  void close(const std::exception_ptr& error);

  // Returns once nothing is queued and nothing runs, or at the deadline, with false.
  bool drain(Clock::time_point deadline);

 private:
  bool runs_here() const { return running_ && runner_ == std::this_thread::get_id(); }
  void check_not_inside() const;
  void run_front(std::unique_lock<std::mutex>& lock, bool is_server);
  void ensure_server();
  void serve();

  void (*const wait_gently_)(int);
  const Interruption interruption_;
  std::mutex mutex_;
  std::condition_variable posted_;    // for the threads
  std::condition_variable finished_;  // for those who wait for a call
  std::deque<c10::intrusive_ptr<Call>> queue_;
  bool running_ = false;
  std::thread::id runner_;  // in which thread, where something runs
  bool closed_ = false;
  bool prompt_ = false;  // what is queued is not to be left to its caller
  int servers_ = 0;      // threads that are not in callbacks
  int looking_ = 0;      // threads that look again by themselves; others sleep until they are woken
  int waiters_ = 0;
  std::vector<std::thread> threads_;
};

// How often this process and its ancestors were forked since this was first called: what was made when it was another
// number belongs to an ancestor.
int fork_generation();

}  // namespace parallel_state
