// What a rank tells with its tick about the call it is in, so that ranks that disagree notice.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace parallel_state {

enum class Kind : std::uint64_t {
  kBarrier = 1, kAllReduce, kReduceScatter, kAllGather, kGatherv, kBroadcast, kScatter, kAllToAll, kAllReduceAddRmsNorm
};

// operation (8 bits), dtype (4), reduction (4), Counter::kFlag (1), size (47): readable in an error of another rank.
inline std::uint64_t call_of(Kind kind, std::size_t size, Dtype dtype = Dtype::kUint8, ReduceOp op = ReduceOp::kSum) {
  return (static_cast<std::uint64_t>(kind) << 56) | (static_cast<std::uint64_t>(dtype) << 52) |
         (static_cast<std::uint64_t>(op) << 48) | (static_cast<std::uint64_t>(size) & 0x7fff'ffff'ffffULL);
}

#define RETURN_IF_FAILED(expression)                  \
  do {                                                \
    const Status status_ = (expression);              \
    if (status_ != Status::kDone) return status_;     \
  } while (false)

}  // namespace parallel_state
