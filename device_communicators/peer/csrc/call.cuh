// Mirrored in kernels.py.
#pragma once

namespace parallel_state {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 MAX_RANKS = 8;
constexpr u32 MAX_BLOCKS = 128;
constexpr u32 MAX_THREADS = 512;
constexpr u32 SLOTS = 2;
constexpr u32 PHASES = 2;  // barriers within one epoch

// Addresses are integers, so that all compilers use one layout. CUDA graphs keep a copy, so the deadline is a duration.
struct Call {
  u64 regions[MAX_RANKS];  // as mapped in this process; 256-byte aligned, zeroed once
  u64 input;               // tensors are aligned to 16 bytes
  u64 output;              // may be `input` in an all_reduce
  u64 residual;            // this and the next five: only for the fused kernels
  u64 residual_out;
  u64 weight;
  u64 scale;
  u64 scale_out;
  u64 report;  // 8 bytes of mapped host memory, for a `Report`
  u64 abort;   // as `report`; a non-zero value ends all waits
  u64 numel;   // elements; all_gather: bytes of the input; reduce_scatter: elements of the output
  u64 deadline_ns;
  u32 rank;
  u32 size;
  u32 operation;
  u32 rows;
  u32 hidden;
  float eps;
};

// A 64-bit word: reason (8 bits) | peer (8) | operation (8) | block (8) | epoch (32). A report about OWN_BLOCK replaces
// no earlier one.
enum class Report : u32 { NOTHING = 0, DEADLINE = 1, ABORTED = 2 };

// Peer: another block of the waiting thread's own rank.
constexpr u32 OWN_BLOCK = 0xff;

// A region is [control][packets][stages].
struct Control {
  u32 epoch[MAX_BLOCKS];
  u32 flag[SLOTS][PHASES][MAX_BLOCKS][MAX_RANKS];  // rank r writes [..][r], the region's owner reads it
};

constexpr u64 CONTROL_BYTES = 64 << 10;
constexpr u32 PACKET_BYTES = 16;  // 8 bytes are data
constexpr u32 PART_PACKETS = 256;
constexpr u32 STAGE_BYTES = 32 << 10;
constexpr u64 PACKETS_OFFSET = CONTROL_BYTES;
constexpr u64 STAGES_OFFSET = PACKETS_OFFSET + u64{SLOTS} * MAX_BLOCKS * MAX_RANKS * PART_PACKETS * PACKET_BYTES;
constexpr u64 REGION_BYTES = STAGES_OFFSET + u64{SLOTS} * MAX_BLOCKS * STAGE_BYTES;

static_assert(sizeof(Control) <= CONTROL_BYTES, "the control area has outgrown its place");
static_assert(sizeof(Call) == MAX_RANKS * 8 + 11 * 8 + 6 * 4, "no padding");

}  // namespace parallel_state
