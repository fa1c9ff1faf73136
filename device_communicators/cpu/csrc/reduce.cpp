#include "reduce.h"

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "floating_point.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace parallel_state {
namespace plain {
#include "reduce_kernels.inc"
#include "add_rms_norm.inc"
}  // namespace plain

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
#include "reduce_kernels.inc"
#include "add_rms_norm.inc"
#include "lanes_avx2.inc"
#include "reduce_sum.inc"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
namespace avx512 {
#include "reduce_kernels.inc"
#include "add_rms_norm.inc"
#include "lanes_avx512.inc"
#include "reduce_sum.inc"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

enum class Isa { kPlain, kAvx2, kAvx512 };

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return Isa::kAvx2;
#endif
  return Isa::kPlain;  // NEON on ARM: every 64-bit ARM has it
}

Isa best() {
  static const Isa found = detect();
  return found;
}

std::atomic<Isa> chosen{best()};

Isa isa() { return chosen.load(std::memory_order_relaxed); }

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    case Isa::kPlain: break;
  }
  return "plain";
}

bool find_isa(const char* name, Isa* found) {
  for (const Isa each : {Isa::kPlain, Isa::kAvx2, Isa::kAvx512}) {
    if (each > best() || std::strcmp(name, name_of(each)) != 0) continue;
    *found = each;
    return true;
  }
  return false;
}

ReduceFunction find([[maybe_unused]] Isa isa, Dtype dtype, ReduceOp op) {
#if defined(__x86_64__)
  const ReduceFunction fused = isa == Isa::kAvx512 ? avx512::find_sum(dtype, op)
                               : isa == Isa::kAvx2 ? avx2::find_sum(dtype, op)
                                                   : nullptr;
  if (fused != nullptr) return fused;
  if (isa == Isa::kAvx512) return avx512::find(dtype, op);
  if (isa == Isa::kAvx2) return avx2::find(dtype, op);
#endif
  return plain::find(dtype, op);
}

}  // namespace

std::size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
    case Dtype::kInt64: return 8;
    case Dtype::kFloat32:
    case Dtype::kInt32: return 4;
    case Dtype::kFloat16:
    case Dtype::kBfloat16:
    case Dtype::kInt16: return 2;
    case Dtype::kInt8:
    case Dtype::kUint8: return 1;
  }
  return 0;
}

std::size_t wide_size_of(Dtype dtype) {
  return dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16 ? sizeof(float) : size_of(dtype);
}

PartFunction part_function(Dtype dtype, ReduceOp op) {
#if defined(__x86_64__)
  if (isa() == Isa::kAvx512) return avx512::find_part(dtype, op);
  if (isa() == Isa::kAvx2) return avx2::find_part(dtype, op);
#endif
  return plain::find_part(dtype, op);
}

ReduceFunction reduce_function(Dtype dtype, ReduceOp op) { return find(isa(), dtype, op); }

ReduceFunction reduce_function(Dtype dtype, ReduceOp op, const char* instruction_set) {
  Isa named;
  return find_isa(instruction_set, &named) ? find(named, dtype, op) : nullptr;
}

AddRmsNormFunction add_rms_norm_function(Dtype dtype) {
#if defined(__x86_64__)
  if (isa() == Isa::kAvx512) return avx512::find_add_rms_norm(dtype);
  if (isa() == Isa::kAvx2) return avx2::find_add_rms_norm(dtype);
#endif
  return plain::find_add_rms_norm(dtype);
}

const char* instruction_set() { return name_of(isa()); }

bool use_instruction_set(const char* name) {
  Isa named;
  if (!find_isa(name, &named)) return false;
  chosen.store(named, std::memory_order_relaxed);
  return true;
}

}  // namespace parallel_state
