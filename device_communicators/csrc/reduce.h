// Element-wise reduction of several sources into one output, in the order of the sources.
//
// 16-bit floats are accumulated in float32 and rounded once; integers wrap. The same sources in the same order give the
// same bits with every instruction set, so that ranks agree.
#pragma once

#include <cstddef>

namespace parallel_state {

enum class Dtype : int { kFloat32, kFloat64, kFloat16, kBfloat16, kInt8, kInt16, kInt32, kInt64, kUint8 };
enum class ReduceOp : int { kSum, kMax, kMin, kProduct, kAverage };

std::size_t size_of(Dtype dtype);

// `out` may be one of the sources. Pointers are aligned to the element's size.
using ReduceFunction = void (*)(void* out, const void* const* sources, int source_count, std::size_t count);

// The fastest version for this processor.
ReduceFunction reduce_function(Dtype dtype, ReduceOp op);

// Which instruction set `reduce_function` chose: "avx512", "avx2" or "plain".
const char* instruction_set();

}  // namespace parallel_state
