// All PTX, and every access whose order or atomicity matters. Peers are other GPUs or processes: accesses to a region
// have .sys scope. Data accesses are relaxed, so that none is a race in PTX's memory model.
#pragma once

#include "call.cuh"

namespace parallel_state {

// Each half is 32 bits of data and 32 bits of epoch, which arrive together.
struct Packet {
  u64 halves[2];
};

// Moved by one instruction.
template <u32 COUNT>
struct alignas(4 * COUNT) Words {
  u32 at[COUNT];
};

#ifndef PARALLEL_STATE_ON_CPU

// The two halves may arrive separately.
__device__ __forceinline__ void store_packet(u64 address, Packet packet) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};"
               :
               : "l"(address), "l"(packet.halves[0]), "l"(packet.halves[1])
               : "memory");
}

__device__ __forceinline__ Packet load_packet(u64 address) {
  Packet packet;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(packet.halves[0]), "=l"(packet.halves[1])
               : "l"(address)
               : "memory");
  return packet;
}

__device__ __forceinline__ void store_shared(u64 address, const Words<4>& words) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "r"(words.at[0]), "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3])
               : "memory");
}

__device__ __forceinline__ Words<4> load_shared(u64 address) {
  Words<4> words;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
               : "l"(address)
               : "memory");
  return words;
}

// For tensors that only this rank's kernels access, one after the other.
__device__ __forceinline__ void load_own(u64 address, Words<2>& words) {
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words.at[0]), "=r"(words.at[1]) : "l"(address) : "memory");
}

__device__ __forceinline__ void load_own(u64 address, Words<4>& words) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
               : "l"(address)
               : "memory");
}

__device__ __forceinline__ void store_own(u64 address, const Words<2>& words) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" : : "l"(address), "r"(words.at[0]), "r"(words.at[1]) : "memory");
}

__device__ __forceinline__ void store_own(u64 address, const Words<4>& words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "r"(words.at[0]), "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3])
               : "memory");
}

// Makes this thread's writes, and those that it observed (also by barriers of its block), visible to the thread that
// acquires the flag.
__device__ __forceinline__ void release_flag(u64 address, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ u32 acquire_flag(u64 address) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void clear_flag(u64 address) {
  asm volatile("st.relaxed.sys.global.u32 [%0], 0;" : : "l"(address) : "memory");
}

__device__ __forceinline__ void store_word(u64 address, u64 value) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_word(u64 address) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" : : : "memory"); }

// The GPU's clock advances in steps of 32 ns to 1 us.
__device__ __forceinline__ u64 clock_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
  return now;
}

__device__ __forceinline__ void trap() { asm volatile("trap;" : : : "memory"); }

__device__ __forceinline__ float float_of_half(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ u16 half_of_float(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ float float_of_bfloat(u16 bits) { return __uint_as_float(u32{bits} << 16); }

__device__ __forceinline__ u16 bfloat_of_float(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

template <class T, u32 COUNT, u32 TAG = 0>
__device__ __forceinline__ T* shared_array() {
  __shared__ T values[COUNT];
  return values;
}

#else
#include "memory_on_cpu.h"
#endif

}  // namespace parallel_state
