#include "hooks.h"

#include <pthread.h>

#include <condition_variable>
#include <system_error>
#include <thread>

#include "work.h"

namespace parallel_state {
namespace {

constexpr auto kFailedGrace = std::chrono::milliseconds(250);

struct Running {  // not destroyed at exit, when some hooks may still run
  std::mutex mutex;
  std::condition_variable ended;
  int threads = 0;
  const int made_in = fork_generation();
};

Running& running() {
  static auto* const found = new Running;
  return *found;
}

}  // namespace

void Hooks::call_failed(const std::shared_ptr<Hooks>& hooks) {
  if (hooks->failed.is_empty() || hooks->has_failed.exchange(true)) return;
  Running& all = running();
  if (all.made_in != fork_generation()) return;
  const auto has_ended = std::make_shared<bool>(false);
  std::unique_lock<std::mutex> lock(all.mutex);
  const auto run = [hooks, has_ended, &all] {
    pthread_setname_np(pthread_self(), "ps-hooks");
    hooks->failed.call();
    const std::lock_guard<std::mutex> lock(all.mutex);
    *has_ended = true;
    --all.threads;
    all.ended.notify_all();
  };
  try {
    std::thread(run).detach();
  } catch (const std::system_error& error) {
    TORCH_WARN("hooks on the failure of a group were not called: no thread can be started: ", error.what());
    return;
  }
  ++all.threads;
  all.ended.wait_for(lock, kFailedGrace, [&] { return *has_ended; });
}

void Hooks::wait_for_failed(std::chrono::milliseconds limit) {
  Running& all = running();
  if (all.made_in != fork_generation()) return;
  std::unique_lock<std::mutex> lock(all.mutex);
  all.ended.wait_for(lock, limit, [&] { return all.threads == 0; });
}

}  // namespace parallel_state
