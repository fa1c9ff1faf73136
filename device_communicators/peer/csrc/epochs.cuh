// Epochs: how the blocks of a call keep out of each other's way, in one call and in the next.
//
// Block b of a rank works with block b of the other ranks and with nobody else. It has its own flags, its own parts of
// the regions and its own epoch. One *epoch* is one exchange between these blocks: everyone writes into its slot of the
// regions (slot = epoch % 2), everyone waits for the others, everyone reads. A call takes as many epochs as its block's
// share of the data needs, so a region of fixed size serves any tensor. The grid depends on what is equal on all ranks
// only (kernel, numel, dtype, size), so block b has the same share, and takes the same epochs, everywhere. A block
// without a share takes none. The number is kept in device memory, so a graph may be replayed any number of times, and
// calls of different kernels and sizes may follow each other in any order, as long as all ranks make the same ones, one
// after the other: two calls at once on two streams of one rank would share an epoch. That is for the host to prevent.
//
// Each kernel keeps these two rules, with which all others follow:
//
//   Heard.   Block b ends epoch e only after block b of every other rank has *begun* e: it has something from each.
//   Drained. Block b ends epoch e only after everything that the others write into its region in e has arrived.
//
// Why two slots are enough. What is written in epoch e+2 goes where e's was. The writer has ended e+1, so (Heard) every
// other block has begun e+1, so it has ended e and read what it wanted: its threads pass a barrier, or end a kernel,
// between the reads of e and the first write of e+1, and the writer's do likewise between e+1 and e+2. Kernels of one
// rank follow each other in its stream, each behind the end of the one before: they are never launched as programmatic
// dependents. Where e+1 was a push, whose packets carry no release, the chain rests on this: a read whose value has
// been used was performed before a store that follows it behind a barrier, and no GPU makes a store visible early.
//
// Why flags are compared for being equal. A place of a slot is written once in an epoch, and nobody is in e+2 before
// this block has ended e, so a flag is that of e, or an older one. Packets past the end of a short call, and flags
// of a phase that a kernel doesn't use, keep the numbers of older epochs. 32 bits come round after 2^32 epochs, which
// is days of decoding, so what is old is cleared before (clear_next_slot), twice every 2^30 epochs.
//
// Blocks spin, so all of a grid must be on the device at once: the host launches no more than fit (kernels.py).
// Other kernels on the device only delay that, as long as they end by themselves; kernels of other processes take turns
// with this one as a whole.
//
// Every wait ends: when the flag comes, at the deadline (a report, then a trap, which ends the CUDA context), or when
// the host sets the abort word (a report, and the kernel returns; its output is undefined). A block that has stopped
// never sends or raises a flag again, so that no peer takes garbage for a result. Its epoch stays behind: the regions
// of a group that failed are of no further use.
#pragma once

#include "memory.cuh"

namespace parallel_state {

constexpr u32 LOOKS_PER_CLOCK = 256;  // a look at a flag takes about 1 us over NVLink, and some 100 ns in own memory
constexpr u32 CLOCKS_PER_ABORT = 8;   // a look at the host's memory takes a few us
constexpr u32 CLEAR_EVERY = 1u << 30;

// Tells the host why a thread gave up.
__device__ __noinline__ void give_report(const Call& call, Report reason, u32 peer, u32 epoch) {
  const u64 word = u64{static_cast<u32>(reason)} << 56 | u64{peer & 0xff} << 48 | u64{call.operation & 0xff} << 40 |
                   u64{blockIdx.x & 0xff} << 32 | epoch;
  if (peer != OWN_BLOCK || load_word(call.report) == 0) store_word(call.report, word);
  fence_system();  // the trap that may follow doesn't wait for stores
}

// The deadline of one wait.
class Patience {
 public:
  // After each look that was in vain; true: stop waiting.
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
  u64 looks_ = 0;  // 32 bits came round after some minutes, and the deadline began anew
  u64 start_ns_ = 0;
};

// Sets a block's flags and packets in the slot of the epoch after this one to 0. Nobody touches them now: those of the
// epoch before have arrived (Drained), and none of the next comes before this block has sent something in this one
// (Heard). At two epochs in a row, so both slots get their turn. Apart from Block, whose number stays in a register.
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

// 0 is what memory holds at first, so no epoch has it; then 2, as slots take turns.
__device__ __forceinline__ u32 next_epoch(u32 epoch) { return epoch + 1 == 0 ? 2 : epoch + 1; }

// One block's walk through the epochs of a call. All threads of the block make the same calls.
class Block {
 public:
  explicit __device__ __forceinline__ Block(const Call& call)
      : call(call), epoch_(control(call.rank)->epoch[blockIdx.x]) {}

  const Call& call;

  __device__ __forceinline__ u32 epoch() const { return epoch_; }

  // This rank's place in its slot of `owner`'s region for packets; see push.cuh.
  __device__ __forceinline__ u64 packets(u32 owner, u32 from) const {
    const u64 part = (u64{slot()} * MAX_BLOCKS + blockIdx.x) * MAX_RANKS + from;
    return call.regions[owner] + PACKETS_OFFSET + part * (PART_PACKETS * PACKET_BYTES);
  }

  // Where this block of `owner` stages data; see staged.cuh.
  __device__ __forceinline__ u64 stage(u32 owner) const {
    return call.regions[owner] + STAGES_OFFSET + (u64{slot()} * MAX_BLOCKS + blockIdx.x) * STAGE_BYTES;
  }

  // Before anything else in an epoch.
  __device__ __forceinline__ void begin_epoch() {
    epoch_ = next_epoch(epoch_);
    if (epoch_ % CLEAR_EVERY == 2 || epoch_ % CLEAR_EVERY == 3) clear_next_slot(call, epoch_);
  }

  // All threads have what they waited for, or one of them has stopped: then false, for all, and the kernel returns.
  __device__ __forceinline__ bool end_epoch(bool stopped = false) { return __syncthreads_or(stopped) == 0; }

  // Every rank's block has come here, and what it wrote before can be read. False: stopped, as in end_epoch.
  __device__ __forceinline__ bool barrier(u32 phase) {
    __syncthreads();  // what the other threads wrote is what these release
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

  // After the last epoch of a call, when all threads have read the number: end_epoch sees to that.
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

// The block's share of `count` things, equal on all ranks; empty for the last blocks of a grid that is too large.
struct Share {
  u64 begin, end;
};

__device__ __forceinline__ Share share_of(u64 count) {
  const u64 each = (count + gridDim.x - 1) / gridDim.x;
  const u64 begin = each * blockIdx.x, end = begin + each;
  return {begin < count ? begin : count, end < count ? end : count};
}

}  // namespace parallel_state
