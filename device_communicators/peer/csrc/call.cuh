// What a launch is told, and where things lie in a region. Mirrored in kernels.py; a test compares the two.
//
// Nothing here touches memory: see memory.cuh for how, and epochs.cuh for when.
#pragma once

namespace parallel_state {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 MAX_RANKS = 8;
constexpr u32 MAX_BLOCKS = 128;
constexpr u32 MAX_THREADS = 512;  // of a block, as __launch_bounds__ says
constexpr u32 SLOTS = 2;          // see epochs.cuh for why two are enough
constexpr u32 PHASES = 2;         // barriers within one epoch

// By value to every kernel. Addresses are numbers, so that the layout is the same wherever it is compiled.
// A graph keeps a copy of it, so nothing in it may age: the deadline is a length of time, counted from the first look.
struct Call {
  u64 regions[MAX_RANKS];  // of the ranks, as this process has them mapped; 256-byte aligned, zeroed once
  u64 input;               // 16-byte aligned, as the other tensors: whoever calls sees to that
  u64 output;              // may be `input` in an all_reduce
  u64 residual;            // from here on: for the fused kernels
  u64 residual_out;
  u64 weight;
  u64 scale;
  u64 scale_out;
  u64 report;       // 8 bytes of host memory that the device has mapped: what went wrong, see `Report`
  u64 abort;        // likewise, set by the host: anything but 0 ends the waiting
  u64 numel;        // elements of the tensor; all_gather: bytes of the input; reduce_scatter: elements of the output
  u64 deadline_ns;  // how long a thread waits for one thing from a peer
  u32 rank;
  u32 size;
  u32 operation;  // the host's number for this kernel, repeated in a report
  u32 rows;
  u32 hidden;
  float eps;
};

// A report is one 64-bit word, written once by each thread that gave up, the last one wins, but for one that waited for
// OWN_BLOCK, whose report doesn't replace another's: reason (8 bits) | peer (8) | operation (8) | block (8) | epoch
// (32).
enum class Report : u32 { NOTHING = 0, DEADLINE = 1, ABORTED = 2 };

// In place of a rank: another block of this rank's, which waits for somebody itself.
constexpr u32 OWN_BLOCK = 0xff;

// A region: [control][packets][stages].
struct Control {
  u32 epoch[MAX_BLOCKS];                           // only this rank's own blocks use it
  u32 flag[SLOTS][PHASES][MAX_BLOCKS][MAX_RANKS];  // [..][from]: written by that rank, read by this one
};

constexpr u64 CONTROL_BYTES = 64 << 10;
constexpr u32 PACKET_BYTES = 16;       // 8 of data, see push.cuh
constexpr u32 PART_PACKETS = 256;      // that one rank's block can put into another rank's part of a slot
constexpr u32 STAGE_BYTES = 32 << 10;  // of data that a block stages in a slot, see staged.cuh
constexpr u64 PACKETS_OFFSET = CONTROL_BYTES;
constexpr u64 STAGES_OFFSET = PACKETS_OFFSET + u64{SLOTS} * MAX_BLOCKS * MAX_RANKS * PART_PACKETS * PACKET_BYTES;
constexpr u64 REGION_BYTES = STAGES_OFFSET + u64{SLOTS} * MAX_BLOCKS * STAGE_BYTES;

static_assert(sizeof(Control) <= CONTROL_BYTES, "the control area has outgrown its place");
static_assert(sizeof(Call) == MAX_RANKS * 8 + 11 * 8 + 6 * 4, "no padding");

}  // namespace parallel_state
