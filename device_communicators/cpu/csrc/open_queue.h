// Calls into an open end take turns. A call that bypasses Python falls back to it if the turn isn't free, a message is
// half written or half read, or Python's messages go first.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "queue.h"

namespace parallel_state {

class Turn {
 public:
  bool try_take() { return !taken_.exchange(true, std::memory_order_acquire); }
  bool take(double timeout_s) {
    if (try_take()) return true;
    for (const std::int64_t until_ns = now_ns() + static_cast<std::int64_t>(timeout_s * 1e9); now_ns() < until_ns;) {
      usleep(kNapUs);
      if (try_take()) return true;
    }
    return false;
  }
  void let_go() { taken_.store(false, std::memory_order_release); }

 private:
  static constexpr unsigned kNapUs = 50;
  std::atomic<bool> taken_{false};
};

// The fields after `turn` are written in a turn, or before the end is shared.
template <typename End>
struct OpenEnd {
  OpenEnd(void* control, void* data, RingShape shape, const int* ranks, int me, const Losses& losses, WaitPolicy policy,
          QueueReport* report)
      : end(control, data, shape, ranks, me, losses, policy), report(report) {}

  End end;
  QueueReport* const report;
  Turn turn;
  bool closed = false;
  std::int64_t spin_ns = 0;
  std::uint64_t* broadcasts = nullptr;
  std::shared_ptr<OpenEnd> itself;  // until closed
};

using OpenWriter = OpenEnd<QueueWriter>;
using OpenReader = OpenEnd<QueueReader>;

template <typename End>
class InTurn {
 public:
  explicit InTurn(OpenEnd<End>& open) : InTurn(open, open.turn.try_take()) {}
  InTurn(OpenEnd<End>& open, double timeout_s) : InTurn(open, open.turn.take(timeout_s)) {}
  ~InTurn() {
    if (!has_it_) return;
    if (holder_ != nullptr) holder_->store(0, std::memory_order_relaxed);
    open_.turn.let_go();
  }
  InTurn(const InTurn&) = delete;
  InTurn& operator=(const InTurn&) = delete;
  explicit operator bool() const { return has_it_; }

 private:
  InTurn(OpenEnd<End>& open, bool has_it) : open_(open), has_it_(has_it) {
    if (!has_it_ || open.closed) return;  // the report may have been freed
    // Signal handlers must not wait for the thread that they interrupt.
    holder_ = &open.report->holder;
    holder_->store(static_cast<std::int64_t>(pthread_self()), std::memory_order_relaxed);
  }

  OpenEnd<End>& open_;
  const bool has_it_;
  std::atomic<std::int64_t>* holder_ = nullptr;
};

struct Watch {
  std::shared_ptr<const Losses> losses;
};

class Queues {
 public:
  explicit Queues(int size) : writers_(size + 1), readers_(2 * size) {}

  // -1: all other ranks.
  void add(int dst, const std::shared_ptr<OpenWriter>& end) { put(writers_, dst + 1, end); }
  void add(int src, bool of_all, const std::shared_ptr<OpenReader>& end) { put(readers_, 2 * src + of_all, end); }
  std::shared_ptr<OpenWriter> writer(int dst) { return get(writers_, dst + 1); }
  std::shared_ptr<OpenReader> reader(int src, bool of_all) { return get(readers_, 2 * src + of_all); }

 private:
  template <typename Open>
  void put(std::vector<std::weak_ptr<Open>>& all, int index, const std::shared_ptr<Open>& end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (index >= 0 && index < static_cast<int>(all.size())) all[index] = end;
  }
  template <typename Open>
  std::shared_ptr<Open> get(const std::vector<std::weak_ptr<Open>>& all, int index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return index >= 0 && index < static_cast<int>(all.size()) ? all[index].lock() : nullptr;
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<OpenWriter>> writers_;
  std::vector<std::weak_ptr<OpenReader>> readers_;
};

}  // namespace parallel_state
