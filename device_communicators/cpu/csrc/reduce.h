// Element-wise reduction of several sources, in their order; kTreeSum adds the sums of the sources' halves, each added
// in the same way. 16-bit floats are accumulated in float32 and rounded once. Integers wrap; their averages are divided
// toward zero. Bits are equal with every instruction set and floating-point state, except those of NaNs. The max of
// zeros is +0 unless all are -0; the min is -0 unless all are +0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace parallel_state {

enum class Dtype : int { kFloat32, kFloat64, kFloat16, kBfloat16, kInt8, kInt16, kInt32, kInt64, kUint8 };
enum class ReduceOp : int { kSum, kMax, kMin, kProduct, kAverage, kTreeSum };

std::size_t size_of(Dtype dtype);

// An out may be one of the sources; nothing else may overlap. Pointers are aligned to the element.
using ReduceFunction = void (*)(void* const* outs, int out_count, const void* const* sources, int source_count,
                                std::size_t count);

// A source whose bit of `wide` is set is the result of an earlier part, in the accumulator's type. `out` gets that
// type, or the finished result if `total`, the number of inputs in all parts, isn't 0. Parts that begin with the result
// of the earlier ones give the bits of one reduction. At most 64 sources.
using PartFunction = void (*)(void* out, const void* const* sources, std::uint64_t wide, int source_count,
                              std::size_t count, int total);
PartFunction part_function(Dtype dtype, ReduceOp op);

std::size_t wide_size_of(Dtype dtype);

ReduceFunction reduce_function(Dtype dtype, ReduceOp op);

ReduceFunction reduce_function(Dtype dtype, ReduceOp op, const char* instruction_set);

// Finishes one row, given its sum. Null for other dtypes than floats of 16 or 32 bits.
using AddRmsNormFunction = void (*)(void* out, void* residual_out, const void* sum, const void* residual,
                                    const void* weight, std::size_t hidden, float eps);
AddRmsNormFunction add_rms_norm_function(Dtype dtype);

// "avx512", "avx2" or "plain".
const char* instruction_set();

// For all threads. False if this processor lacks the set.
bool use_instruction_set(const char* name);

}  // namespace parallel_state
