// The collectives of one group of ranks, whatever carries them: HostGroup within a host, HostsGroup over several.
//
// Ranks are positions in the group. Memory is the caller's, and needed until the call returns.
// Not thread-safe: one call at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "call.h"
#include "reduce.h"
#include "tuning.h"

namespace parallel_state {

enum class Status : int {
  kDone = 0,
  kTimedOut = 1,
  kPeerDied = 2,
  kMismatch = 3,
  kClosed = 4,
  kInterrupted = 5,
  kUnsupported = 6,
  kBusy = 8,
  kUnmapped = 9,
  kBroken = 10,   // a connection to another host failed: see Group::text
  kTooLarge = 11  // of broadcast_sized: the misfit has the bytes that were sent, and the most that may be
};

// residual_out = sum of `in` over the ranks + residual; out = rms_norm(residual_out) * weight. The sum is rounded to
// the dtype, added in float32 and rounded again; the norm is computed in float32 and rounded once. All are [rows,
// hidden], weight is [hidden], of one dtype, a float of 16 or 32 bits. `out` may be `in`, and `residual_out` may be
// `residual`; but for that they don't overlap.
struct AddRmsNorm {
  void* out;
  void* residual_out;
  const void* in;
  const void* residual;
  const void* weight;
  std::size_t rows;
  std::size_t hidden;
  float eps;
  Dtype dtype;
};

// Finishes `rows` rows from `first_row` on, whose sums are in `out`.
void add_and_norm(const AddRmsNorm& norm, std::size_t first_row, std::size_t rows);

// A call as errors show it: what was told, and the bytes of its parts where it has parts.
struct Shown {
  Told told;
  std::uint64_t parts[kMaxRanks] = {};
  int count = 0;
};

class Group {
 public:
  Group(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Sets what the next call is compared and shown as. Without it the call is shown as what it is.
  void tell(Told told) { told_ = told; }

  // All ranks make each call. Sizes may be zero: the ranks meet nonetheless, so that a rank with another size finds
  // out. Each call returns kDone, or what went wrong; `suspect()`, `expected()` and `found()` have the facts.
  virtual Status barrier(double timeout_s) = 0;
  // `out` may be `in`.
  virtual Status all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op,
                            double timeout_s) = 0;
  // Slice r of `in`, which is [outer, size, inner] elements, reduced over all ranks into rank r's [outer, inner].
  virtual Status reduce_scatter(void* out, const void* in, std::size_t outer, std::size_t inner, Dtype dtype,
                                ReduceOp op, double timeout_s) = 0;
  // `in` is [outer, inner_bytes]; `out` is [outer, size, inner_bytes].
  virtual Status all_gather(void* out, const void* in, std::size_t outer, std::size_t inner_bytes,
                            double timeout_s) = 0;
  // `outs[r]` receives rank r's bytes[r], on rank `dst` (null on the others), or on all ranks if `dst` is -1. Copying
  // this rank's own bytes is the caller's part.
  virtual Status gatherv(void* const* outs, const std::size_t* bytes, const void* in, int dst, double timeout_s) = 0;
  virtual Status broadcast(void* data, std::size_t bytes, int src, double timeout_s) = 0;
  // Broadcasts `bytes` of `src`, a number that other ranks don't know: they get memory of malloc, which is theirs.
  // kTooLarge on those if it is more than `most_bytes`.
  virtual Status broadcast_sized(const void* in, std::uint64_t bytes, int src, std::uint64_t most_bytes, void** out,
                                 std::uint64_t* out_bytes, double timeout_s) = 0;
  // `in` on `src` holds a block of `bytes` for each rank.
  virtual Status scatter(void* out, const void* in, std::size_t bytes, int src, double timeout_s) = 0;
  virtual Status all_to_all(void* out, const void* in, const std::size_t* out_bytes, const std::size_t* in_bytes,
                            double timeout_s) = 0;
  virtual Status all_reduce_add_rms_norm(const AddRmsNorm& norm, double timeout_s) = 0;

  // Takes the place of a message to all ranks among the calls, which is sent another way. `src` returns at once, others
  // once `src` is in the call. They spin for `spin_ns`, as for a message: `src` computes in between.
  virtual Status announce(int src, double timeout_s, std::int64_t spin_ns) = 0;

  // Returns kMismatch if a rank is known to have been in another call than this one.
  virtual Status compare(double timeout_s) = 0;

  // Tells the ranks of other hosts that a call failed with `status`, and why. They get no more from this rank.
  virtual void give_up(Status) {}

  // What a call that found no memory has failed with.
  Status out_of_memory() {
    forget_failure();
    text_ = "there is no memory for what the call needs";
    return Status::kBroken;
  }

  // Starts or stops timing the waits of the calls that follow. Of the last timed call: for how long this rank waited
  // for others, which rank came last (this one if it waited for none), and the number of its method.
  void measure(bool on) {
    measures_ = on;
    if (!on) return;
    waited_ns_ = 0;
    last_ = rank_;
  }
  std::int64_t waited_ns() const { return waited_ns_; }
  int last() const { return last_; }
  std::uint64_t method() const { return told_.word & 255; }

  // Of the last call that failed.
  int suspect() const { return suspect_; }    // kOutside: a rank outside of the group
  int reporter() const { return reporter_; }  // the rank that found out, if it is another one; else -1
  const Shown& expected() const { return expected_; }
  const Shown& found() const { return found_; }
  const Misfit& misfit() const { return misfit_; }
  const std::string& text() const { return text_; }  // what failed in a connection; else empty

 protected:
  void forget_failure() {
    suspect_ = reporter_ = -1;
    misfit_ = {};
    text_.clear();
  }

  const int rank_;
  const int size_;
  Told told_;
  int suspect_ = -1;
  int reporter_ = -1;
  Shown expected_;
  Shown found_;
  Misfit misfit_;
  std::string text_;
  bool measures_ = false;
  std::int64_t waited_ns_ = 0;
  int last_ = 0;
};

}  // namespace parallel_state
