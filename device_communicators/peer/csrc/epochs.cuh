// Epochs keep the exchanges of blocks apart.
//
// Block b of a rank exchanges data only with block b of each other rank. In one *epoch* each block writes into its slot
// of the regions (slot = epoch % 2), waits for the others, and reads. All ranks make the same calls in the same order,
// with equal grids, so block b takes the same epochs on all ranks. The epoch number is in device memory, so a graph may
// be replayed.
//
// Each kernel obeys two rules:
//
// Heard.   Block b ends epoch e only after block b of every other rank has *begun* e: it received data from each.
// Drained. Block b ends epoch e only after everything that peers write into its region in e has arrived.
//
// Two slots are enough. Writes of epoch e+2 overwrite those of e. The writer has ended e+1. So (Heard) every other
// block has begun e+1, and has read its data of e. A barrier, or the end of a kernel, separates the reads of e from the
// first write of e+1, and e+1 from e+2. Kernels of one rank are never launched as programmatic dependents. A push has
// no release: there a read whose value was used is performed before a store after a barrier, and no GPU makes a store
// visible early.
//
// Flags are compared for equality. Each place of a slot is written once per epoch, and no block is in e+2 before this
// block has ended e. So a flag has the number of e or of an older epoch. Old numbers are cleared before 32 bits wrap
// around.
//
// Blocks spin, so the host launches no more blocks than can be resident at once.
//
// A wait ends when the flag arrives; at the deadline (a report, then a trap, which destroys the CUDA context); or when
// the host sets the abort word (a report, then the kernel returns with undefined output). A stopped block never sends
// or sets a flag again, so that no peer takes invalid data for a result.
#pragma once

#include "memory.cuh"

namespace parallel_state {

constexpr u32 LOOKS_PER_CLOCK = 256;  // about 1 us over NVLink, 100 ns in own memory
constexpr u32 CLOCKS_PER_ABORT = 8;   // reading host memory takes a few us
constexpr u32 CLEAR_EVERY = 1u << 30;

__device__ __noinline__ void give_report(const Call& call, Report reason, u32 peer, u32 epoch) {
  const u64 word = u64{static_cast<u32>(reason)} << 56 | u64{peer & 0xff} << 48 | u64{call.operation & 0xff} << 40 |
                   u64{blockIdx.x & 0xff} << 32 | epoch;
  if (peer != OWN_BLOCK || load_word(call.report) == 0) store_word(call.report, word);
  fence_system();  // a trap doesn't wait for stores
}

class Patience {
 public:
  __device__ __forceinline__ bool is_over(const Call& call, u32 peer, u32 epoch) {
    if (++looks_ % LOOKS_PER_CLOCK != 0) return false;
    const u64 now = clock_ns();
    if (looks_ == LOOKS_PER_CLOCK) start_ns_ = now;
    if (looks_ / LOOKS_PER_CLOCK % CLOCKS_PER_ABORT == 1 && load_word(call.abort) != 0) {
      give_report(call, Report::ABORTED, peer, epoch);
      return true;
    }
    if (now - start_ns_ < call.deadline_ns) return false;
    give_report(call, Report::DEADLINE, peer, epoch);
    trap();
    return true;
  }

 private:
  u64 looks_ = 0;  // 32 bits would wrap around after some minutes and restart the deadline
  u64 start_ns_ = 0;
};

// No peer writes the next slot now: writes of the previous epoch have arrived (Drained), and those of the next are sent
// only after this block has sent data in this epoch (Heard). Called in two consecutive epochs, for both slots. Not a
// member of Block, so that the epoch stays in a register.
__device__ __noinline__ void clear_next_slot(const Call& call, u32 epoch) {
  const u32 next = (epoch + 1) % SLOTS;
  const u64 region = call.regions[call.rank];
  Control* const own = reinterpret_cast<Control*>(region);
  for (u32 i = threadIdx.x; i < PHASES * MAX_RANKS; i += blockDim.x) {
    clear_flag(reinterpret_cast<u64>(&own->flag[next][i / MAX_RANKS][blockIdx.x][i % MAX_RANKS]));
  }
  const u64 part = (u64{next} * MAX_BLOCKS + blockIdx.x) * MAX_RANKS * PART_PACKETS;
  for (u32 i = threadIdx.x; i < MAX_RANKS * PART_PACKETS; i += blockDim.x) {
    store_packet(region + PACKETS_OFFSET + (part + i) * PACKET_BYTES, Packet{{0, 0}});
  }
  fence_system();
  __syncthreads();
}

// Skips 0, the value of zeroed memory; 2 follows 2^32 - 1, because slots alternate.
__device__ __forceinline__ u32 next_epoch(u32 epoch) { return epoch + 1 == 0 ? 2 : epoch + 1; }

class Block {
 public:
  explicit __device__ __forceinline__ Block(const Call& call)
      : call(call), epoch_(control(call.rank)->epoch[blockIdx.x]) {}

  const Call& call;

  __device__ __forceinline__ u32 epoch() const { return epoch_; }

  __device__ __forceinline__ u64 packets(u32 owner, u32 from) const {
    const u64 part = (u64{slot()} * MAX_BLOCKS + blockIdx.x) * MAX_RANKS + from;
    return call.regions[owner] + PACKETS_OFFSET + part * (PART_PACKETS * PACKET_BYTES);
  }

  __device__ __forceinline__ u64 stage(u32 owner) const {
    return call.regions[owner] + STAGES_OFFSET + (u64{slot()} * MAX_BLOCKS + blockIdx.x) * STAGE_BYTES;
  }

  __device__ __forceinline__ void begin_epoch() {
    epoch_ = next_epoch(epoch_);
    if (epoch_ % CLEAR_EVERY == 2 || epoch_ % CLEAR_EVERY == 3) clear_next_slot(call, epoch_);
  }

  // Returns false, on all threads, if one has stopped: then the kernel must return.
  __device__ __forceinline__ bool end_epoch(bool stopped = false) { return __syncthreads_or(stopped) == 0; }

  // Waits for this block of every rank, whose earlier writes are then readable. Returns false as end_epoch does.
  __device__ __forceinline__ bool barrier(u32 phase) {
    __syncthreads();  // the flags also release the writes of the block's other threads
    for (u32 r = threadIdx.x; r < call.size; r += blockDim.x) {
      if (r != call.rank) release_flag(flag(r, phase, call.rank), epoch_);
    }
    bool stopped = false;
    for (u32 r = threadIdx.x; r < call.size; r += blockDim.x) {
      if (r == call.rank || stopped) continue;
      Patience patience;
      while (acquire_flag(flag(call.rank, phase, r)) != epoch_) {
        if (patience.is_over(call, r, epoch_)) {
          stopped = true;
          break;
        }
      }
    }
    return __syncthreads_or(stopped) == 0;
  }

  // Call it after end_epoch: all threads have read the number.
  __device__ __forceinline__ void keep_epoch() {
    if (threadIdx.x == 0) control(call.rank)->epoch[blockIdx.x] = epoch_;
  }

 private:
  __device__ __forceinline__ u32 slot() const { return epoch_ % SLOTS; }

  __device__ __forceinline__ Control* control(u32 owner) const {
    return reinterpret_cast<Control*>(call.regions[owner]);
  }

  __device__ __forceinline__ u64 flag(u32 owner, u32 phase, u32 from) const {
    return reinterpret_cast<u64>(&control(owner)->flag[slot()][phase][blockIdx.x][from]);
  }

  u32 epoch_;
};

// Equal on all ranks.
struct Share {
  u64 begin, end;
};

__device__ __forceinline__ Share share_of(u64 count) {
  const u64 each = (count + gridDim.x - 1) / gridDim.x;
  const u64 begin = each * blockIdx.x, end = begin + each;
  return {begin < count ? begin : count, end < count ? end : count};
}

}  // namespace parallel_state
