#include "progress.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "forks.h"
#include "wait.h"

namespace parallel_state {
namespace {

constexpr auto kShortestNap = std::chrono::microseconds(50);
constexpr auto kLongestNap = std::chrono::microseconds(1000);
// A thread that has nothing to do for this many of the longest naps sleeps until it is woken. Waking it costs a caller
// more than most transfers take.
constexpr int kIdleNaps = 20;

thread_local bool is_progress_thread = false;
thread_local int callbacks = 0;  // that this thread is in, one within the other

}  // namespace

class Progress {
 public:
  // A forked child gets one of its own: the parent's threads, and maybe a held lock, are not there.
  static Progress& get() {
    static std::atomic<Progress*> current{nullptr};
    Progress* found = current.load(std::memory_order_acquire);
    if (found != nullptr && found->generation_ == fork_generation()) return *found;
    auto* const made = new Progress;  // never deleted: its thread runs until the process exits
    if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
    delete made;
    return *found;
  }

  void add(const std::shared_ptr<Movable>& movable) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!movable->listed_) {
      movable->listed_ = true;
      listed_.push_back(movable);
    }
    if (sleeps_) wake_.notify_one();
    start();
  }

  void step_out() {
    const std::lock_guard<std::mutex> lock(mutex_);
    --servers_;
    if (!listed_.empty()) start();
  }

  void step_in() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++servers_;
  }

 private:
  void start() {
    if (servers_ > 0) return;
    try {
      std::thread([this] { serve(); }).detach();  // it waits for the lock
      ++servers_;
    } catch (
        const std::system_error&) {  // no thread can be had now: callers that wait move, and the next one tries again
    }
  }

  void serve() {
    pthread_setname_np(pthread_self(), "ps-transfers");  // at most 15 bytes
    wait_gently(true);
    is_progress_thread = true;
    auto nap = kShortestNap;
    int idle = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (servers_ == 1) {
      if (listed_.empty()) {
        if (++idle <= kIdleNaps) {
          wake_.wait_for(lock, kLongestNap);
        } else {
          sleeps_ = true;
          wake_.wait(lock);
          sleeps_ = false;
          idle = 0;
        }
        nap = kShortestNap;
        continue;
      }
      idle = 0;
      std::vector<std::shared_ptr<Movable>> all = listed_;
      lock.unlock();
      bool moved = false;
      for (const auto& each : all) moved |= each->move();
      lock.lock();
      listed_.erase(std::remove_if(listed_.begin(), listed_.end(),
                                   [](const auto& each) { return !(each->listed_ = each->has_left()); }),
                    listed_.end());
      lock.unlock();
      all.clear();  // the last reference to an entry may be among them
      lock.lock();
      nap = moved ? kShortestNap : std::min(2 * nap, kLongestNap);
      if (!listed_.empty() && servers_ == 1) wake_.wait_for(lock, nap);
    }
    --servers_;  // another thread took over while this one was in a callback
  }

  const int generation_ = fork_generation();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<Movable>> listed_;
  int servers_ = 0;  // threads that are not in a callback
  bool sleeps_ = false;
};

void keep_moving(const std::shared_ptr<Movable>& movable) { Progress::get().add(movable); }

StepOut::StepOut() : steps_out_(is_progress_thread && callbacks++ == 0) {
  if (steps_out_) Progress::get().step_out();
}

StepOut::~StepOut() {
  if (is_progress_thread) --callbacks;
  if (steps_out_) Progress::get().step_in();
}

}  // namespace parallel_state
