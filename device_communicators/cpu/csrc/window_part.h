#pragma once

#include <cstdint>

namespace parallel_state {

struct WindowPart {
  static constexpr int kWords = 17, kMostDims = 9;
  std::int64_t signals = -1, memory = -1;  // offsets; -1: no memory was left
  std::int64_t bytes = 0, elements = 0, dtype = -1;
  std::int64_t is_copy = 0;  // of a tensor in other memory
  std::int64_t number = 0;   // for other hosts
  std::int64_t dims = 0, sizes[kMostDims] = {};
};
static_assert(sizeof(WindowPart) == WindowPart::kWords * sizeof(std::int64_t));

}  // namespace parallel_state
