// Tests the deadline of a wait after 2^32 polls.
#include "cuda_on_cpu.h"

#define private public
#include "epochs.cuh"
#undef private

#include <cstdio>

int main() {
  std::uint64_t report = 0, abort_word = 0;
  parallel_state::Call call{};
  call.report = reinterpret_cast<std::uint64_t>(&report);
  call.abort = reinterpret_cast<std::uint64_t>(&abort_word);
  call.deadline_ns = 3600u * std::uint64_t{1000000000};
  parallel_state::Patience patience;
  for (unsigned i = 0; i < parallel_state::LOOKS_PER_CLOCK; ++i) patience.is_over(call, 0, 1);
  const std::uint64_t began = patience.start_ns_;
  patience.looks_ = static_cast<decltype(patience.looks_)>(0) + 0xffffff00u;
  for (unsigned i = 0; i < 4 * parallel_state::LOOKS_PER_CLOCK; ++i) {
    if (patience.is_over(call, 0, 1)) return 1;
  }
  std::puts(patience.start_ns_ == began && began != 0 ? "kept" : "begun anew");
  return 0;
}
