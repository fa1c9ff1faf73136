// The collectives of one group of ranks on one host, over a segment of shared memory that all of them have mapped.
//
// The segment: a control line per rank, then for each rank, from a page on, 16 small slots and 4 large ones. A rank
// writes its own slots and its own line, and reads the others'. Every exchange counts one *tick* on each rank, in the
// same order on all of them: a rank publishes the tick once its data lies in its slot, and the others wait for that.
//
// Reuse of a slot: a rank that has published tick t has entered exchange t, so it has finished all before. A slot is
// written again only when all others have entered an exchange after the one in which they read it last.
//
// With its tick a rank tells what it does, as a digest of the whole call: the others compare before they touch its
// data. The words behind the digest, of its last 64 ticks, lie in its archive, for the error of a rank that finds
// another.
//
// Not thread-safe: one call at a time. The caller owns the segment and keeps it mapped while the group lives.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "group.h"
#include "liveness.h"
#include "tuning.h"
#include "wait.h"
#include "windows.h"

namespace parallel_state {

class HostGroup final : public Group {
 public:
  // `segment` holds `segment_bytes(size)` bytes, zero when the first rank attaches. `liveness` of all
  // ranks lives as long as the group.
  HostGroup(void* segment, int rank, int size, const GroupLiveness& liveness, WaitPolicy policy);

  static std::size_t segment_bytes(int size) { return slots_offset(size, size); }

  // Where the slots of `rank` begin, on a page, and those of the one before end.
  static std::size_t slots_offset(int size, int rank) {
    return data_offset(size) + static_cast<std::size_t>(rank) * rank_bytes(tuning_of(size));
  }

  // The group is the part on this host of one that spans several: who gives doesn't look what the others do, as ranks
  // of other hosts may be waiting for it, and hear of a mismatch by what comes next.
  void be_part() { is_part_ = true; }

  Status barrier(double timeout_s) override;
  Status all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op, double timeout_s) override;
  Status reduce_scatter(void* out, const void* in, std::size_t outer, std::size_t inner, Dtype dtype, ReduceOp op,
                        double timeout_s) override {
    return scatter_reduced(out, in, outer, inner, dtype, op, false, timeout_s);
  }
  Status all_gather(void* out, const void* in, std::size_t outer, std::size_t inner_bytes, double timeout_s) override;
  Status gatherv(void* const* outs, const std::size_t* bytes, const void* in, int dst, double timeout_s) override;
  Status broadcast(void* data, std::size_t bytes, int src, double timeout_s) override;
  Status broadcast_sized(const void* in, std::uint64_t bytes, int src, std::uint64_t most_bytes, void** out,
                         std::uint64_t* out_bytes, double timeout_s) override;
  Status scatter(void* out, const void* in, std::size_t bytes, int src, double timeout_s) override;
  Status all_to_all(void* out, const void* in, const std::size_t* out_bytes, const std::size_t* in_bytes,
                    double timeout_s) override;
  Status all_reduce_add_rms_norm(const AddRmsNorm& norm, double timeout_s) override;
  Status announce(int src, double timeout_s, std::int64_t spin_ns) override;
  Status compare(double timeout_s) override;

  // As reduce_scatter. If `wide`, `out` gets what these inputs are as a part of a reduction: see PartFunction.
  Status scatter_reduced(void* out, const void* in, std::size_t outer, std::size_t inner, Dtype dtype, ReduceOp op,
                         bool wide, double timeout_s);
  // Reduces all ranks' `in` into `out` of rank 0; as a part of a reduction if `wide`. Others don't wait.
  Status reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op, bool wide, double timeout_s);

  // Takes its place among the calls without data, and waits for nobody.
  Status pass(double timeout_s);

  // The ranks' arenas, all of one capacity, for as long as the group lives. A contiguous input of all_reduce,
  // all_gather (of one row), reduce_scatter (of one row) or broadcast that lies in this rank's arena is read where it
  // lies; ranks need not be alike in that. A process that can't map another's input any more fails the call, with
  // kUnmapped.
  void set_arenas(const std::vector<std::unique_ptr<Windows>>& arenas);

  // The ranks of each `ranks` that follow each other share an area, a NUMA node or a cache, beyond which memory is
  // farther; there are two areas at least, all of that size. A reduction of `from_bytes` and more (negative: as tuned)
  // then goes from area to area; its bits are the same. All ranks say the same, before the first call.
  void set_areas(int ranks, std::int64_t from_bytes);

  // What this rank has read of slots of other areas, in all_reduce.
  std::uint64_t crossed_bytes() const { return crossed_bytes_; }

  // What moves on while this rank waits for others; null for nothing.
  void set_side_work(SideWork* side_work) { policy_.side_work = side_work; }

 private:
  template <typename Write, typename Wanted, typename Read>
  Status move(std::size_t bytes, std::uint64_t call, Write write, Wanted wanted, Read read);
  Status reuse(std::uint64_t tick);
  Status wait_one(int rank, std::uint64_t tick, std::uint64_t call);
  WaitResult measured_wait(int rank, std::uint64_t tick);
  Status look(std::uint64_t tick, std::uint64_t call);
  bool differs(int rank, std::uint64_t tick, std::uint64_t call);
  bool in_another_call();
  bool remember(int rank, std::uint64_t tick);
  Status wait_all(std::uint64_t tick, std::uint64_t call);
  Status wait_ranks(int begin, int end, std::uint64_t tick, std::uint64_t call);
  std::uint64_t publish(std::uint64_t call) { return publish(call, call); }
  std::uint64_t publish(std::uint64_t call, std::uint64_t note);
  void begin(double timeout_s);

  // The note of a call that has begun: all of it must be equal on all ranks.
  std::uint64_t call_of(Kind kind, std::uint64_t size, Method method, std::uint64_t digest = 0, int reduction = -1,
                        int root = -1);
  void tell_parts(const std::size_t* bytes);

  // That all parts are of one size; whether that is what `rank` told with its tick, and then `bytes` is filled with it.
  void tell_even_parts(std::size_t bytes);
  bool find_even_parts(int rank, std::uint64_t tick, std::uint64_t* bytes, std::size_t count) const;

  // The last calls of a rank; written by it before the tick that they belong to is published.
  static constexpr std::uint64_t kKept = 64;
  static constexpr unsigned kEvenShift = 8;
  static constexpr std::uint64_t kPartsMask = (1 << kEvenShift) - 1;
  struct alignas(128) Archive {
    struct Entry {
      // parts: how many, and from kEvenShift on 1 + the bytes of each, where they are even; else 0
      std::atomic<std::uint64_t> note, word, shape, parts;
    };
    Entry entries[kKept];
    std::atomic<std::uint64_t> part_bytes[kMaxRanks];  // of the last call that has parts
  };
  static constexpr std::size_t archive_offset(int size) { return static_cast<std::size_t>(size) * sizeof(Counter); }
  static constexpr std::size_t data_offset(int size) {
    const std::size_t end = archive_offset(size) + static_cast<std::size_t>(size) * sizeof(Archive);
    return (end + kPage - 1) / kPage * kPage;
  }

  // A place in each rank's part of the segment, and the tick with which this rank published its own last.
  struct Slot {
    std::size_t offset;
    std::uint64_t* used;
  };
  std::size_t slot_bytes_for(std::size_t bytes) const {
    return bytes <= tuning_.small_slot_bytes ? tuning_.small_slot_bytes : tuning_.large_slot_bytes;
  }
  Slot next_slot(std::size_t bytes);
  Slot large_slot(std::uint64_t count);
  char* place(int rank, Slot slot) const { return data_ + rank * rank_bytes(tuning_) + slot.offset; }

  static constexpr std::uint64_t kPrivate = Windows::kOutside;
  struct Inputs {
    const char* at[kMaxRanks];    // of those that are shared
    int shared = 0;               // how many are
    std::uint64_t is_shared = 0;  // by rank, a bit each
    const char* of(int rank, const char* otherwise) const {
      return (is_shared >> rank & 1) != 0 ? at[rank] : otherwise;
    }
  };
  std::uint64_t offer(const void* in, std::size_t in_bytes, const void* out, std::size_t out_bytes);
  Status hear(Inputs& inputs, std::uint64_t tick, std::uint64_t own_flag, std::size_t bytes);
  Status close(std::uint64_t call);
  Status look_up(int rank, const std::atomic<std::uint64_t>& at, std::size_t bytes, const char** found);
  Status reduce_shared(void* out, const Inputs& inputs, std::size_t count, Dtype dtype, ReduceOp op,
                       std::uint64_t call);
  Status reduce_all(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op, std::uint64_t call);

  Status one_shot_all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op,
                             std::uint64_t call);
  Status large_all_reduce(char* out, const char* in, std::size_t count, Dtype dtype, ReduceOp op, std::uint64_t call);
  int last_of_all() const;
  Status chained_all_reduce(char* out, const char* in, std::size_t count, Dtype dtype, ReduceOp op, std::uint64_t call);

  // Counts bytes that are read where `rank` has written them.
  void note_read(int rank, std::size_t bytes) {
    if (area_ranks_ != 0 && rank / area_ranks_ != rank_ / area_ranks_) crossed_bytes_ += bytes;
  }

  static constexpr std::size_t rank_bytes(const Tuning& tuning) {
    return kSmallSlots * tuning.small_slot_bytes + kLargeSlots * tuning.large_slot_bytes;
  }

  Counter* lines_;  // one per rank: its tick, and what it does there
  Archive* archives_;
  char* data_;
  const Tuning tuning_;
  WaitPolicy policy_;
  const GroupLiveness& liveness_;
  std::uint64_t tick_ = 0;         // the last one that this rank published
  std::uint64_t all_reached_ = 0;  // a tick that all others are known to have published
  std::uint64_t small_used_[kSmallSlots] = {};
  std::uint64_t large_used_[kLargeSlots] = {};
  std::uint64_t small_count_ = 0;
  std::uint64_t large_count_ = 0;
  int area_ranks_ = 0;  // of each area; 0: there are none
  std::size_t chain_bytes_ = 0;
  std::uint64_t crossed_bytes_ = 0;
  Windows* arenas_[kMaxRanks] = {};
  bool has_arenas_ = false;
  Deadline deadline_;
  std::uint64_t history_ = 0;        // a digest of all calls so far
  std::uint64_t parts_ = 0;          // of the call, as the archive has them
  std::vector<std::uint64_t> rows_;  // of an all_to_all: what each rank sends and expects
  bool is_part_ = false;
};

}  // namespace parallel_state
