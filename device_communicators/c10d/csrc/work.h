// A group has one *lane*, in which its collectives run in order: in a caller that waits, if nothing is queued; in a
// thread in `wait`, which first runs earlier calls; or in the lane's thread. During callbacks of a future, which may
// wait for later calls, another thread replaces the lane's.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "hooks.h"

namespace parallel_state {

using Clock = std::chrono::steady_clock;

using Interruption = std::function<std::exception_ptr()>;

std::uint64_t new_key();

// Thread-safe.
class CallLog {
 public:
  struct Entry {
    std::uint64_t sequence = 0;
    const char* method = nullptr;
    int peer = -1;
    int dtype = -1;
    c10::DimVector sizes;
    double began_s = 0, ended_s = 0;  // monotonic clock, to some milliseconds; 0: not yet
  };

  class Scope {
   public:
    Scope(CallLog& log, std::uint64_t sequence, const char* method, const at::Tensor& x, int peer = -1);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    CallLog& log_;
    Entry entry_;
  };

  std::vector<Entry> entries() const;

 private:
  mutable std::mutex mutex_;
  std::vector<const Entry*> running_;
  Entry last_;
};

// The thread that ran the call calls `settle` once, then `announce` without locks: callbacks may begin calls.
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
  // Raises if nothing needed durations when the call began.
  float getDuration() const override;
#ifdef PARALLEL_STATE_HAS_HOOKS
  std::uint64_t getCompletionKey() const override { return key_; }
#endif
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void synchronize() override;

  // If a wait times out, the call continues.
  bool wait(std::chrono::milliseconds timeout) override;

  void begin(const Hooks& hooks) {
    if (hooks.needs_durations()) began_ = Clock::now();
  }
  // A wait for the call returns after its `hooks`, which run if it succeeded.
  void settle(std::exception_ptr error, const Hooks* hooks = nullptr);
  void announce() { announce(take_future()); }
  void finish(std::exception_ptr error) {
    settle(std::move(error));
    announce();
  }
  c10::intrusive_ptr<c10::ivalue::Future> take_future();
  void announce(const c10::intrusive_ptr<c10::ivalue::Future>& future);
  bool has_announcement() const;
  void set_source_rank(int rank) { source_rank_ = rank; }
  // Lists of `length` outputs instead of one list. Call it before the call starts.
  void set_list_length(std::size_t length) { list_length_ = length; }

 protected:
  virtual bool await(std::optional<Clock::time_point> deadline) = 0;

 private:
  c10::IValue value() const;
  void complete_future(c10::ivalue::Future& future) const;

  std::atomic<bool> done_{false};
  std::vector<at::Tensor> outputs_;
  std::uint64_t sequence_;
  const std::uint64_t key_ = new_key();
  std::optional<Clock::time_point> began_;
  std::optional<float> took_ms_;  // written before done_
  std::size_t list_length_ = 0;   // 0: one list
  int source_rank_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // this, the next and the error: guarded by mutex_
  c10::intrusive_ptr<c10::ivalue::Future> future_to_complete_;
};

class Lane : public std::enable_shared_from_this<Lane> {
 public:
  class Call final : public Operation {
   public:
    using Operation::Operation;
    std::function<void()> body;  // dropped, with its tensors, after it ran
    std::shared_ptr<Lane> lane;

   protected:
    bool await(std::optional<Clock::time_point> deadline) override { return lane->await(*this, deadline); }
  };

  // Threads that wait for another thread's call poll `interruption`.
  Lane(void (*wait_gently)(int), Interruption interruption, std::shared_ptr<const Hooks> hooks)
      : wait_gently_(wait_gently), interruption_(std::move(interruption)), hooks_(std::move(hooks)) {}

  // If true, the caller runs its call now, and then calls `end_inline`.
  bool begin_inline();
  void end_inline();

  // The thread takes a `prompt` call at once, others after a delay in which their callers may wait for them.
  void post(c10::intrusive_ptr<Call> call, bool prompt);

  bool await(Call& call, std::optional<Clock::time_point> deadline);

  // Ends the thread after its current call.
  void close(const std::exception_ptr& error);

  bool drain(Clock::time_point deadline);

 private:
  bool runs_here() const { return running_ && runner_ == std::this_thread::get_id(); }
  void check_not_inside() const;
  void run_front(std::unique_lock<std::mutex>& lock, bool is_server);
  void ensure_server();
  void serve();

  void (*const wait_gently_)(int);
  const Interruption interruption_;
  const std::shared_ptr<const Hooks> hooks_;
  std::mutex mutex_;
  std::condition_variable posted_;
  std::condition_variable finished_;
  std::deque<c10::intrusive_ptr<Call>> queue_;
  bool running_ = false;
  std::thread::id runner_;  // while running_
  bool closed_ = false;
  bool prompt_ = false;
  int servers_ = 0;  // threads outside callbacks
  int looking_ = 0;  // that poll; others sleep
  int waiters_ = 0;
  std::vector<std::thread> threads_;
};

int fork_generation();

}  // namespace parallel_state
