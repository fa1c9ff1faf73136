// The caller keeps all memory until the call returns. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "block_sizes.h"
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
  kFailed = 7,
  kBusy = 8,
  kUnmapped = 9,
  kBroken = 10,
  kTooLarge = 11,
  kWrongArgument = 12,
  kUnreachable = 13  // the suspect receives nothing from this host
};

// residual_out = sum of `in` over the ranks + residual; out = rms_norm(residual_out) * weight. The sum is rounded to
// the dtype, added in float32 and rounded again; the norm is rounded once. `out` may be `in`, `residual_out` may be
// `residual`.
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

void add_and_norm(const AddRmsNorm& norm, std::size_t first_row, std::size_t rows);

struct Shown {
  Told told;
  std::uint64_t parts[kMaxRanks] = {};
  int count = 0;
};

// Also the body of a kFailure message between hosts.
struct FailureNote {
  int status = 0;     // a Status
  int suspect = -1;   // kOutside: a rank outside the group
  int reporter = -1;  // -1: this rank detected the failure
  Misfit misfit;
  Shown expected, found;
};

class Group {
 public:
  Group(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  void tell(Told told) { told_ = told; }

  // All ranks make each call, in the same order. Calls of size zero are compared, too.
  virtual Status barrier(double timeout_s) = 0;
  virtual Status all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op,
                            double timeout_s) = 0;
  // `in` is [outer, size, inner], `out` [outer, inner].
  virtual Status reduce_scatter(void* out, const void* in, std::size_t outer, std::size_t inner, Dtype dtype,
                                ReduceOp op, double timeout_s) = 0;
  // `in` is [outer, inner_bytes], `out` [outer, size, inner_bytes].
  virtual Status all_gather(void* out, const void* in, std::size_t outer, std::size_t inner_bytes,
                            double timeout_s) = 0;
  // Writes rank r's bytes[r] to `outs[r]` on rank `dst`, or on all ranks (-1). Other ranks pass null `outs[r]`. The
  // caller copies its own bytes.
  virtual Status gatherv(void* const* outs, const std::size_t* bytes, const void* in, int dst, double timeout_s) = 0;
  virtual Status broadcast(void* data, std::size_t bytes, int src, double timeout_s) = 0;
  virtual Status scatter(void* out, const void* in, std::size_t bytes, int src, double timeout_s) = 0;
  virtual Status all_to_all(void* out, const void* in, const std::size_t* out_bytes, const std::size_t* in_bytes,
                            double timeout_s) = 0;
  virtual Status all_reduce_add_rms_norm(const AddRmsNorm& norm, double timeout_s) = 0;

  // Consumes one tick, to order a broadcast message among collectives. `src` doesn't wait; others spin for `spin_ns`
  // until it has entered.
  virtual Status announce(int, double, std::int64_t) { return Status::kUnsupported; }

  virtual Status compare(double timeout_s) = 0;

  // Other hosts receive nothing more from this rank.
  virtual void give_up(Status) {}

  Status out_of_memory() {
    forget_failure();
    text_ = "this process has no memory left for the call";
    return Status::kBroken;
  }

  void measure(bool on) {
    measures_ = on;
    if (!on) return;
    waited_ns_ = 0;
    last_ = rank_;
  }
  std::int64_t waited_ns() const { return waited_ns_; }
  int last() const { return last_; }
  std::uint64_t method() const { return told_.word & 255; }

  const FailureNote& failure() const { return failure_; }
  const std::string& text() const { return text_; }

 protected:
  // Ranks whose calls differ have different histories from then on, also if one of them only sent.
  void make_record(Kind kind, std::uint64_t size, Method method, std::uint64_t digest, int reduction, int root) {
    forget_failure();
    if (told_.word == 0) told_ = told_of(method, std::array{size}, 0, reduction, -1, root);
    ++record_.sequence;
    record_.bytes = record_.sizes = 0;
    record_.earlier = std::exchange(record_.told, told_);
    record_.history = mixed(note_of_call(kind, told_, digest, reduction, root) + size + record_.history);
  }

  void forget_failure() {
    failure_.suspect = failure_.reporter = -1;
    failure_.misfit = {};
    text_.clear();
  }

  const int rank_;
  const int size_;
  Told told_;
  CallRecord record_;
  BlockSizes block_sizes_;  // of all_to_all
  FailureNote failure_;
  std::string text_;
  bool measures_ = false;
  std::int64_t waited_ns_ = 0;
  int last_ = 0;
};

}  // namespace parallel_state
