#pragma once

#include <algorithm>
#include <cstddef>

#include "copy.h"
#include "reduce.h"

namespace parallel_state {

constexpr std::size_t kShareBlockBytes = 8 << 10;  // fits the first-level cache

inline void reduce_and_share(char* const* outs, int out_count, const void** sources, int source_count,
                             std::size_t count, std::size_t width, ReduceFunction reduce) {
  const std::size_t block = kShareBlockBytes / width;
  for (std::size_t done = 0; done < count; done += block) {
    const std::size_t length = std::min(block, count - done);
    void* const piece = outs[0] + done * width;
    reduce(&piece, 1, sources, source_count, length);
    for (int out = 1; out < out_count; ++out) copy(outs[out] + done * width, piece, length * width);
    for (int source = 0; source < source_count; ++source) {
      sources[source] = static_cast<const char*>(sources[source]) + length * width;
    }
  }
}

}  // namespace parallel_state
