// Each rank stages data in its own region; peers read it after a barrier.
//
// Pull: every rank sums the data of all ranks. Two-shot: rank r sums shard r and writes the result over that shard in
// every rank's stage, where no other rank reads it; barrier; every rank reads all shards from its own region.
//
// Both end each epoch after a barrier: rules Heard and Drained, as peers write into this region before they set their
// last flag. Output is written only after its old value was staged, so it may be input.
#pragma once

#include "elements.cuh"
#include "epochs.cuh"

namespace parallel_state {

using Quad = Words<4>;
constexpr u32 QUAD_BYTES = 16;
constexpr u32 STAGE_QUADS = STAGE_BYTES / QUAD_BYTES;

__device__ __forceinline__ void store_staged(const Block& block, u32 owner, u32 i, const Quad& quad) {
  store_shared(block.stage(owner) + u64{i} * QUAD_BYTES, quad);
}

__device__ __forceinline__ Quad load_staged(const Block& block, u32 owner, u32 i) {
  return load_shared(block.stage(owner) + u64{i} * QUAD_BYTES);
}

// Call it after a barrier.
template <u32 SIZE, u32 MOST>
__device__ __forceinline__ void load_staged_by_all(const Block& block, Ranks<SIZE> ranks, u32 i, Quad (&quads)[MOST]) {
  static_assert(MOST == Ranks<SIZE>::MOST, "a quad of each rank");
#pragma unroll
  for (u32 r = 0; r < MOST; ++r) quads[r] = load_staged(block, ranks.has(r) ? r : block.call.rank, i);
}

template <class T, u32 SIZE>
__device__ __forceinline__ Floats<T, 4> sum_staged(const Block& block, Ranks<SIZE> ranks, u32 i) {
  Quad quads[Ranks<SIZE>::MOST];
  load_staged_by_all(block, ranks, i, quads);
  return sum_in_rank_order<T>(ranks, quads);
}

template <class Load, class Store>
__device__ __forceinline__ u32 move_several(u32 count, Load load, Store store) {
  constexpr u32 AT_ONCE = 4;
  u32 i = threadIdx.x;
  for (; i + (AT_ONCE - 1) * blockDim.x < count; i += AT_ONCE * blockDim.x) {
    Quad quads[AT_ONCE];
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k) quads[k] = load(i + k * blockDim.x);
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k) store(i + k * blockDim.x, quads[k]);
  }
  return i;
}

__device__ __forceinline__ void stage_quads(const Block& block, const Tensor& from, u64 start, u32 count, u32 to = 0) {
  const u32 own = block.call.rank;
  u32 i = threadIdx.x;
  if (from.is_whole<4>((start + count) * QUAD_BYTES)) {
    i = move_several(
        count, [&](u32 at) { return from.load_whole<4>((start + at) * QUAD_BYTES); },
        [&](u32 at, const Quad& quad) { store_staged(block, own, to + at, quad); });
  }
  for (; i < count; i += blockDim.x) store_staged(block, own, to + i, from.load<4>((start + i) * QUAD_BYTES));
}

__device__ __forceinline__ void unstage_quads(const Block& block, const Tensor& to, u64 start, u32 count) {
  const u32 own = block.call.rank;
  u32 i = threadIdx.x;
  if (to.is_whole<4>((start + count) * QUAD_BYTES)) {
    i = move_several(
        count, [&](u32 at) { return load_staged(block, own, at); },
        [&](u32 at, const Quad& quad) { to.store_whole((start + at) * QUAD_BYTES, quad); });
  }
  for (; i < count; i += blockDim.x) to.store((start + i) * QUAD_BYTES, load_staged(block, own, i));
}

// `most` quads per epoch. `exchange(block, start, count)` must have a barrier and returns false if a wait was stopped.
template <class Exchange>
__device__ __forceinline__ void stage_all(const Call& call, u64 quads, u32 most, Exchange exchange) {
  const Share share = share_of(quads);
  if (share.begin == share.end) return;
  Block block(call);
  for (u64 start = share.begin; start < share.end; start += most) {
    const u32 count = share.end - start < most ? static_cast<u32>(share.end - start) : most;
    block.begin_epoch();
    if (!exchange(block, start, count) || !block.end_epoch()) return;
  }
  block.keep_epoch();
}

template <class T>
__device__ __forceinline__ void all_reduce_pull(const Call& call) {
  const u64 bytes = call.numel * T::BYTES;
  const Tensor input{call.input, bytes}, output{call.output, bytes};
  with_ranks(call.size, [&](auto ranks) {
    stage_all(call, pieces_of(bytes, QUAD_BYTES), STAGE_QUADS, [&](Block& block, u64 start, u32 count) {
      stage_quads(block, input, start, count);
      if (!block.barrier(0)) return false;
      for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        output.store((start + i) * QUAD_BYTES, sum_staged<T>(block, ranks, i).rounded());
      }
      return true;
    });
  });
}

template <class T>
__device__ __forceinline__ void all_reduce_two_shot(const Call& call) {
  const u64 bytes = call.numel * T::BYTES;
  const Tensor input{call.input, bytes}, output{call.output, bytes};
  with_ranks(call.size, [&](auto ranks) {
    stage_all(call, pieces_of(bytes, QUAD_BYTES), STAGE_QUADS, [&](Block& block, u64 start, u32 count) {
      const u32 each = (count + ranks.size - 1) / ranks.size;
      const u32 begin = each * call.rank < count ? each * call.rank : count;
      const u32 end = begin + each < count ? begin + each : count;
      stage_quads(block, input, start, count);
      if (!block.barrier(0)) return false;
      for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const Quad sum = sum_staged<T>(block, ranks, i).rounded();
#pragma unroll
        for (u32 r = 0; r < decltype(ranks)::MOST; ++r) {
          if (ranks.has(r)) store_staged(block, r, i, sum);
        }
      }
      if (!block.barrier(1)) return false;
      unstage_quads(block, output, start, count);
      return true;
    });
  });
}

}  // namespace parallel_state
