// A hook on a completed call runs under the lock of that call: it must not call the work or the backend.
#pragma once

#include <torch/headeronly/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

// torch 2.14 has another interface.
#if defined(C10D_BACKEND_HAS_HOOKS) && TORCH_VERSION_MINOR >= 15
#define PARALLEL_STATE_HAS_HOOKS 1
#endif

namespace parallel_state {

// Copied when it changes, so a hook runs without a lock and may remove hooks.
template <typename... Arguments>
class HookTable {
 public:
  using Hook = std::function<void(Arguments...)>;

  void add(std::int64_t number, Hook hook) {
    change([&](All& all) { all[number] = std::move(hook); });
  }
  void remove(std::int64_t number) {
    change([&](All& all) { all.erase(number); });
  }
  bool is_empty() const { return is_empty_.load(std::memory_order_relaxed); }
  void call(Arguments... arguments) const {
    if (is_empty()) return;
    std::shared_ptr<const All> all;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      all = all_;
    }
    for (const auto& [number, hook] : *all) {
      try {
        hook(arguments...);
      } catch (const std::exception& error) {
        TORCH_WARN("a hook of a group of the backend parallel_state failed: ", error.what());
      }
    }
  }

 private:
  using All = std::map<std::int64_t, Hook>;

  template <typename Change>
  void change(Change apply) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto changed = std::make_shared<All>(*all_);
    apply(*changed);
    is_empty_.store(changed->empty(), std::memory_order_relaxed);
    all_ = std::move(changed);
  }

  mutable std::mutex mutex_;
  std::shared_ptr<const All> all_ = std::make_shared<const All>();
  std::atomic<bool> is_empty_{true};
};

struct Hooks {
  HookTable<std::uint64_t, std::optional<float>> completed;  // the work's key; duration in ms
  HookTable<> failed;
  std::atomic<bool> times_calls{false};
  std::atomic<bool> has_failed{false};

  // In a thread of their own, once. Waits at most 0.25 s: torch's recorder first imports torch's compiler, for seconds.
  static void call_failed(const std::shared_ptr<Hooks>& hooks);
  // Of all groups. Without the interpreter lock.
  static void wait_for_failed(std::chrono::milliseconds limit);

  bool needs_durations() const { return times_calls.load(std::memory_order_relaxed) || !completed.is_empty(); }
};

class HookedBackend : public c10d::Backend {
 public:
  using c10d::Backend::Backend;

  void enableCollectivesTiming() override { hooks_->times_calls = true; }
#ifdef PARALLEL_STATE_HAS_HOOKS
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(std::int64_t number, c10d::AbortHook hook) override {
    hooks_->failed.add(number, std::move(hook));
  }
  void unregisterAbortHook(std::int64_t number) override { hooks_->failed.remove(number); }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(std::int64_t number, c10d::CompletionHook hook) override {
    hooks_->completed.add(number, [hook = std::move(hook)](std::uint64_t key, std::optional<float> duration_ms) {
      hook(c10d::CompletionHookArgs{key, duration_ms});
    });
  }
  void unregisterCompletionHook(std::int64_t number) override { hooks_->completed.remove(number); }
#endif

 protected:
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();
};

}  // namespace parallel_state
