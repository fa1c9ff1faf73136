// The collectives of one group of ranks on one host, over a segment of shared memory.
//
// The segment has a control line per rank, then each rank's small and large slots, page-aligned. A rank writes only its
// own. An exchange is one *tick*: a rank publishes the tick once its data is in its slot, and the others wait for that.
//
// A rank that has published tick t has finished all earlier exchanges. A slot is rewritten only when all others have
// entered an exchange after their last read of it.
//
// Peers compare a tick's digest of the call before they read any data. Not thread-safe. The caller owns the segment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
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
  // `segment` is zero before the first rank attaches. `liveness` must outlive the group.
  HostGroup(void* segment, int rank, int size, const GroupLiveness& liveness, WaitPolicy policy);

  static std::size_t segment_bytes(int size) { return slots_offset(size, size); }

  static std::size_t slots_offset(int size, int rank) {
    return data_offset(size) + static_cast<std::size_t>(rank) * rank_bytes(tuning_of(size));
  }

  // For the local part of a group over several hosts. A rank that only sends then doesn't compare calls: other hosts
  // may wait for it.
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
  Status scatter(void* out, const void* in, std::size_t bytes, int src, double timeout_s) override;
  Status all_to_all(void* out, const void* in, const std::size_t* out_bytes, const std::size_t* in_bytes,
                    double timeout_s) override;
  Status all_reduce_add_rms_norm(const AddRmsNorm& norm, double timeout_s) override;
  Status announce(int src, double timeout_s, std::int64_t spin_ns) override;
  Status compare(double timeout_s) override;

  Status scatter_reduced(void* out, const void* in, std::size_t outer, std::size_t inner, Dtype dtype, ReduceOp op,
                         bool wide, double timeout_s);
  // Into rank 0's `out`. Other ranks don't wait.
  Status reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op, bool wide, double timeout_s);

  // Only `src` knows the size. `room` may return null, which fails the call with kTooLarge.
  Status broadcast_sized(const void* in, std::uint64_t bytes, int src, const std::function<char*(std::uint64_t)>& room,
                         double timeout_s);

  // Consumes one tick. Waits only for ranks that are some 60 ticks behind.
  Status pass(double timeout_s);

  // Lets ranks read inputs in place in their owners' arenas, which outlive the group. A rank that can't map an input
  // fails the call with kUnmapped.
  void set_arenas(const std::vector<std::unique_ptr<Windows>>& arenas);

  // Areas of `ranks` consecutive ranks. Reductions of `from_bytes` and more (negative: the tuned size) go from area to
  // area. Equal on all ranks, before the first call.
  void set_areas(int ranks, std::int64_t from_bytes);

  std::uint64_t crossed_bytes() const { return crossed_bytes_; }

  void set_side_work(SideWork* side_work) { policy_.side_work = side_work; }

 private:
  template <typename Write, typename Wanted, typename Read>
  Status move(std::size_t bytes, Write write, Wanted wanted, Read read);
  Status reuse(std::uint64_t tick);
  Status wait_one(int rank, std::uint64_t tick, bool compares = true);
  WaitResult measured_wait(int rank, std::uint64_t tick);
  Status look(std::uint64_t tick);
  bool differs(int rank, std::uint64_t tick);
  bool in_another_call();
  bool remember(int rank, std::uint64_t tick);
  Status wait_all(std::uint64_t tick, bool compares = true);
  Status wait_ranks(int begin, int end, std::uint64_t tick, bool compares = true);
  std::uint64_t own_note() const { return record_.history & ~Counter::kFlag; }
  std::uint64_t publish(std::uint64_t flag = 0) { return publish_as(own_note() | flag); }
  std::uint64_t publish_as(std::uint64_t note);
  void begin(Kind kind, std::uint64_t size, Method method, double timeout_s, std::uint64_t digest = 0,
             int reduction = -1, int root = -1);
  void tell_parts(const std::size_t* bytes);

  // A record is written before its tick is published.
  static constexpr std::uint64_t kKept = 64;
  class SharedRecord {
   public:
    void store(const CallRecord& record);
    CallRecord load() const;

   private:
    static constexpr std::size_t kWords = sizeof(CallRecord) / sizeof(std::uint64_t);
    std::atomic<std::uint64_t> words_[kWords];
  };
  struct alignas(128) Archive {
    SharedRecord records[kKept];
    std::atomic<std::uint64_t> part_bytes[kMaxRanks];
  };
  CallRecord record_of(int rank, std::uint64_t tick) const { return archives_[rank].records[tick % kKept].load(); }
  static constexpr std::size_t archive_offset(int size) { return static_cast<std::size_t>(size) * sizeof(Counter); }
  static constexpr std::size_t data_offset(int size) {
    const std::size_t end = archive_offset(size) + static_cast<std::size_t>(size) * sizeof(Archive);
    return (end + kPage - 1) / kPage * kPage;
  }

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
    const char* at[kMaxRanks];
    int shared = 0;
    std::uint64_t is_shared = 0;
    const char* of(int rank, const char* otherwise) const {
      return (is_shared >> rank & 1) != 0 ? at[rank] : otherwise;
    }
  };
  std::uint64_t offer(const void* in, std::size_t in_bytes, const void* out, std::size_t out_bytes);
  Status hear(Inputs& inputs, std::uint64_t tick, std::uint64_t own_flag, std::size_t bytes);
  Status close();
  Status look_up(int rank, const std::atomic<std::uint64_t>& at, std::size_t bytes, const char** found);
  Status reduce_shared(void* out, const Inputs& inputs, std::size_t count, Dtype dtype, ReduceOp op);
  Status reduce_all(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op);

  Status one_shot_all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op);
  Status large_all_reduce(char* out, const char* in, std::size_t count, Dtype dtype, ReduceOp op);
  int last_of_all() const;
  Status chained_all_reduce(char* out, const char* in, std::size_t count, Dtype dtype, ReduceOp op);

  void note_read(int rank, std::size_t bytes) {
    if (area_ranks_ != 0 && rank / area_ranks_ != rank_ / area_ranks_) crossed_bytes_ += bytes;
  }

  static constexpr std::size_t rank_bytes(const Tuning& tuning) {
    return kSmallSlots * tuning.small_slot_bytes + kLargeSlots * tuning.large_slot_bytes;
  }

  Counter* lines_;
  Archive* archives_;
  char* data_;
  const Tuning tuning_;
  WaitPolicy policy_;
  const GroupLiveness& liveness_;
  std::uint64_t tick_ = 0;         // last published
  std::uint64_t all_reached_ = 0;  // all others have published it
  std::uint64_t small_used_[kSmallSlots] = {};
  std::uint64_t large_used_[kLargeSlots] = {};
  std::uint64_t small_count_ = 0;
  std::uint64_t large_count_ = 0;
  int area_ranks_ = 0;  // 0: no areas
  std::size_t chain_bytes_ = 0;
  std::uint64_t crossed_bytes_ = 0;
  Windows* arenas_[kMaxRanks] = {};
  bool has_arenas_ = false;
  Deadline deadline_;
  bool is_part_ = false;
};

}  // namespace parallel_state
