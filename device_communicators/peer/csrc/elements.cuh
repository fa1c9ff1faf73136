// Sums are computed in fp32, in rank order, and rounded once: all ranks get the same bits.

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

// Not inlined, to keep the fast path short.
template <u32 COUNT>
__device__ __noinline__ Words<COUNT> load_bytes(u64 address, u64 bytes) {
  Words<COUNT> words;
#pragma unroll
  for (u32 w = 0; w < COUNT; ++w) {
    u32 word = 0;
#pragma unroll
    for (u32 byte = 4 * w; byte < 4 * w + 4; ++byte) {
      if (byte < bytes) word |= u32{*reinterpret_cast<const unsigned char*>(address + byte)} << (8 * (byte % 4));
    }
    words.at[w] = word;
  }
  return words;
}

template <u32 COUNT>
__device__ __noinline__ void store_bytes(u64 address, u64 bytes, Words<COUNT> words) {
#pragma unroll
  for (u32 w = 0; w < COUNT; ++w) {
#pragma unroll
    for (u32 byte = 4 * w; byte < 4 * w + 4; ++byte) {
      if (byte < bytes) *reinterpret_cast<unsigned char*>(address + byte) = words.at[w] >> (8 * (byte % 4));
    }
  }
}

struct Tensor {
  u64 address;
  u64 bytes;

  template <u32 COUNT>
  __device__ __forceinline__ bool is_whole(u64 end) const {
    return end <= bytes && address % (4 * COUNT) == 0;
  }

  template <u32 COUNT>
  __device__ __forceinline__ Words<COUNT> load_whole(u64 offset) const {
    Words<COUNT> words;
    load_own(address + offset, words);
    return words;
  }

  template <u32 COUNT>
  __device__ __forceinline__ void store_whole(u64 offset, const Words<COUNT>& words) const {
    store_own(address + offset, words);
  }

  // Bytes past the end are read as zero, and not written.
  template <u32 COUNT>
  __device__ __forceinline__ Words<COUNT> load(u64 offset) const {
    if (is_whole<COUNT>(offset + 4 * COUNT)) return load_whole<COUNT>(offset);
    return load_bytes<COUNT>(address + offset, bytes - offset);
  }

  template <u32 COUNT>
  __device__ __forceinline__ void store(u64 offset, const Words<COUNT>& words) const {
    if (is_whole<COUNT>(offset + 4 * COUNT)) return store_whole(offset, words);
    store_bytes<COUNT>(address + offset, bytes - offset, words);
  }
};

__device__ __forceinline__ u64 pieces_of(u64 bytes, u32 piece) { return (bytes + piece - 1) / piece; }

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

  __device__ __forceinline__ Words<COUNT> rounded() const {
    Words<COUNT> words;
#pragma unroll
    for (u32 w = 0; w < COUNT; ++w) words.at[w] = T::pack(at + w * IN_WORD);
    return words;
  }
};

// A compile-time constant: loads from all ranks are issued at once.
template <u32 SIZE>
struct Ranks {
  static constexpr u32 MOST = SIZE;
  u32 size = SIZE;
  __device__ __forceinline__ bool has(u32) const { return true; }
};

// To avoid a branch, loads from a missing rank use another address.
template <>
struct Ranks<0> {
  static constexpr u32 MOST = MAX_RANKS;
  u32 size;
  __device__ __forceinline__ bool has(u32 r) const { return r < size; }
};

template <class Body>
__device__ __forceinline__ void with_ranks(u32 size, Body body) {
  switch (size) {
    case 2: return body(Ranks<2>{});
    case 4: return body(Ranks<4>{});
    case 8: return body(Ranks<8>{});
    default: return body(Ranks<0>{size});
  }
}

// Not with 0: 0 + -0 would lose the sign.
template <class T, u32 COUNT, u32 SIZE, u32 MOST>
__device__ __forceinline__ Floats<T, COUNT> sum_in_rank_order(Ranks<SIZE> ranks, const Words<COUNT> (&of_ranks)[MOST]) {
  static_assert(MOST == Ranks<SIZE>::MOST, "the words of each rank");
  Floats<T, COUNT> sum = Floats<T, COUNT>::of(of_ranks[0]);
#pragma unroll
  for (u32 r = 1; r < MOST; ++r) {
    if (ranks.has(r)) sum.add(Floats<T, COUNT>::of(of_ranks[r]));
  }
  return sum;
}

}  // namespace parallel_state
