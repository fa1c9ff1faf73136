#include "work.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>

#include <torch/csrc/distributed/c10d/exception.h>

namespace parallel_state {
namespace {

// Python takes some hundred microseconds from a functional collective to its wait.
constexpr auto kLeft = std::chrono::microseconds(1000);
constexpr int kLooks = 20;
constexpr auto kBetweenLooks = std::chrono::milliseconds(50);

std::atomic<int> forks{0};

double coarse_now_s() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

CallLog::Scope::Scope(CallLog& log, std::uint64_t sequence, const char* method, const at::Tensor& x, int peer)
    : log_(log) {
  entry_.sequence = sequence;
  entry_.method = method;
  entry_.peer = peer;
  if (x.defined()) {
    entry_.dtype = static_cast<int>(x.scalar_type());
    entry_.sizes = x.sizes();
  }
  entry_.began_s = coarse_now_s();
  const std::lock_guard<std::mutex> lock(log_.mutex_);
  log_.running_.push_back(&entry_);
}

CallLog::Scope::~Scope() {
  entry_.ended_s = coarse_now_s();
  const std::lock_guard<std::mutex> lock(log_.mutex_);
  log_.running_.erase(std::find(log_.running_.begin(), log_.running_.end(), &entry_));
  log_.last_ = entry_;
}

std::vector<CallLog::Entry> CallLog::entries() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Entry> found;
  if (last_.method != nullptr) found.push_back(last_);
  for (const Entry* const entry : running_) found.push_back(*entry);
  return found;
}

std::uint64_t new_key() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

int fork_generation() {
  static const int watched = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(watched);
  return forks.load(std::memory_order_relaxed);
}

Operation::Operation(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> inputs,
                     std::vector<at::Tensor> outputs, std::uint64_t sequence)
    : Work(rank, type, title, title == nullptr ? std::nullopt : std::optional(std::move(inputs))),
      outputs_(std::move(outputs)),
      sequence_(sequence) {}

bool Operation::isSuccess() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_.load(std::memory_order_acquire) && exception_ == nullptr;
}

std::exception_ptr Operation::exception() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return exception_;
}

void Operation::synchronize() {
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
}

float Operation::getDuration() const {
  TORCH_CHECK(done_.load(std::memory_order_acquire) && took_ms_,
              "the call has no duration: it isn't done, or began before durations were needed "
              "(`_enable_collectives_timing`, or torch's flight recorder)");
  return *took_ms_;
}

// torch's recorder registers a work after the call was started, then checks if it is done: so hooks run after `done_`
// is set. Holds `mutex_`, because a wait reads the error at its end.
void Operation::settle(std::exception_ptr error, const Hooks* hooks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  exception_ = std::move(error);
  if (began_) took_ms_ = std::chrono::duration<float, std::milli>(Clock::now() - *began_).count();
  done_.store(true, std::memory_order_release);
  if (hooks != nullptr && exception_ == nullptr) hooks->completed.call(key_, took_ms_);
}

c10::intrusive_ptr<c10::ivalue::Future> Operation::take_future() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::move(future_to_complete_);
}

bool Operation::has_announcement() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return future_to_complete_ != nullptr || recordFunctionEndCallback_ != nullptr;
}

void Operation::announce(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  if (recordFunctionEndCallback_) {
    recordFunctionEndCallback_();
    recordFunctionEndCallback_ = nullptr;
  }
  if (future) complete_future(*future);
}

c10::IValue Operation::value() const {
  if (list_length_ == 0) return c10::IValue(outputs_);
  std::vector<std::vector<at::Tensor>> lists;
  for (auto at = outputs_.begin(); at != outputs_.end(); at += static_cast<std::ptrdiff_t>(list_length_)) {
    lists.emplace_back(at, at + static_cast<std::ptrdiff_t>(list_length_));
  }
  return c10::IValue(lists);
}

void Operation::complete_future(c10::ivalue::Future& future) const {
  if (exception_ != nullptr) {
    future.setError(exception_);
  } else {
    future.markCompleted(value());
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Operation::getFuture() {
  bool complete = false;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(value().type());
      complete = done_.load(std::memory_order_relaxed);
      if (!complete) future_to_complete_ = future_;
    }
    future = future_;
  }
  if (complete) complete_future(*future);
  return future;
}

bool Operation::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) {
    std::optional<Clock::time_point> deadline;
    if (timeout > kNoTimeout) deadline = Clock::now() + timeout;
    if (!await(deadline)) {
      C10_THROW_ERROR(DistBackendError, c10::str("the call isn't done after the ", timeout.count(),
                                                 " ms of this wait's timeout; the call goes on until its own timeout"));
    }
  }
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  return true;
}

// Signal handlers run during calls must not wait for the same group.
void Lane::check_not_inside() const {
  TORCH_CHECK_WITH(
      DistBackendError, !runs_here(),
      "this thread is in a call of the group already, so it can't wait for another (in a signal handler, for example)");
}

bool Lane::begin_inline() {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_not_inside();
  if (running_ || closed_ || !queue_.empty()) return false;
  running_ = true;
  runner_ = std::this_thread::get_id();
  return true;
}

void Lane::end_inline() {
  const std::lock_guard<std::mutex> lock(mutex_);
  running_ = false;
  if (waiters_ != 0) finished_.notify_all();
  if (!queue_.empty()) posted_.notify_one();
}

void Lane::post(c10::intrusive_ptr<Call> call, bool prompt) {
  call->lane = shared_from_this();
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, "the group was destroyed or aborted: it takes no more calls");
  queue_.push_back(std::move(call));
  prompt_ = prompt_ || prompt || queue_.size() > 1;
  ensure_server();
  if (looking_ == 0 || prompt_) posted_.notify_one();
}

// A callback may wait for a later call. Earlier calls are left to the thread, because callbacks begin in the order of
// their calls.
void Lane::ensure_server() {
  if (servers_ != 0 || closed_) return;
  ++servers_;
  threads_.emplace_back([self = shared_from_this()] { self->serve(); });
}

void Lane::run_front(std::unique_lock<std::mutex>& lock, bool is_server) {
  const c10::intrusive_ptr<Call> call = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  runner_ = std::this_thread::get_id();
  prompt_ = !queue_.empty();
  lock.unlock();
  std::exception_ptr error;
  try {
    call->begin(*hooks_);
    call->body();
  } catch (...) {
    error = std::current_exception();
  }
  call->body = nullptr;
  call->settle(std::move(error), hooks_.get());
  const auto future = call->take_future();
  lock.lock();
  running_ = false;
  if (waiters_ != 0) finished_.notify_all();
  const bool leaves = is_server && future != nullptr;
  if (leaves) --servers_;
  if (!queue_.empty()) posted_.notify_one();
  lock.unlock();
  call->announce(future);
  lock.lock();
  if (leaves) ++servers_;
}

bool Lane::await(Call& call, std::optional<Clock::time_point> deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!call.isCompleted()) {
    check_not_inside();
    // A waiter with a deadline must not run a call with another one.
    if (!running_ && !queue_.empty() && !deadline) {
      run_front(lock, /*is_server=*/false);
      continue;
    }
    if (deadline && !queue_.empty() && !running_) {
      prompt_ = true;
      ensure_server();
      posted_.notify_one();
    }
    const auto next_look = Clock::now() + kBetweenLooks;
    ++waiters_;
    const bool looks =
        finished_.wait_until(lock, std::min(next_look, deadline.value_or(next_look))) == std::cv_status::timeout;
    --waiters_;
    if (!looks || call.isCompleted()) continue;
    if (deadline && Clock::now() >= *deadline) return false;
    lock.unlock();
    if (const std::exception_ptr raised = interruption_()) std::rethrow_exception(raised);
    lock.lock();
  }
  return true;
}

void Lane::serve() {
  pthread_setname_np(pthread_self(), "ps-lane");
  wait_gently_(1);
  std::unique_lock<std::mutex> lock(mutex_);
  int looks = 0;
  while (!closed_) {
    if (running_ || queue_.empty()) {
      if (looks < kLooks && !running_) {
        ++looks;
        ++looking_;
        posted_.wait_for(lock, kLeft);
        --looking_;
      } else {
        posted_.wait(lock);
        looks = 0;
      }
      continue;
    }
    if (!prompt_) {
      const auto* const first = queue_.front().get();
      const auto until = Clock::now() + kLeft;
      ++looking_;
      while (!closed_ && !prompt_ && !running_ && !queue_.empty() && queue_.front().get() == first) {
        if (posted_.wait_until(lock, until) == std::cv_status::timeout) break;
      }
      --looking_;
      looks = 0;
      if (closed_ || running_ || queue_.empty() || (queue_.front().get() != first && !prompt_)) continue;
    }
    looks = 0;
    run_front(lock, /*is_server=*/true);
  }
}

bool Lane::drain(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (running_ || !queue_.empty()) {
    if (runs_here()) return false;
    if (!running_) {
      prompt_ = true;
      ensure_server();
      posted_.notify_one();
    }
    ++waiters_;
    const bool in_time = finished_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    --waiters_;
    if (!in_time && (running_ || !queue_.empty())) return false;
  }
  return true;
}

void Lane::close(const std::exception_ptr& error) {
  std::deque<c10::intrusive_ptr<Call>> left;
  std::vector<std::thread> threads;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    left.swap(queue_);
    threads.swap(threads_);
    posted_.notify_all();
  }
  for (const auto& call : left) {
    call->body = nullptr;
    call->finish(error);
  }
  {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.notify_all();
    ++waiters_;  // a running call uses the group
    finished_.wait(lock, [this] { return !running_ || runs_here(); });
    --waiters_;
  }
  for (std::thread& thread : threads) {
    thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
  }
}

}  // namespace parallel_state
