// Every rank writes its data into every other rank's region and waits only for the peers' data. A packet has 16 bytes:
// 4 of data, the epoch, 4 of data, the epoch. Each half is one 64-bit access, so its epoch proves its data, without a
// fence or barrier.
//
// In an epoch, block b of each rank sends `count` packets (equal on all ranks, at least 1) to its part of each other
// rank's slot, then waits for `count` packets from each: rules Heard and Drained. Each thread sends, receives and
// writes the same indices, so output may be input.
#pragma once

#include "elements.cuh"
#include "epochs.cuh"

namespace parallel_state {

using Pair = Words<2>;
constexpr u32 PAIR_BYTES = 8;

__device__ __forceinline__ void send_pair(const Block& block, u32 to, u32 i, const Pair& pair) {
  const u64 flag = u64{block.epoch()} << 32;
  store_packet(block.packets(to, block.call.rank) + u64{i} * PACKET_BYTES,
               Packet{{flag | pair.at[0], flag | pair.at[1]}});
}

template <u32 SIZE>
__device__ __forceinline__ void send_pair_to_all(const Block& block, Ranks<SIZE> ranks, u32 i, const Pair& pair) {
  const u32 own = block.call.rank;
#pragma unroll
  for (u32 step = 1; step < Ranks<SIZE>::MOST; ++step) {
    if (ranks.has(step)) send_pair(block, own + step < ranks.size ? own + step : own + step - ranks.size, i, pair);
  }
}

template <u32 SIZE, u32 MOST>
__device__ __forceinline__ bool receive_pairs(const Block& block, Ranks<SIZE> ranks, u32 i, const Pair& own,
                                              Pair (&pairs)[MOST]) {
  static_assert(MOST == Ranks<SIZE>::MOST, "a pair of each rank");
  const Call& call = block.call;
  const u64 first = block.packets(call.rank, 0) + u64{i} * PACKET_BYTES;
  Patience patience;
  while (true) {
    Packet packets[MOST];
#pragma unroll
    for (u32 r = 0; r < MOST; ++r) {
      packets[r] = load_packet(first + (ranks.has(r) ? u64{r} * PART_PACKETS * PACKET_BYTES : 0));
    }
    u32 missing = MAX_RANKS;
#pragma unroll
    for (u32 r = 0; r < MOST; ++r) {
      const bool is_there = packets[r].halves[0] >> 32 == block.epoch() && packets[r].halves[1] >> 32 == block.epoch();
      if (ranks.has(r) && r != call.rank && !is_there) missing = r;
      pairs[r].at[0] = r == call.rank ? own.at[0] : static_cast<u32>(packets[r].halves[0]);
      pairs[r].at[1] = r == call.rank ? own.at[1] : static_cast<u32>(packets[r].halves[1]);
    }
    if (missing == MAX_RANKS) return true;
    if (patience.is_over(call, missing, block.epoch())) return false;
  }
}

template <class T, u32 SIZE>
__device__ __forceinline__ bool receive_sum(const Block& block, Ranks<SIZE> ranks, u32 i, const Pair& own,
                                            Floats<T, 2>& sum) {
  Pair pairs[Ranks<SIZE>::MOST];
  if (!receive_pairs(block, ranks, i, own, pairs)) return false;
  sum = sum_in_rank_order<T>(ranks, pairs);
  return true;
}

// At most PART_PACKETS pairs per epoch.
template <class Send, class Receive>
__device__ __forceinline__ void push_all(const Call& call, u64 pairs, Send send, Receive receive) {
  const Share share = share_of(pairs);
  if (share.begin == share.end) return;
  Block block(call);
  for (u64 start = share.begin; start < share.end; start += PART_PACKETS) {
    const u32 count = share.end - start < PART_PACKETS ? static_cast<u32>(share.end - start) : PART_PACKETS;
    block.begin_epoch();
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) send(block, i, start + i);
    bool stopped = false;
    for (u32 i = threadIdx.x; i < count && !stopped; i += blockDim.x) stopped = !receive(block, i, start + i);
    if (!block.end_epoch(stopped)) return;
  }
  block.keep_epoch();
}

template <class T>
__device__ __forceinline__ void all_reduce_push(const Call& call) {
  const u64 bytes = call.numel * T::BYTES;
  const Tensor input{call.input, bytes}, output{call.output, bytes};
  with_ranks(call.size, [&](auto ranks) {
    push_all(
        call, pieces_of(bytes, PAIR_BYTES),
        [&](const Block& block, u32 i, u64 pair) {
          send_pair_to_all(block, ranks, i, input.load<2>(pair * PAIR_BYTES));
        },
        [&](const Block& block, u32 i, u64 pair) {
          Floats<T, 2> sum;
          if (!receive_sum<T>(block, ranks, i, input.load<2>(pair * PAIR_BYTES), sum)) return false;
          output.store(pair * PAIR_BYTES, sum.rounded());
          return true;
        });
  });
}

}  // namespace parallel_state
