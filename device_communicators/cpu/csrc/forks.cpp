#include "forks.h"

#include <pthread.h>

#include <atomic>

namespace parallel_state {
namespace {

std::atomic<int> generation{0};

}  // namespace

int fork_generation() {
  static const int counted =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(counted);
  return generation.load(std::memory_order_relaxed);
}

void in_forked_children(void (*function)()) { pthread_atfork(nullptr, nullptr, function); }

}  // namespace parallel_state
