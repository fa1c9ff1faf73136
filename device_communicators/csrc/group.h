// The collectives of one group of ranks on one host, over a segment of shared memory that all of them have mapped.
//
// The segment: a control line per rank, then for each rank 16 small slots and 4 large ones. A rank writes its own slots
// and its own line, and reads the others'. Every exchange counts one *tick* on each rank, in the same order on all of
// them: a rank publishes the tick once its data lies in its slot, and the others wait for that.
//
// Reuse of a slot: a rank that has published tick t has entered exchange t, so it has finished all before. A slot is
// written again only when all others have entered an exchange after the one in which they read it last.
//
// With its tick a rank tells what it does (operation, dtype, size): the others compare before they touch its data.
//
// Not thread-safe: one call at a time. The caller owns the segment and keeps it mapped while the group lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "reduce.h"
#include "wait.h"

namespace parallel_state {

constexpr int kMaxRanks = 64;
constexpr std::size_t kSmallSlotBytes = 64 << 10;
constexpr int kSmallSlots = 16;  // with two, the slot stays in the other core's cache and writing it costs twice
constexpr std::size_t kLargeSlotBytes = 128 << 10;
constexpr int kLargeSlots = 4;

enum class Status : int { kDone = 0, kTimedOut = 1, kPeerDied = 2, kMismatch = 3 };

class ProcessLiveness : public Liveness {
 public:
  ProcessLiveness(const std::int64_t* pids, int count);
  ~ProcessLiveness() override;
  ProcessLiveness(const ProcessLiveness&) = delete;
  ProcessLiveness& operator=(const ProcessLiveness&) = delete;
  bool is_alive(int rank) const override;

 private:
  std::vector<int> pidfds_;
};

class Group {
 public:
  // `segment` holds `segment_bytes(size)` bytes, zero when the first rank attaches. `pids` of all ranks.
  Group(void* segment, int rank, int size, const std::int64_t* pids, WaitPolicy policy);

  static std::size_t segment_bytes(int size);

  // Every one returns kDone, or what went wrong and `suspect()`, `expected()` and `found()` say who and how.
  Status barrier(double timeout_s);
  Status all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op, double timeout_s);
  // Slice r of `in`, which is [outer, size, inner] elements, reduced over all ranks into rank r's [outer, inner].
  Status reduce_scatter(void* out, const void* in, std::size_t outer, std::size_t inner, Dtype dtype, ReduceOp op,
                        double timeout_s);
  // `in` is [outer, inner_bytes]; `out` is [outer, size, inner_bytes].
  Status all_gather(void* out, const void* in, std::size_t outer, std::size_t inner_bytes, double timeout_s);
  // `outs[r]` takes rank r's bytes[r]; null where this rank doesn't want them.
  Status gatherv(void* const* outs, const std::size_t* bytes, const void* in, double timeout_s);
  Status broadcast(void* data, std::size_t bytes, int src, double timeout_s);
  // `in` on `src` holds a block of `bytes` for each rank.
  Status scatter(void* out, const void* in, std::size_t bytes, int src, double timeout_s);
  Status all_to_all(void* out, const void* in, const std::size_t* out_bytes, const std::size_t* in_bytes,
                    double timeout_s);

  int suspect() const { return suspect_; }
  std::uint64_t expected() const { return expected_; }
  std::uint64_t found() const { return found_; }

 private:
  template <typename Write, typename Wanted, typename Read>
  Status move(std::size_t bytes, std::uint64_t call, Write write, Wanted wanted, Read read);
  Status reuse(std::uint64_t tick);
  Status wait_one(int rank, std::uint64_t tick, std::uint64_t call);
  Status wait_all(std::uint64_t tick, std::uint64_t call);
  std::uint64_t publish(std::uint64_t call);
  void begin(double timeout_s);

  Status small_all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op, std::uint64_t call);
  Status large_all_reduce(char* out, const char* in, std::size_t count, Dtype dtype, ReduceOp op, std::uint64_t call);

  static constexpr std::size_t kRankBytes = kSmallSlots * kSmallSlotBytes + kLargeSlots * kLargeSlotBytes;

  Counter* lines_;  // one per rank: its tick, and what it does there
  char* data_;
  int rank_;
  int size_;
  WaitPolicy policy_;
  ProcessLiveness liveness_;
  std::uint64_t tick_ = 0;         // the last one that this rank published
  std::uint64_t all_reached_ = 0;  // a tick that all others are known to have published
  std::uint64_t small_used_[kSmallSlots] = {};  // the tick with which the slot was published last
  std::uint64_t large_used_[kLargeSlots] = {};
  std::uint64_t small_count_ = 0;
  std::uint64_t large_count_ = 0;
  std::int64_t deadline_ns_ = 0;
  int suspect_ = -1;
  std::uint64_t expected_ = 0;
  std::uint64_t found_ = 0;
};

}  // namespace parallel_state
