#include "group.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace parallel_state {
namespace {

enum class Kind : std::uint64_t {
  kBarrier = 1, kAllReduce, kReduceScatter, kAllGather, kGatherv, kBroadcast, kScatter, kAllToAll
};

// operation (8 bits), dtype (4), reduction (4), size (48): readable in an error of another rank.
std::uint64_t call_of(Kind kind, std::size_t size, Dtype dtype = Dtype::kUint8, ReduceOp op = ReduceOp::kSum) {
  return (static_cast<std::uint64_t>(kind) << 56) | (static_cast<std::uint64_t>(dtype) << 52) |
         (static_cast<std::uint64_t>(op) << 48) | (static_cast<std::uint64_t>(size) & 0xffff'ffff'ffffULL);
}

}  // namespace

ProcessLiveness::ProcessLiveness(const std::int64_t* pids, int count) {
  for (int rank = 0; rank < count; ++rank) {
    // A pid of another namespace can't be watched: its death is then only noticed at the deadline.
    pidfds_.push_back(pids[rank] > 0 ? static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pids[rank]), 0)) : -1);
  }
}

ProcessLiveness::~ProcessLiveness() {
  for (const int pidfd : pidfds_) {
    if (pidfd >= 0) close(pidfd);
  }
}

bool ProcessLiveness::is_alive(int rank) const {
  if (pidfds_[rank] < 0) return true;
  pollfd poll_one{pidfds_[rank], POLLIN, 0};
  return poll(&poll_one, 1, 0) <= 0;
}

Group::Group(void* segment, int rank, int size, const std::int64_t* pids, WaitPolicy policy)
    : lines_(static_cast<Counter*>(segment)),
      data_(static_cast<char*>(segment) + static_cast<std::size_t>(size) * sizeof(Counter)),
      rank_(rank),
      size_(size),
      policy_(policy),
      liveness_(pids, size) {}

std::size_t Group::segment_bytes(int size) {
  return static_cast<std::size_t>(size) * (sizeof(Counter) + kRankBytes);
}

void Group::begin(double timeout_s) {
  deadline_ns_ = now_ns() + static_cast<std::int64_t>(timeout_s * 1e9);
  suspect_ = -1;
}

std::uint64_t Group::publish(std::uint64_t call) {
  lines_[rank_].publish(++tick_, call);
  return tick_;
}

Status Group::wait_one(int rank, std::uint64_t tick, std::uint64_t call) {
  const WaitResult result = wait_for(lines_[rank], tick, policy_, deadline_ns_, liveness_, rank);
  if (result != WaitResult::kReached) {
    suspect_ = rank;
    return result == WaitResult::kTimedOut ? Status::kTimedOut : Status::kPeerDied;
  }
  if (call != 0 && lines_[rank].differs(tick, call, &found_)) {
    suspect_ = rank;
    expected_ = call;
    return Status::kMismatch;
  }
  return Status::kDone;
}

Status Group::wait_all(std::uint64_t tick, std::uint64_t call) {
  for (int step = 1; step < size_; ++step) {
    const Status status = wait_one((rank_ + step) % size_, tick, call);
    if (status != Status::kDone) return status;
  }
  all_reached_ = std::max(all_reached_, tick);
  return Status::kDone;
}

// Waits until nobody reads any more what was published with `tick`.
Status Group::reuse(std::uint64_t tick) {
  return tick == 0 || all_reached_ > tick ? Status::kDone : wait_all(tick + 1, 0);
}

#define RETURN_IF_FAILED(expression)                  \
  do {                                                \
    const Status status_ = (expression);              \
    if (status_ != Status::kDone) return status_;     \
  } while (false)

Status Group::barrier(double timeout_s) {
  begin(timeout_s);
  const std::uint64_t call = call_of(Kind::kBarrier, 0);
  return wait_all(publish(call), call);
}

// Moves `bytes` per rank through slots, in as many exchanges as it takes. In each, `write(slot, start, length)` fills this
// rank's slot, or doesn't; then `read(rank, slot, start, length)` takes another rank's, of those that `wanted(rank)`.
template <typename Write, typename Wanted, typename Read>
Status Group::move(std::size_t bytes, std::uint64_t call, Write write, Wanted wanted, Read read) {
  const bool small = bytes <= kSmallSlotBytes;
  const std::size_t slot_bytes = small ? kSmallSlotBytes : kLargeSlotBytes;
  for (std::size_t start = 0; start < bytes; start += slot_bytes) {
    const std::size_t length = std::min(slot_bytes, bytes - start);
    const std::size_t slot = small ? small_count_++ % kSmallSlots : large_count_++ % kLargeSlots;
    const std::size_t offset = small ? slot * kSmallSlotBytes : kSmallSlots * kSmallSlotBytes + slot * kLargeSlotBytes;
    std::uint64_t& used = small ? small_used_[slot] : large_used_[slot];
    RETURN_IF_FAILED(reuse(used));
    write(data_ + rank_ * kRankBytes + offset, start, length);
    used = publish(call);
    const std::uint64_t tick = used;
    bool all = true;
    for (int step = 1; step < size_; ++step) {
      const int rank = (rank_ + step) % size_;
      if (!wanted(rank)) {
        all = false;
        continue;
      }
      RETURN_IF_FAILED(wait_one(rank, tick, call));
      read(rank, data_ + rank * kRankBytes + offset, start, length);
    }
    if (all) all_reached_ = std::max(all_reached_, tick);
  }
  return Status::kDone;
}

Status Group::small_all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op,
                               std::uint64_t call) {
  const std::size_t bytes = count * size_of(dtype);
  const int slot = static_cast<int>(small_count_++ % kSmallSlots);
  const std::size_t offset = slot * kSmallSlotBytes;
  RETURN_IF_FAILED(reuse(small_used_[slot]));
  std::memcpy(data_ + rank_ * kRankBytes + offset, in, bytes);
  small_used_[slot] = publish(call);
  RETURN_IF_FAILED(wait_all(small_used_[slot], call));
  const void* sources[kMaxRanks];
  for (int rank = 0; rank < size_; ++rank) sources[rank] = data_ + rank * kRankBytes + offset;
  reduce_function(dtype, op)(out, sources, size_, count);
  return Status::kDone;
}

// Chunk c: (A) write the others' slices into one's slot; (B) reduce one's own slice from all slots into one's slot and
// the output; (C) copy the others' reduced slices from theirs. Three chunks are under way at a time: step i does B of
// chunk i-1, A of chunk i, C of chunk i-2, in this order. Before A of chunk c + 4 all others have published A of c + 3
// (that B waits for it), so they have done step c + 2 with C of chunk c: four slots are enough.
Status Group::large_all_reduce(char* out, const char* in, std::size_t count, Dtype dtype, ReduceOp op,
                               std::uint64_t call) {
  const std::size_t width = size_of(dtype);
  // Slices of whole cache lines; the last chunk is shorter, and its last slices may be empty.
  const std::size_t slice = kLargeSlotBytes / width / size_ / 64 * 64;
  const std::size_t chunk = slice * size_;
  const std::size_t chunks = (count + chunk - 1) / chunk;
  const ReduceFunction reduce = reduce_function(dtype, op);
  std::uint64_t written[4] = {}, reduced[4] = {};
  const auto length = [&](std::size_t index, int rank) {  // of a rank's slice in a chunk
    const std::size_t start = index * chunk + rank * slice;
    return start >= count ? 0 : std::min(slice, count - start);
  };
  const auto place = [&](int owner, std::size_t index, int rank) {  // where `owner`'s slot has `rank`'s slice
    return data_ + owner * kRankBytes + kSmallSlots * kSmallSlotBytes +
           (large_count_ + index) % kLargeSlots * kLargeSlotBytes + rank * slice * width;
  };
  for (std::size_t step = 0; step < chunks + 2; ++step) {
    if (step >= 1 && step <= chunks) {
      const std::size_t index = step - 1;
      const std::size_t mine = length(index, rank_);
      char* own = out + (index * chunk + rank_ * slice) * width;
      RETURN_IF_FAILED(wait_all(written[index % 4], call));
      if (mine != 0) {
        const void* sources[kMaxRanks];
        for (int rank = 0; rank < size_; ++rank) sources[rank] = place(rank, index, rank_);
        sources[rank_] = in + (index * chunk + rank_ * slice) * width;
        reduce(own, sources, size_, mine);
        std::memcpy(place(rank_, index, rank_), own, mine * width);
      }
      reduced[index % 4] = publish(call);
    }
    if (step < chunks) {
      const std::size_t slot = (large_count_ + step) % kLargeSlots;
      if (step < kLargeSlots) RETURN_IF_FAILED(reuse(large_used_[slot]));
      for (int rank = 0; rank < size_; ++rank) {
        const std::size_t theirs = length(step, rank);
        if (rank != rank_ && theirs != 0) {
          std::memcpy(place(rank_, step, rank), in + (step * chunk + rank * slice) * width, theirs * width);
        }
      }
      written[step % 4] = publish(call);
    }
    if (step >= 2) {
      const std::size_t index = step - 2;
      RETURN_IF_FAILED(wait_all(reduced[index % 4], call));
      for (int offset = 1; offset < size_; ++offset) {
        const int rank = (rank_ + offset) % size_;
        const std::size_t theirs = length(index, rank);
        if (theirs != 0) {
          std::memcpy(out + (index * chunk + rank * slice) * width, place(rank, index, rank), theirs * width);
        }
      }
    }
  }
  // The others have read chunk c when they publish A of chunk c + 3, or, of the last three, anything after this.
  const std::uint64_t last = tick_;
  for (std::size_t back = 0; back < std::min<std::size_t>(chunks, kLargeSlots); ++back) {
    const std::size_t index = chunks - 1 - back;
    large_used_[(large_count_ + index) % kLargeSlots] = back < 3 ? last : last - 2;
  }
  large_count_ += chunks;
  return Status::kDone;
}

Status Group::all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op, double timeout_s) {
  begin(timeout_s);
  const std::uint64_t call = call_of(Kind::kAllReduce, count, dtype, op);
  if (count * size_of(dtype) <= kSmallSlotBytes) return small_all_reduce(out, in, count, dtype, op, call);
  return large_all_reduce(static_cast<char*>(out), static_cast<const char*>(in), count, dtype, op, call);
}

namespace {

// Copies bytes [start, start + length) of rows of `row_bytes` to rows that lie `stride_bytes` apart.
void copy_rows(char* out, std::size_t row_bytes, std::size_t stride_bytes, const char* in, std::size_t start,
               std::size_t length) {
  while (length != 0) {
    const std::size_t row = start / row_bytes, column = start % row_bytes;
    const std::size_t piece = std::min(length, row_bytes - column);
    std::memcpy(out + row * stride_bytes + column, in, piece);
    in += piece;
    start += piece;
    length -= piece;
  }
}

// The reverse: from rows that lie `stride_bytes` apart.
void collect_rows(char* out, const char* in, std::size_t row_bytes, std::size_t stride_bytes, std::size_t start,
                  std::size_t length) {
  while (length != 0) {
    const std::size_t row = start / row_bytes, column = start % row_bytes;
    const std::size_t piece = std::min(length, row_bytes - column);
    std::memcpy(out, in + row * stride_bytes + column, piece);
    out += piece;
    start += piece;
    length -= piece;
  }
}

constexpr auto kEveryone = [](int) { return true; };

}  // namespace

Status Group::all_gather(void* out, const void* in, std::size_t outer, std::size_t inner_bytes, double timeout_s) {
  begin(timeout_s);
  const auto* source = static_cast<const char*>(in);
  auto* rows = static_cast<char*>(out);
  const std::size_t stride = size_ * inner_bytes;
  return move(
      outer * inner_bytes, call_of(Kind::kAllGather, outer * inner_bytes),
      [&](char* slot, std::size_t start, std::size_t length) {
        std::memcpy(slot, source + start, length);
        copy_rows(rows + rank_ * inner_bytes, inner_bytes, stride, source + start, start, length);
      },
      kEveryone,
      [&](int rank, const char* slot, std::size_t start, std::size_t length) {
        copy_rows(rows + rank * inner_bytes, inner_bytes, stride, slot, start, length);
      });
}

Status Group::gatherv(void* const* outs, const std::size_t* bytes, const void* in, double timeout_s) {
  begin(timeout_s);
  const std::size_t longest = *std::max_element(bytes, bytes + size_);
  const auto part = [&](int rank, std::size_t start, std::size_t length) {
    return start >= bytes[rank] ? 0 : std::min(length, bytes[rank] - start);
  };
  return move(
      longest, call_of(Kind::kGatherv, longest),
      [&](char* slot, std::size_t start, std::size_t length) {
        std::memcpy(slot, static_cast<const char*>(in) + start, part(rank_, start, length));
      },
      [&](int rank) { return outs[rank] != nullptr; },
      [&](int rank, const char* slot, std::size_t start, std::size_t length) {
        std::memcpy(static_cast<char*>(outs[rank]) + start, slot, part(rank, start, length));
      });
}

Status Group::broadcast(void* data, std::size_t bytes, int src, double timeout_s) {
  begin(timeout_s);
  auto* flat = static_cast<char*>(data);
  return move(
      bytes, call_of(Kind::kBroadcast, bytes) ^ (static_cast<std::uint64_t>(src) << 48),
      [&](char* slot, std::size_t start, std::size_t length) {
        if (rank_ == src) std::memcpy(slot, flat + start, length);
      },
      [&](int rank) { return rank_ != src && rank == src; },
      [&](int, const char* slot, std::size_t start, std::size_t length) { std::memcpy(flat + start, slot, length); });
}

Status Group::scatter(void* out, const void* in, std::size_t bytes, int src, double timeout_s) {
  begin(timeout_s);
  // A slot holds a piece of every rank's block, side by side.
  const std::size_t slot_bytes = bytes * size_ <= kSmallSlotBytes ? kSmallSlotBytes : kLargeSlotBytes;
  const std::size_t piece = std::min(bytes, slot_bytes / size_);
  const std::uint64_t call = call_of(Kind::kScatter, bytes) ^ (static_cast<std::uint64_t>(src) << 48);
  for (std::size_t start = 0; start < bytes; start += piece) {
    const std::size_t length = std::min(piece, bytes - start);
    RETURN_IF_FAILED(move(
        piece * size_, call,
        [&](char* slot, std::size_t, std::size_t) {
          if (rank_ != src) return;
          for (int rank = 0; rank < size_; ++rank) {
            std::memcpy(slot + rank * piece, static_cast<const char*>(in) + rank * bytes + start, length);
          }
        },
        [&](int rank) { return rank_ != src && rank == src; },
        [&](int, const char* slot, std::size_t, std::size_t) {
          std::memcpy(static_cast<char*>(out) + start, slot + rank_ * piece, length);
        }));
  }
  if (rank_ == src && bytes != 0) std::memcpy(out, static_cast<const char*>(in) + rank_ * bytes, bytes);
  return Status::kDone;
}

Status Group::reduce_scatter(void* out, const void* in, std::size_t outer, std::size_t inner, Dtype dtype, ReduceOp op,
                             double timeout_s) {
  begin(timeout_s);
  const std::size_t width = size_of(dtype), row = inner * width, stride = row * size_;
  const std::size_t bytes = outer * row;  // of a slice
  const std::size_t slot_bytes = bytes * size_ <= kSmallSlotBytes ? kSmallSlotBytes : kLargeSlotBytes;
  const std::size_t piece = std::min(bytes, slot_bytes / size_ / 64 * 64);
  const ReduceFunction reduce = reduce_function(dtype, op);
  const std::uint64_t call = call_of(Kind::kReduceScatter, outer * inner, dtype, op);
  const void* sources[kMaxRanks];
  for (std::size_t start = 0; start < bytes; start += piece) {
    const std::size_t length = std::min(piece, bytes - start);
    RETURN_IF_FAILED(move(
        piece * size_, call,
        [&](char* slot, std::size_t, std::size_t) {
          for (int rank = 0; rank < size_; ++rank) {
            collect_rows(slot + rank * piece, static_cast<const char*>(in) + rank * row, row, stride, start, length);
          }
          sources[rank_] = slot + rank_ * piece;
        },
        kEveryone,
        [&](int rank, const char* slot, std::size_t, std::size_t) { sources[rank] = slot + rank_ * piece; }));
    // Nobody writes these slots before this rank publishes again.
    reduce(static_cast<char*>(out) + start, sources, size_, length / width);
  }
  return Status::kDone;
}

Status Group::all_to_all(void* out, const void* in, const std::size_t* out_bytes, const std::size_t* in_bytes,
                         double timeout_s) {
  begin(timeout_s);
  // Each rank knows its own blocks only: the longest of all says how many exchanges there are.
  std::uint64_t longest = *std::max_element(in_bytes, in_bytes + size_);
  const std::uint64_t own = longest;
  RETURN_IF_FAILED(move(
      sizeof own, call_of(Kind::kAllToAll, 0),
      [&](char* slot, std::size_t, std::size_t) { std::memcpy(slot, &own, sizeof own); }, kEveryone,
      [&](int, const char* slot, std::size_t, std::size_t) {
        std::uint64_t theirs;
        std::memcpy(&theirs, slot, sizeof theirs);
        longest = std::max(longest, theirs);
      }));
  const std::size_t slot_bytes = longest * size_ <= kSmallSlotBytes ? kSmallSlotBytes : kLargeSlotBytes;
  const std::size_t piece = std::min<std::size_t>(longest, slot_bytes / size_);
  std::size_t in_start[kMaxRanks], out_start[kMaxRanks];
  for (int rank = 0; rank < size_; ++rank) {
    in_start[rank] = rank == 0 ? 0 : in_start[rank - 1] + in_bytes[rank - 1];
    out_start[rank] = rank == 0 ? 0 : out_start[rank - 1] + out_bytes[rank - 1];
  }
  const auto part = [&](std::size_t bytes, std::size_t start) {
    return start >= bytes ? 0 : std::min(piece, bytes - start);
  };
  for (std::size_t start = 0; start < longest; start += piece) {
    RETURN_IF_FAILED(move(
        piece * size_, call_of(Kind::kAllToAll, longest),
        [&](char* slot, std::size_t, std::size_t) {
          for (int rank = 0; rank < size_; ++rank) {
            const std::size_t length = part(in_bytes[rank], start);
            if (rank != rank_ && length != 0) {
              std::memcpy(slot + rank * piece, static_cast<const char*>(in) + in_start[rank] + start, length);
            }
          }
        },
        kEveryone,
        [&](int rank, const char* slot, std::size_t, std::size_t) {
          const std::size_t length = part(out_bytes[rank], start);
          if (length != 0) std::memcpy(static_cast<char*>(out) + out_start[rank] + start, slot + rank_ * piece, length);
        }));
  }
  const std::size_t mine = std::min(in_bytes[rank_], out_bytes[rank_]);
  if (mine != 0) {
    std::memcpy(static_cast<char*>(out) + out_start[rank_], static_cast<const char*>(in) + in_start[rank_], mine);
  }
  return Status::kDone;
}

}  // namespace parallel_state
