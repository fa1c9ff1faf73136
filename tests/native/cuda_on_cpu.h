// Enough of CUDA to run the kernels of peer/csrc on a CPU, a thread for each CUDA thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <sched.h>
#include <thread>
#include <vector>

#define PARALLEL_STATE_ON_CPU
#define __global__ __attribute__((visibility("default")))
#define __device__
#define __forceinline__ inline
#define __noinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace on_cpu {

struct Trapped {};

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Once broken, all its threads throw Trapped.
class Meeting {
 public:
  explicit Meeting(unsigned members) : members_(members) {}

  int any(int value) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (broken_) throw Trapped();
    coming_ |= value != 0;
    const unsigned long round = round_;
    if (++here_ == members_) {
      result_ = coming_;
      coming_ = false;
      here_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round_ != round || broken_; });
      if (round_ == round) throw Trapped();
    }
    return result_;
  }

  void break_up() {
    std::lock_guard<std::mutex> lock(mutex_);
    broken_ = true;
    all_here_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  const unsigned members_;
  unsigned here_ = 0;
  unsigned long round_ = 0;
  bool coming_ = false, result_ = false, broken_ = false;
};

constexpr unsigned WARP = 32;

struct ThreadBlock {
  explicit ThreadBlock(unsigned threads) : everyone(threads), lanes(threads) {
    for (unsigned first = 0; first < threads; first += WARP) {
      warps.push_back(std::make_unique<Meeting>(threads - first < WARP ? threads - first : WARP));
    }
  }

  void break_up() {
    everyone.break_up();
    for (auto& warp : warps) warp->break_up();
  }

  Meeting everyone;
  std::vector<std::unique_ptr<Meeting>> warps;
  std::vector<std::uint64_t> lanes;
  std::mutex mutex;
  std::map<const void*, std::vector<std::max_align_t>> arrays;
};

struct Thread {
  Index index, block, block_size, grid_size;
  ThreadBlock* team = nullptr;
  std::uint64_t dice = 1;
};

inline thread_local Thread self;
inline std::atomic<unsigned> pauses_per_mille{0}, pause_us{0};
inline std::atomic<std::uint64_t> seed{1};

inline unsigned pause() {
  self.dice = self.dice * 6364136223846793005u + 1442695040888963407u;
  const unsigned number = self.dice >> 33;
  const unsigned wanted = pauses_per_mille.load(std::memory_order_relaxed);
  if (wanted != 0 && number % 1000 < wanted) {
    const unsigned longest = pause_us.load(std::memory_order_relaxed);
    if (longest == 0 || number % 8 != 0) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(number / 1000 % longest));
    }
  }
  return number >> 4;
}

inline void fence() {
#ifndef __SANITIZE_THREAD__  // ThreadSanitizer doesn't know fences
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// Only waits read the clock, so yield here.
inline std::uint64_t clock_ns() {
  sched_yield();
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::uint64_t(now.tv_sec) * 1000000000u + std::uint64_t(now.tv_nsec);
}

inline void* shared_memory(const void* key, std::size_t bytes, std::size_t) {
  std::lock_guard<std::mutex> lock(self.team->mutex);
  auto& array = self.team->arrays[key];
  if (array.empty()) array.resize(bytes / sizeof(std::max_align_t) + 1);
  return array.data();
}

template <class T>
T shuffle(T value, unsigned from) {
  const unsigned own = self.index.x, first = own / WARP * WARP;
  Meeting& warp = *self.team->warps[own / WARP];
  std::memcpy(&self.team->lanes[own], &value, sizeof value);
  warp.any(0);
  const unsigned other = first + from % WARP;
  if (other < self.team->lanes.size()) std::memcpy(&value, &self.team->lanes[other], sizeof value);
  warp.any(0);
  return value;
}

}  // namespace on_cpu

#define threadIdx (on_cpu::self.index)
#define blockIdx (on_cpu::self.block)
#define blockDim (on_cpu::self.block_size)
#define gridDim (on_cpu::self.grid_size)

inline void __syncthreads() { on_cpu::self.team->everyone.any(0); }
inline int __syncthreads_or(int value) { return on_cpu::self.team->everyone.any(value); }

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  return on_cpu::shuffle(value, on_cpu::self.index.x % on_cpu::WARP ^ mask);
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
