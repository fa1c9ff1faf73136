// float8 e4m3fn: no infinities, one NaN. Integer arithmetic gives the same bits on every architecture.
#pragma once

#include "call.cuh"

namespace parallel_state {

constexpr float FLOAT8_MAX = 448.0f;
constexpr float MIN_TOKEN_SCALE = 1.0f / (448.0f * 512.0f);  // MIN_SCALE of calls/reductions.py

// To nearest, ties to even. Values beyond ±448 become ±448; NaN stays NaN.
__device__ __forceinline__ u32 float8_of_float(float value) {
  const u32 bits = __float_as_uint(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  if (magnitude >= 0x43e00000) return sign | 0x7e;
  if (magnitude < 0x3c800000) {  // below 2^-6 the unit is 2^-9, the precision of floats at 2^14: adding 2^14 rounds
    return sign | (__float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000);
  }
  return sign | (((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3));
}

}  // namespace parallel_state
