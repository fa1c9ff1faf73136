// Element-wise reduction of several sources into one output, in the order of the sources.
//
// 16-bit floats are accumulated in float32 and rounded once. Integers wrap, and their averages are divided toward zero.
// The same sources in the same order give the same bits, so that ranks agree: with every instruction set, and under
// every floating-point state of the calling thread (see floating_point.h). The max of zeros is +0 unless all are -0;
// the min is -0 unless all are +0. A NaN result may be any NaN.
#pragma once

#include <cstddef>
#include <cstdint>

namespace parallel_state {

enum class Dtype : int { kFloat32, kFloat64, kFloat16, kBfloat16, kInt8, kInt16, kInt32, kInt64, kUint8 };
enum class ReduceOp : int { kSum, kMax, kMin, kProduct, kAverage };

std::size_t size_of(Dtype dtype);

// Writes the result to every one of `outs`. An out may be one of the sources, but for that they don't overlap. Pointers
// are aligned to the element's size.
using ReduceFunction = void (*)(void* const* outs, int out_count, const void* const* sources, int source_count,
                                std::size_t count);

// A reduction in parts. A source is an input, or, where its bit of `wide` is set, what a part came to, in the type in
// which sums are made. `out` gets the sums in that type; with a `total`, the number of inputs in all parts, it gets the
// result. If a part begins with what the ones before came to, bits are those of one reduction of all inputs. At most
// 64 sources.
using PartFunction = void (*)(void* out, const void* const* sources, std::uint64_t wide, int source_count,
                              std::size_t count, int total);
PartFunction part_function(Dtype dtype, ReduceOp op);

// Of an element of the sums of a part.
std::size_t wide_size_of(Dtype dtype);

// The version in use: the fastest for this processor, unless `use_instruction_set` chose another.
ReduceFunction reduce_function(Dtype dtype, ReduceOp op);

// The version for an instruction set, by its name, for tests; null where this processor lacks it.
ReduceFunction reduce_function(Dtype dtype, ReduceOp op, const char* instruction_set);

// One row of `AddRmsNorm` in group.h, from its sum. Null for dtypes that aren't floats of 16 or 32 bits.
using AddRmsNormFunction = void (*)(void* out, void* residual_out, const void* sum, const void* residual,
                                    const void* weight, std::size_t hidden, float eps);
AddRmsNormFunction add_rms_norm_function(Dtype dtype);

// Which instruction set is in use: "avx512", "avx2" or "plain".
const char* instruction_set();

// From now on, in all threads. False for a set that this processor lacks.
bool use_instruction_set(const char* name);

}  // namespace parallel_state
