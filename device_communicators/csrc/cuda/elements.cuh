// Dtypes, and sums of them: packed in 32-bit words as they lie in memory, or as floats.
//
// A sum is made in fp32, from rank 0 on, and rounded once, so that all ranks get the same bits from any algorithm.
// Not run on a GPU.
#pragma once

#include "memory.cuh"

namespace parallel_state {

struct Float32 {
  static constexpr u32 BYTES = 4;
  static __device__ __forceinline__ void unpack(u32 word, float* values) { values[0] = __uint_as_float(word); }
  static __device__ __forceinline__ u32 pack(const float* values) { return __float_as_uint(values[0]); }
};

struct Float16 {
  static constexpr u32 BYTES = 2;
  static __device__ __forceinline__ void unpack(u32 word, float* values) {
    values[0] = float_of_half(static_cast<u16>(word));
    values[1] = float_of_half(static_cast<u16>(word >> 16));
  }
  static __device__ __forceinline__ u32 pack(const float* values) {
    return half_of_float(values[0]) | u32{half_of_float(values[1])} << 16;
  }
};

struct BFloat16 {
  static constexpr u32 BYTES = 2;
  static __device__ __forceinline__ void unpack(u32 word, float* values) {
    values[0] = float_of_bfloat(static_cast<u16>(word));
    values[1] = float_of_bfloat(static_cast<u16>(word >> 16));
  }
  static __device__ __forceinline__ u32 pack(const float* values) {
    return bfloat_of_float(values[0]) | u32{bfloat_of_float(values[1])} << 16;
  }
};

// 4 * COUNT bytes of a tensor, in registers.
template <u32 COUNT>
struct alignas(4 * COUNT) Words {
  u32 at[COUNT];
};

// What lies at `offset` of a tensor of `bytes`; what is past its end is zero. Whole where that is aligned, else in bytes.
template <u32 COUNT>
__device__ __forceinline__ Words<COUNT> load_words(u64 tensor, u64 offset, u64 bytes) {
  const u64 address = tensor + offset;
  if (offset + 4 * COUNT <= bytes && address % (4 * COUNT) == 0) return *reinterpret_cast<const Words<COUNT>*>(address);
  Words<COUNT> words;
#pragma unroll
  for (u32 w = 0; w < COUNT; ++w) {
    u32 word = 0;
#pragma unroll
    for (u32 byte = 0; byte < 4; ++byte) {
      const u64 at = 4 * w + byte;
      if (offset + at < bytes) word |= u32{*reinterpret_cast<const unsigned char*>(address + at)} << (8 * byte);
    }
    words.at[w] = word;
  }
  return words;
}

// The reverse: nothing is written past the end.
template <u32 COUNT>
__device__ __forceinline__ void store_words(u64 tensor, u64 offset, u64 bytes, const Words<COUNT>& words) {
  const u64 address = tensor + offset;
  if (offset + 4 * COUNT <= bytes && address % (4 * COUNT) == 0) {
    *reinterpret_cast<Words<COUNT>*>(address) = words;
    return;
  }
#pragma unroll
  for (u32 w = 0; w < COUNT; ++w) {
#pragma unroll
    for (u32 byte = 0; byte < 4; ++byte) {
      const u64 at = 4 * w + byte;
      if (offset + at < bytes) *reinterpret_cast<unsigned char*>(address + at) = words.at[w] >> (8 * byte);
    }
  }
}

// The elements of 4 * COUNT bytes, as floats.
template <class T, u32 COUNT>
struct Floats {
  static constexpr u32 IN_WORD = 4 / T::BYTES;
  static constexpr u32 LENGTH = COUNT * IN_WORD;
  float at[LENGTH];

  static __device__ __forceinline__ Floats of(const Words<COUNT>& words) {
    Floats floats;
#pragma unroll
    for (u32 w = 0; w < COUNT; ++w) T::unpack(words.at[w], floats.at + w * IN_WORD);
    return floats;
  }

  __device__ __forceinline__ void add(const Floats& other) {
#pragma unroll
    for (u32 i = 0; i < LENGTH; ++i) at[i] += other.at[i];
  }

  // To nearest, ties to even.
  __device__ __forceinline__ Words<COUNT> rounded() const {
    Words<COUNT> words;
#pragma unroll
    for (u32 w = 0; w < COUNT; ++w) words.at[w] = T::pack(at + w * IN_WORD);
    return words;
  }
};

// From rank 0 on: it starts with that rank's elements, as 0 + -0 would lose the sign.
template <class T, u32 COUNT>
__device__ __forceinline__ Floats<T, COUNT> sum_in_rank_order(const Words<COUNT> (&of_ranks)[MAX_RANKS], u32 size) {
  Floats<T, COUNT> sum = Floats<T, COUNT>::of(of_ranks[0]);
#pragma unroll
  for (u32 r = 1; r < MAX_RANKS; ++r) {
    if (r < size) sum.add(Floats<T, COUNT>::of(of_ranks[r]));
  }
  return sum;
}

}  // namespace parallel_state
