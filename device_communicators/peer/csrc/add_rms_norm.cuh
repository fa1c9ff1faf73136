// y = round(round(sum of input) + residual) and round(y / rms(y) * weight), optionally quantized to float8, by push.
// The numerics are those of calls/reductions.py.
//
// A *team* of neighboring blocks shares a row: each thread has one pair of it and each epoch handles a whole row. Every
// rank computes all rows. A team's blocks exchange the sum of squares and, with a scale per token, the largest
// magnitude as *parts*: packets in their own rank's region, at the unused place of packets from that rank. Values are
// combined in a fixed order, so all ranks get the same bits.
//
// Blocks have different epoch numbers, so parts carry the *receiver's* epoch and use its slot. Each member reads the
// others' numbers before it sends its first part, which they need to advance. A block ends an epoch only after it has
// received all parts of that epoch, and only then writes for the next. So a slot that is cleared or reused has no part
// that is still needed.
//
// Each thread reads and writes the same indices, so output may be input, and residual_out may be residual.
#pragma once

#include "float8.cuh"
#include "push.cuh"

namespace parallel_state {

enum class Norm { PLAIN, STATIC_FLOAT8, TOKEN_FLOAT8 };

static_assert(2 * MAX_BLOCKS <= PART_PACKETS, "two parts of each member have a place");

// A stored reference to the block would keep both out of registers.
class Team {
 public:
  __device__ __forceinline__ Team(const Block& block, u32 size)
      : size(size),
        own(blockIdx.x % size),
        epochs_(shared_array<u32, MAX_BLOCKS, 1>()),
        parts_(shared_array<u32, MAX_BLOCKS, 2>()) {
    const Control* const control = reinterpret_cast<const Control*>(block.call.regions[block.call.rank]);
    for (u32 j = threadIdx.x; j < size; j += blockDim.x) epochs_[j] = control->epoch[blockIdx.x - own + j];
  }

  const u32 size, own;

  __device__ __forceinline__ void begin_epoch() {
    for (u32 j = threadIdx.x; j < size; j += blockDim.x) epochs_[j] = next_epoch(epochs_[j]);
  }

  // All threads of a block pass the same part; `phase` is 0, then 1. False if a wait was stopped.
  __device__ __forceinline__ bool exchange(const Block& block, u32 phase, u32 part) {
    for (u32 j = threadIdx.x; j < size; j += blockDim.x) {
      const u64 flag = u64{epochs_[j]} << 32;
      if (j != own) {
        store_packet(place(block.call, blockIdx.x - own + j, epochs_[j], phase, own), Packet{{flag | part, flag}});
      }
    }
    bool stopped = false;
    for (u32 j = threadIdx.x; j < size && !stopped; j += blockDim.x) stopped = !receive(block, phase, j, part);
    return __syncthreads_or(stopped) == 0;
  }

  __device__ __forceinline__ u32 part(u32 member) const { return parts_[member]; }

 private:
  __device__ __forceinline__ bool receive(const Block& block, u32 phase, u32 from, u32 part) {
    if (from == own) {
      parts_[from] = part;
      return true;
    }
    Patience patience;
    while (true) {
      const Packet packet = load_packet(place(block.call, blockIdx.x, block.epoch(), phase, from));
      parts_[from] = static_cast<u32>(packet.halves[0]);
      if (packet.halves[0] >> 32 == block.epoch()) return true;
      if (patience.is_over(block.call, OWN_BLOCK, block.epoch())) return false;
    }
  }

  __device__ __forceinline__ u64 place(const Call& call, u32 b, u32 epoch, u32 phase, u32 from) const {
    const u64 part = (u64{epoch % SLOTS} * MAX_BLOCKS + b) * MAX_RANKS + call.rank;
    const u64 packet = part * PART_PACKETS + phase * MAX_BLOCKS + from;
    return call.regions[call.rank] + PACKETS_OFFSET + packet * PACKET_BYTES;
  }

  u32 *const epochs_, *const parts_;
};

struct Sum {
  static __device__ __forceinline__ u32 of(u32 one, u32 other) {
    return __float_as_uint(__uint_as_float(one) + __uint_as_float(other));
  }
};

// As integers, magnitudes of floats keep their order, and NaN is the largest.
struct Largest {
  static __device__ __forceinline__ u32 of(u32 one, u32 other) { return one < other ? other : one; }
};

// The next call must have another TAG, or follow a barrier.
template <class Operation, u32 TAG>
__device__ __forceinline__ u32 over_block(u32 value) {
  constexpr u32 LANES = 32;
  u32* const of_warps = shared_array<u32, MAX_THREADS / LANES, TAG>();
  const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
#pragma unroll
  for (u32 mask = 1; mask < LANES; mask *= 2) {
    const u32 other = __shfl_xor_sync(~0u, value, mask);
    if (warp * LANES + (lane ^ mask) < blockDim.x) value = Operation::of(value, other);
  }
  if (lane == 0) of_warps[warp] = value;
  __syncthreads();
  value = of_warps[0];
  for (u32 w = 1; w * LANES < blockDim.x; ++w) value = Operation::of(value, of_warps[w]);
  return value;
}

template <class Operation, u32 PHASE>
__device__ __forceinline__ bool over_row(const Block& block, Team& team, u32& value) {
  value = over_block<Operation, 3 + PHASE>(value);
  if (team.size == 1) return true;
  if (!team.exchange(block, PHASE, value)) return false;
  value = team.part(0);
  for (u32 j = 1; j < team.size; ++j) value = Operation::of(value, team.part(j));
  return true;
}

template <class T>
__device__ __forceinline__ void store_float8(u64 address, u32 index, u32 length, const u32 (&values)[8 / T::BYTES]) {
  constexpr u32 COUNT = 8 / T::BYTES;
  address += index;
  if (index + COUNT <= length && address % COUNT == 0) {
    u32 word = 0;
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) word |= values[k] << (8 * k);
    if constexpr (COUNT == 4) {
      *reinterpret_cast<u32*>(address) = word;
    } else {
      *reinterpret_cast<u16*>(address) = static_cast<u16>(word);
    }
    return;
  }
  for (u32 k = 0; k < COUNT && index + k < length; ++k) {
    reinterpret_cast<unsigned char*>(address)[k] = static_cast<unsigned char>(values[k]);
  }
}

template <class T, Norm NORM, u32 SIZE>
class NormPiece {
  using Values = Floats<T, 2>;

 public:
  __device__ __forceinline__ NormPiece(const Call& call, Ranks<SIZE> ranks, u32 pairs, u32 members)
      : call_(call),
        ranks_(ranks),
        block_(call),
        team_(block_, members),
        ys_(shared_array<Pair, PART_PACKETS, 5>()),
        weights_(shared_array<Pair, PART_PACKETS, 6>()) {
    const u32 each = (pairs + members - 1) / members;
    begin_ = each * team_.own;
    count_ = begin_ + each < pairs ? each : pairs - begin_;
  }

  __device__ __forceinline__ void run(u32 first, u32 step) {
    for (u32 row = first; row < call_.rows; row += step) {
      block_.begin_epoch();
      team_.begin_epoch();
      if (!block_.end_epoch(!run_row(row))) return;
    }
    block_.keep_epoch();
  }

 private:
  __device__ __forceinline__ Tensor row_of(u64 address, u64 row) const {
    const u64 bytes = u64{call_.hidden} * T::BYTES;
    return {address + row * bytes, bytes};
  }

  __device__ __forceinline__ bool run_row(u32 row) {
    const Tensor input = row_of(call_.input, row);
    for (u32 i = threadIdx.x; i < count_; i += blockDim.x) {
      send_pair_to_all(block_, ranks_, i, input.load<2>(at(i)));
    }
    u32 squares = 0;
    bool stopped = false;
    for (u32 i = threadIdx.x; i < count_ && !stopped; i += blockDim.x) stopped = !add(row, input, i, squares);
    if (__syncthreads_or(stopped) || !over_row<Sum, 0>(block_, team_, squares)) return false;
    const float scale = 1.0f / sqrtf(__uint_as_float(squares) / static_cast<float>(call_.hidden) + call_.eps);
    return finish(row, scale);
  }

  __device__ __forceinline__ bool add(u32 row, const Tensor& input, u32 i, u32& squares) {
    const Values before = Values::of(row_of(call_.residual, row).template load<2>(at(i)));
    weights_[i] = row_of(call_.weight, 0).template load<2>(at(i));
    Values sum;
    if (!receive_sum<T>(block_, ranks_, i, input.load<2>(at(i)), sum)) return false;
    Values y = Values::of(sum.rounded());
    y.add(before);
    ys_[i] = y.rounded();
    row_of(call_.residual_out, row).store(at(i), ys_[i]);
    y = Values::of(ys_[i]);
    float added = __uint_as_float(squares);
#pragma unroll
    for (u32 k = 0; k < Values::LENGTH; ++k) added += y.at[k] * y.at[k];  // elements past the end of a row are 0
    squares = __float_as_uint(added);
    return true;
  }

  __device__ __forceinline__ bool finish(u32 row, float scale) {
    const float inverse = NORM == Norm::STATIC_FLOAT8 ? 1.0f / *reinterpret_cast<const float*>(call_.scale) : 0.0f;
    u32 largest = 0;
    for (u32 i = threadIdx.x; i < count_; i += blockDim.x) {
      Values normed = Values::of(ys_[i]);
      const Values weight = Values::of(weights_[i]);
#pragma unroll
      for (u32 k = 0; k < Values::LENGTH; ++k) normed.at[k] = normed.at[k] * scale * weight.at[k];
      const Pair rounded = normed.rounded();
      normed = Values::of(rounded);
      if constexpr (NORM == Norm::PLAIN) row_of(call_.output, row).store(at(i), rounded);
      if constexpr (NORM == Norm::STATIC_FLOAT8) quantise(row, i, normed, [&](float value) { return value * inverse; });
      if constexpr (NORM == Norm::TOKEN_FLOAT8) {
        ys_[i] = rounded;
#pragma unroll
        for (u32 k = 0; k < Values::LENGTH; ++k) {  // past the end of a row: 0, or NaN if the whole row is NaN
          largest = Largest::of(largest, __float_as_uint(normed.at[k]) & 0x7fffffff);
        }
      }
    }
    if constexpr (NORM == Norm::TOKEN_FLOAT8) {
      if (!over_row<Largest, 1>(block_, team_, largest)) return false;
      float token_scale = __uint_as_float(largest) / FLOAT8_MAX;
      if (token_scale < MIN_TOKEN_SCALE) token_scale = MIN_TOKEN_SCALE;  // false for NaN
      for (u32 i = threadIdx.x; i < count_; i += blockDim.x) {
        quantise(row, i, Values::of(ys_[i]), [&](float value) { return value / token_scale; });
      }
      if (team_.own == 0 && threadIdx.x == 0) reinterpret_cast<float*>(call_.scale_out)[row] = token_scale;
    }
    return true;
  }

  template <class Scaled>
  __device__ __forceinline__ void quantise(u32 row, u32 i, const Values& normed, Scaled scaled) {
    u32 bytes[Values::LENGTH];
#pragma unroll
    for (u32 k = 0; k < Values::LENGTH; ++k) bytes[k] = float8_of_float(scaled(normed.at[k]));
    store_float8<T>(call_.output + u64{row} * call_.hidden, (begin_ + i) * Values::LENGTH, call_.hidden, bytes);
  }

  __device__ __forceinline__ u64 at(u32 i) const { return u64{begin_ + i} * PAIR_BYTES; }

  const Call& call_;
  const Ranks<SIZE> ranks_;
  Block block_;
  Team team_;
  Pair *const ys_, *const weights_;
  u32 begin_, count_;
};

template <class T, Norm NORM, u32 SIZE>
__device__ __forceinline__ void norm_rows(const Call& call, Ranks<SIZE> ranks, u32 pairs, u32 members, u32 team,
                                          u32 teams) {
  NormPiece<T, NORM, SIZE>(call, ranks, pairs, members).run(team, teams);
}

template <class T, Norm NORM>
__device__ __forceinline__ void add_rms_norm(const Call& call) {
  const u32 pairs = static_cast<u32>(pieces_of(u64{call.hidden} * T::BYTES, PAIR_BYTES));
  const u32 members = static_cast<u32>(pieces_of(pairs, PART_PACKETS));
  const u32 teams = gridDim.x / members, team = blockIdx.x / members;
  if (teams == 0) trap();  // never with a grid of kernels.py
  if (team < teams && team < call.rows) {
    with_ranks(call.size, [&](auto ranks) { norm_rows<T, NORM>(call, ranks, pairs, members, team, teams); });
  }
}

template <class T>
__device__ __forceinline__ void all_reduce_add_rms_norm(const Call& call) {
  add_rms_norm<T, Norm::PLAIN>(call);
}

template <class T>
__device__ __forceinline__ void all_reduce_add_rms_norm_static_fp8(const Call& call) {
  add_rms_norm<T, Norm::STATIC_FLOAT8>(call);
}

template <class T>
__device__ __forceinline__ void all_reduce_add_rms_norm_token_fp8(const Call& call) {
  add_rms_norm<T, Norm::TOKEN_FLOAT8>(call);
}

}  // namespace parallel_state
