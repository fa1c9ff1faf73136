// `output` of all_gather and `input` of reduce_scatter are [size, numel]; the other tensor may be this rank's row of
// it.
#pragma once

#include "push.cuh"
#include "staged.cuh"

namespace parallel_state {

template <u32 COUNT>
__device__ __forceinline__ void store_rows(const Call& call, u64 offset, const Words<COUNT> (&of_ranks)[MAX_RANKS]) {
#pragma unroll
  for (u32 r = 0; r < MAX_RANKS; ++r) {
    if (r < call.size) Tensor{call.output + r * call.numel, call.numel}.store(offset, of_ranks[r]);
  }
}

__device__ __forceinline__ void all_gather_push(const Call& call) {
  const Tensor input{call.input, call.numel};
  const Ranks<0> ranks{call.size};
  push_all(
      call, pieces_of(call.numel, PAIR_BYTES),
      [&](const Block& block, u32 i, u64 pair) { send_pair_to_all(block, ranks, i, input.load<2>(pair * PAIR_BYTES)); },
      [&](const Block& block, u32 i, u64 pair) {
        Pair pairs[MAX_RANKS];
        const Pair own = input.load<2>(pair * PAIR_BYTES);
        if (!receive_pairs(block, ranks, i, own, pairs)) return false;
        store_rows(call, pair * PAIR_BYTES, pairs);
        return true;
      });
}

__device__ __forceinline__ void all_gather_pull(const Call& call) {
  const Tensor input{call.input, call.numel};
  const Ranks<0> ranks{call.size};
  stage_all(call, pieces_of(call.numel, QUAD_BYTES), STAGE_QUADS, [&](Block& block, u64 start, u32 count) {
    stage_quads(block, input, start, count);
    if (!block.barrier(0)) return false;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
      Quad of_ranks[MAX_RANKS];
      load_staged_by_all(block, ranks, i, of_ranks);
      store_rows(call, (start + i) * QUAD_BYTES, of_ranks);
    }
    return true;
  });
}

__device__ __forceinline__ Tensor row_of_input(const Call& call, u32 row, u64 row_bytes) {
  return {call.input + row * row_bytes, row_bytes};
}

template <class T>
__device__ __forceinline__ void reduce_scatter_push(const Call& call) {
  const u64 row_bytes = call.numel * T::BYTES;
  const Tensor output{call.output, row_bytes};
  const Ranks<0> ranks{call.size};
  push_all(
      call, pieces_of(row_bytes, PAIR_BYTES),
      [&](const Block& block, u32 i, u64 pair) {
        for (u32 step = 1; step < ranks.size; ++step) {
          const u32 to = call.rank + step < ranks.size ? call.rank + step : call.rank + step - ranks.size;
          send_pair(block, to, i, row_of_input(call, to, row_bytes).load<2>(pair * PAIR_BYTES));
        }
      },
      [&](const Block& block, u32 i, u64 pair) {
        Floats<T, 2> sum;
        const Pair own = row_of_input(call, call.rank, row_bytes).load<2>(pair * PAIR_BYTES);
        if (!receive_sum<T>(block, ranks, i, own, sum)) return false;
        output.store(pair * PAIR_BYTES, sum.rounded());
        return true;
      });
}

// Each stage has the same number of quads of each row. Those of row r begin at r * most.
template <class T>
__device__ __forceinline__ void reduce_scatter_pull(const Call& call) {
  const u64 row_bytes = call.numel * T::BYTES;
  const Tensor output{call.output, row_bytes};
  const u32 most = STAGE_QUADS / call.size;
  const Ranks<0> ranks{call.size};
  stage_all(call, pieces_of(row_bytes, QUAD_BYTES), most, [&](Block& block, u64 start, u32 count) {
    for (u32 row = 0; row < ranks.size; ++row) {
      stage_quads(block, row_of_input(call, row, row_bytes), start, count, row * most);
    }
    if (!block.barrier(0)) return false;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
      output.store((start + i) * QUAD_BYTES, sum_staged<T>(block, ranks, call.rank * most + i).rounded());
    }
    return true;
  });
}

}  // namespace parallel_state
