#pragma once

#include <cstdint>

namespace parallel_state {

// As the ranks exchange it.
struct WindowPart {
  static constexpr int kWords = 17, kMostDims = 9;
  std::int64_t signals = -1, memory = -1;            // offsets in its arena; -1: no memory was left; 0 without arenas
  std::int64_t bytes = 0, elements = 0, dtype = -1;  // torch's number of the dtype
  std::int64_t is_copy = 0;                          // 1: a copy of a tensor in other memory
  std::int64_t number = 0;                           // for other hosts
  std::int64_t dims = 0, sizes[kMostDims] = {};
};
static_assert(sizeof(WindowPart) == WindowPart::kWords * sizeof(std::int64_t));

}  // namespace parallel_state
