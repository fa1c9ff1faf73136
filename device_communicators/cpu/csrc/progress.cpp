#include "progress.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "forks.h"
#include "wait.h"

namespace parallel_state {

class Progress;

namespace {

constexpr auto kShortestNap = std::chrono::microseconds(50);
constexpr auto kLongestNap = std::chrono::microseconds(1000);
// Waking a thread costs a caller more than most transfers take.
constexpr int kIdleNaps = 20;

// In linux/futex.h from 5.16 on.
struct FutexWait {
  std::uint64_t expected, address;
  std::uint32_t flags, unused;
};
constexpr long kFutexWaitv = 449;
constexpr std::uint32_t kFutex32Bits = 2;
constexpr std::size_t kMostWords = 128;

bool sleep_on(const std::vector<Sleep::Word>& words, std::int64_t until_ns) {
  std::vector<FutexWait> waits;
  if (words.size() > kMostWords) return false;
  for (const Sleep::Word& each : words) {
    waits.push_back({each.expected, reinterpret_cast<std::uint64_t>(each.at), kFutex32Bits, 0});
  }
  const timespec until{static_cast<time_t>(until_ns / 1'000'000'000), static_cast<long>(until_ns % 1'000'000'000)};
  const long woken = syscall(kFutexWaitv, waits.data(), static_cast<unsigned>(waits.size()), 0u,
                             until_ns == INT64_MAX ? nullptr : &until, CLOCK_MONOTONIC);
  return woken >= 0 || errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT;
}

thread_local Progress* of_thread = nullptr;
thread_local int callbacks = 0;

}  // namespace

class Progress {
 public:
  // The parent's threads are missing in a forked child, and its lock may be held.
  static Progress& get(bool polls) {
    std::atomic<Progress*>& current = all()[polls ? 1 : 0];
    Progress* found = current.load(std::memory_order_acquire);
    if (found != nullptr && found->generation_ == fork_generation()) return *found;
    auto* const made = new Progress(polls);  // its thread runs until exit
    if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
    delete made;
    return *found;
  }

  static void wake_all() {
    for (std::atomic<Progress*>& each : all()) {
      Progress* const found = each.load(std::memory_order_acquire);
      if (found == nullptr || found->generation_ != fork_generation()) continue;
      const std::lock_guard<std::mutex> lock(found->mutex_);
      found->wake();
    }
  }

  void add(const std::shared_ptr<Movable>& movable) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!movable->listed_) {
      movable->listed_ = true;
      listed_.push_back(movable);
    }
    wake();
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
  explicit Progress(bool polls) : event_(polls ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1), polls_(polls) {}
  ~Progress() {
    if (event_ >= 0) close(event_);
  }

  static std::atomic<Progress*> (&all())[2] {
    static std::atomic<Progress*> both[2] = {};
    return both;
  }

  // With mutex_ held.
  void wake() {
    ++news_;
    if (!sleeps_) return;
    sleeps_ = false;
    wake_.notify_one();
    word_.fetch_add(1, std::memory_order_release);
    wake_sleepers(reinterpret_cast<std::uint32_t*>(&word_));
    const std::uint64_t one = 1;
    if (event_ >= 0) static_cast<void>(write(event_, &one, sizeof one) > 0);
  }

  void start() {
    if (servers_ > 0) return;
    try {
      std::thread([this] { serve(); }).detach();  // blocks until the lock is released
      ++servers_;
    } catch (const std::system_error&) {  // a waiting caller moves it; the next one tries again
    }
  }

  void serve() {
    pthread_setname_np(pthread_self(), "ps-transfers");  // at most 15 bytes
    wait_gently(true);
    of_thread = this;
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
      const std::uint64_t news = news_;
      std::vector<std::shared_ptr<Movable>> all;
      bool moved = false;
      try {
        all = listed_;
        lock.unlock();
        for (const auto& each : all) moved |= each->move();
      } catch (const std::bad_alloc&) {  // retried after a nap
      }
      if (!lock.owns_lock()) lock.lock();
      listed_.erase(std::remove_if(listed_.begin(), listed_.end(),
                                   [](const auto& each) { return !(each->listed_ = each->has_left()); }),
                    listed_.end());
      if (moved || news != news_) idle = 0;
      bool naps = !listed_.empty() && servers_ == 1;
      if (naps && idle >= kIdleNaps) {
        naps = !sleep(lock, all);
        idle = 0;
      }
      lock.unlock();
      all.clear();  // may have the last reference to an entry
      lock.lock();
      nap = moved ? kShortestNap : std::min(2 * nap, kLongestNap);
      if (nap == kLongestNap) ++idle;
      if (naps) wake_.wait_for(lock, nap);
    }
    --servers_;
  }

  bool sleep(std::unique_lock<std::mutex>& lock, const std::vector<std::shared_ptr<Movable>>& all) {
    sleeps_ = true;
    Sleep sleep;
    const std::uint32_t own = word_.load(std::memory_order_relaxed);
    lock.unlock();
    try {
      for (const auto& each : all) each->fall_asleep(&sleep);
      sleep.polled.reserve(sleep.polled.size() + 1);
      sleep.words.reserve(sleep.words.size() + 1);
    } catch (const std::bad_alloc&) {
      sleep.naps = true;
    }
    bool slept = !sleep.naps;
    if (slept && polls_) {
      const std::int64_t limit_ns = sleep.until_ns - now_ns();
      const int limit_ms = sleep.until_ns == INT64_MAX
                               ? -1
                               : static_cast<int>(std::min<std::int64_t>(
                                     std::max<std::int64_t>(limit_ns, 0) / 1'000'000 + 1, 1'000'000));
      sleep.polled.push_back({event_, POLLIN, 0});
      slept = event_ >= 0;
      if (slept) poll(sleep.polled.data(), sleep.polled.size(), limit_ms);
    } else if (slept) {
      sleep.add(reinterpret_cast<std::uint32_t*>(&word_), own);
      slept = sleep_on(sleep.words, sleep.until_ns);
    }
    for (const auto& each : all) each->wake_up();
    std::uint64_t count;
    if (event_ >= 0) static_cast<void>(read(event_, &count, sizeof count) > 0);
    lock.lock();
    sleeps_ = false;
    return slept;
  }

  const int generation_ = fork_generation();
  const int event_;
  const bool polls_;
  std::atomic<std::uint32_t> word_{0};
  std::uint64_t news_ = 0;  // from here on guarded by mutex_
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<Movable>> listed_;
  int servers_ = 0;
  bool sleeps_ = false;
};

void keep_moving(const std::shared_ptr<Movable>& movable) { Progress::get(movable->is_polled()).add(movable); }

void wake_progress() { Progress::wake_all(); }

void wake_sleepers(std::uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }

StepOut::StepOut() : steps_out_(of_thread != nullptr && callbacks++ == 0) {
  if (steps_out_) of_thread->step_out();
}

StepOut::~StepOut() {
  if (of_thread != nullptr) --callbacks;
  if (steps_out_) of_thread->step_in();
}

}  // namespace parallel_state
