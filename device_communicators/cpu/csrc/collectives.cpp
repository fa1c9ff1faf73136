#include "host_group.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "rows.h"

namespace parallel_state {
namespace {

// Zero bytes are one piece, so that ranks compare their calls.
inline bool more(std::size_t start, std::size_t bytes) { return start < bytes || (start == 0 && bytes == 0); }

constexpr auto kEveryone = [](int) { return true; };

}  // namespace

template <typename Write, typename Wanted, typename Read>
Status HostGroup::move(std::size_t bytes, Write write, Wanted wanted, Read read) {
  const std::size_t slot_bytes = slot_bytes_for(bytes);
  for (std::size_t start = 0; more(start, bytes); start += slot_bytes) {
    const std::size_t length = std::min(slot_bytes, bytes - start);
    const Slot slot = next_slot(length);
    RETURN_IF_FAILED(reuse(*slot.used));
    write(place(rank_, slot), start, length);
    const std::uint64_t tick = *slot.used = publish();
    int heard = 0;
    for (int step = 1; step < size_; ++step) {
      const int rank = (rank_ + step) % size_;
      if (!wanted(rank)) continue;
      ++heard;
      RETURN_IF_FAILED(wait_one(rank, tick));
      read(rank, place(rank, slot), start, length);
    }
    if (heard == size_ - 1) all_reached_ = std::max(all_reached_, tick);
    if (heard == 0 && start == 0) RETURN_IF_FAILED(look(tick));
  }
  return Status::kDone;
}

Status HostGroup::all_gather(void* out, const void* in, std::size_t outer, std::size_t inner_bytes, double timeout_s) {
  const auto* source = static_cast<const char*>(in);
  auto* rows = static_cast<char*>(out);
  const std::size_t stride = size_ * inner_bytes, bytes = outer * inner_bytes, slot_bytes = slot_bytes_for(bytes);
  begin(Kind::kAllGather, bytes, Method::kAllGather, timeout_s);
  const std::uint64_t flag = offer(in, bytes, nullptr, 0);
  Inputs inputs;
  for (std::size_t start = 0; more(start, bytes); start += slot_bytes) {
    const std::size_t length = std::min(slot_bytes, bytes - start);
    const Slot slot = next_slot(length);
    RETURN_IF_FAILED(reuse(*slot.used));
    if (flag == 0) copy(place(rank_, slot), source + start, length);
    const std::uint64_t tick = *slot.used = publish(flag);
    copy_rows(rows + rank_ * inner_bytes, inner_bytes, stride, source + start, start, length);
    RETURN_IF_FAILED(wait_all(tick));
    if (start == 0) RETURN_IF_FAILED(hear(inputs, tick, flag, bytes));
    for (int step = 1; step < size_; ++step) {
      const int rank = (rank_ + step) % size_;
      const bool is_shared = (inputs.is_shared >> rank & 1) != 0;
      const char* const theirs = is_shared ? inputs.at[rank] + start : place(rank, slot);
      copy_rows(rows + rank * inner_bytes, inner_bytes, stride, theirs, start, length);
    }
  }
  return inputs.shared == 0 ? Status::kDone : close();
}

Status HostGroup::gatherv(void* const* outs, const std::size_t* bytes, const void* in, int, double timeout_s) {
  const std::size_t longest = *std::max_element(bytes, bytes + size_);
  const auto part = [&](int rank, std::size_t start, std::size_t length) {
    return start >= bytes[rank] ? 0 : std::min(length, bytes[rank] - start);
  };
  begin(Kind::kGatherv, longest, Method::kNone, timeout_s, digest_of(bytes, size_));
  tell_parts(bytes);
  return move(
      longest,
      [&](char* slot, std::size_t start, std::size_t length) {
        copy(slot, static_cast<const char*>(in) + start, part(rank_, start, length));
      },
      [&](int rank) { return outs[rank] != nullptr; },
      [&](int rank, const char* slot, std::size_t start, std::size_t length) {
        copy(static_cast<char*>(outs[rank]) + start, slot, part(rank, start, length));
      });
}

Status HostGroup::broadcast(void* data, std::size_t bytes, int src, double timeout_s) {
  auto* flat = static_cast<char*>(data);
  begin(Kind::kBroadcast, bytes, Method::kBroadcast, timeout_s, 0, -1, src);
  const std::uint64_t flag = rank_ == src ? offer(data, bytes, nullptr, 0) : 0;
  const std::size_t slot_bytes = slot_bytes_for(bytes);
  for (std::size_t start = 0; more(start, bytes); start += slot_bytes) {
    const std::size_t length = std::min(slot_bytes, bytes - start);
    const Slot slot = next_slot(length);
    RETURN_IF_FAILED(reuse(*slot.used));
    if (rank_ == src && flag == 0) copy(place(rank_, slot), flat + start, length);
    const std::uint64_t tick = *slot.used = publish(flag);
    if (flag != 0) return close();
    if (rank_ == src) {
      if (start == 0) RETURN_IF_FAILED(look(tick));
      continue;
    }
    RETURN_IF_FAILED(wait_one(src, tick));
    if (start == 0 && has_arenas_ && lines_[src].flagged(tick)) {
      const char* theirs;
      RETURN_IF_FAILED(look_up(src, lines_[src].in_at, bytes, &theirs));
      copy(flat, theirs, bytes);
      publish();
      return Status::kDone;
    }
    copy(flat + start, place(src, slot), length);
  }
  return Status::kDone;
}

Status HostGroup::scatter(void* out, const void* in, std::size_t bytes, int src, double timeout_s) {
  const std::size_t slot_bytes = slot_bytes_for(bytes * size_);
  const std::size_t piece = std::clamp<std::size_t>(bytes, 1, slot_bytes / size_);
  begin(Kind::kScatter, bytes, Method::kNone, timeout_s, 0, -1, src);
  for (std::size_t start = 0; more(start, bytes); start += piece) {
    const std::size_t length = std::min(piece, bytes - start);
    RETURN_IF_FAILED(move(
        piece * size_,
        [&](char* slot, std::size_t, std::size_t) {
          if (rank_ != src) return;
          for (int rank = 0; rank < size_; ++rank) {
            copy(slot + rank * piece, static_cast<const char*>(in) + rank * bytes + start, length);
          }
        },
        [&](int rank) { return rank_ != src && rank == src; },
        [&](int, const char* slot, std::size_t, std::size_t) {
          copy(static_cast<char*>(out) + start, slot + rank_ * piece, length);
        }));
  }
  if (rank_ == src && bytes != 0) copy(out, static_cast<const char*>(in) + rank_ * bytes, bytes);
  return Status::kDone;
}

Status HostGroup::scatter_reduced(void* out, const void* in, std::size_t outer, std::size_t inner, Dtype dtype,
                                  ReduceOp op, bool wide, double timeout_s) {
  const std::size_t width = size_of(dtype), row = inner * width, stride = row * size_;
  const std::size_t bytes = outer * row;
  const std::size_t piece = std::clamp<std::size_t>(bytes, 1, slot_bytes_for(bytes * size_) / size_ / 64 * 64);
  const ReduceFunction reduce = reduce_function(dtype, op);
  const PartFunction reduce_part = part_function(dtype, op);
  const std::uint64_t digest = static_cast<std::uint64_t>(dtype) << 1 | static_cast<std::uint64_t>(wide);
  begin(Kind::kReduceScatter, outer * inner, Method::kReduceScatter, timeout_s, digest, static_cast<int>(op));
  const std::uint64_t flag = outer == 1 ? offer(in, stride, nullptr, 0) : 0;
  const auto* source = static_cast<const char*>(in);
  Inputs inputs;
  for (std::size_t start = 0; more(start, bytes); start += piece) {
    const std::size_t length = std::min(piece, bytes - start);
    const Slot slot = next_slot(piece * size_);
    RETURN_IF_FAILED(reuse(*slot.used));
    for (int rank = 0; rank < size_ && flag == 0; ++rank) {
      collect_rows(place(rank_, slot) + rank * piece, source + rank * row, row, stride, start, length);
    }
    const std::uint64_t tick = *slot.used = publish(flag);
    RETURN_IF_FAILED(wait_all(tick));
    if (start == 0) RETURN_IF_FAILED(hear(inputs, tick, flag, outer == 1 ? stride : 0));
    const void* sources[kMaxRanks];
    for (int rank = 0; rank < size_; ++rank) {
      const bool is_shared = (inputs.is_shared >> rank & 1) != 0;
      sources[rank] = is_shared ? inputs.at[rank] + rank_ * row + start : place(rank, slot) + rank_ * piece;
    }
    if (wide) {
      reduce_part(static_cast<char*>(out) + start / width * wide_size_of(dtype), sources, 0, size_, length / width, 0);
    } else {
      void* const piece_out = static_cast<char*>(out) + start;
      reduce(&piece_out, 1, sources, size_, length / width);
    }
  }
  return inputs.shared == 0 ? Status::kDone : close();
}

Status HostGroup::reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op, bool wide,
                         double timeout_s) {
  const std::size_t width = size_of(dtype), out_width = wide ? wide_size_of(dtype) : width, bytes = count * width;
  const ReduceFunction reduce = reduce_function(dtype, op);
  const PartFunction reduce_part = part_function(dtype, op);
  const std::uint64_t digest = static_cast<std::uint64_t>(dtype) << 1 | static_cast<std::uint64_t>(wide);
  begin(Kind::kReduce, count, Method::kAllReduce, timeout_s, digest, static_cast<int>(op));
  const std::size_t slot_bytes = slot_bytes_for(bytes);
  const auto* source = static_cast<const char*>(in);
  for (std::size_t start = 0; more(start, bytes); start += slot_bytes) {
    const std::size_t length = std::min(slot_bytes, bytes - start);
    const Slot slot = next_slot(length);
    RETURN_IF_FAILED(reuse(*slot.used));
    if (rank_ != 0) copy(place(rank_, slot), source + start, length);
    const std::uint64_t tick = *slot.used = publish();
    if (rank_ != 0) continue;
    RETURN_IF_FAILED(wait_all(tick));
    const void* sources[kMaxRanks];
    for (int rank = 1; rank < size_; ++rank) sources[rank] = place(rank, slot);
    sources[0] = source + start;
    void* const to = static_cast<char*>(out) + start / width * out_width;
    if (wide) {
      reduce_part(to, sources, 0, size_, length / width, 0);
    } else {
      reduce(&to, 1, sources, size_, length / width);
    }
  }
  return Status::kDone;
}

Status HostGroup::broadcast_sized(const void* in, std::uint64_t bytes, int src,
                                  const std::function<char*(std::uint64_t)>& room, double timeout_s) {
  constexpr std::size_t kSizeBytes = 64;
  begin(Kind::kBroadcastSized, 0, Method::kNone, timeout_s, 0, -1, src);
  const Slot slot = next_slot(tuning_.small_slot_bytes);
  const auto first_part = [&] { return std::min<std::uint64_t>(bytes, tuning_.small_slot_bytes - kSizeBytes); };
  auto* data = static_cast<char*>(const_cast<void*>(in));
  RETURN_IF_FAILED(reuse(*slot.used));
  if (rank_ == src) {
    std::memcpy(place(rank_, slot), &bytes, sizeof bytes);
    copy(place(rank_, slot) + kSizeBytes, data, first_part());
  }
  const std::uint64_t tick = *slot.used = publish();
  if (rank_ == src) {
    RETURN_IF_FAILED(look(tick));
  } else {
    RETURN_IF_FAILED(wait_one(src, tick));
    std::memcpy(&bytes, place(src, slot), sizeof bytes);
    if ((data = room(bytes)) == nullptr) {
      failure_.suspect = src;
      failure_.misfit = {src, rank_, bytes, 0};
      return Status::kTooLarge;
    }
    copy(data, place(src, slot) + kSizeBytes, first_part());
  }
  return first_part() == bytes ? Status::kDone : broadcast(data + first_part(), bytes - first_part(), src, timeout_s);
}

Status HostGroup::all_to_all(void* out, const void* in, const std::size_t* out_bytes, const std::size_t* in_bytes,
                             double timeout_s) {
  begin(Kind::kAllToAll, 0, Method::kAllToAll, timeout_s);
  block_sizes_.begin(rank_, size_, out_bytes, in_bytes);
  record_.sizes = block_sizes_.even_sizes();
  tell_parts(in_bytes);
  const bool even = block_sizes_.is_even();
  const std::size_t each = in_bytes[0], row_bytes = block_sizes_.row_bytes();
  const std::uint64_t note = even ? mixed(own_note() + each) & ~Counter::kFlag : own_note();
  // A row is before the blocks in its rank's slot.
  const auto begin_of = [&](int from, int to) {
    if (block_sizes_.is_same()) return to * each;
    const std::uint64_t* const sent = block_sizes_.row_of(from);
    const bool has_row = std::any_of(sent, sent + 2 * size_, [sent](std::uint64_t bytes) { return bytes != *sent; });
    return std::accumulate(sent, sent + to, has_row ? (row_bytes + 63) / 64 * 64 : 0);
  };
  const auto fits = [&](int from) { return begin_of(from, size_) <= tuning_.small_slot_bytes; };
  const auto in_at = [&](int rank) { return static_cast<const char*>(in) + block_sizes_.in_start(rank); };
  const auto out_at = [&](int rank) { return static_cast<char*>(out) + block_sizes_.out_start(rank); };
  const Slot slot = next_slot(tuning_.small_slot_bytes);
  RETURN_IF_FAILED(reuse(*slot.used));
  if (!even) copy(place(rank_, slot), block_sizes_.row_of(rank_), row_bytes);
  for (int rank = 0; rank < size_ && fits(rank_); ++rank) {
    if (rank != rank_) copy(place(rank_, slot) + begin_of(rank_, rank), in_at(rank), in_bytes[rank]);
  }
  const std::uint64_t tick = *slot.used = publish_as(note);
  copy(out_at(rank_), in_at(rank_), std::min(in_bytes[rank_], out_bytes[rank_]));
  for (int step = 1; step < size_; ++step) {
    const int rank = (rank_ + step) % size_;
    RETURN_IF_FAILED(wait_one(rank, tick, false));
    std::uint64_t theirs;
    if (!even || !lines_[rank].note_of(tick, &theirs) || theirs != note) {
      if (differs(rank, tick)) return Status::kMismatch;
      block_sizes_.note_difference();
      if (const std::uint64_t even_sizes = record_of(rank, tick).sizes; even_sizes != 0) {
        block_sizes_.fill(rank, even_sizes - 1);
      } else {
        copy(block_sizes_.row_of(rank), place(rank, slot), row_bytes);
      }
      if (block_sizes_.row_of(rank)[rank_] != out_bytes[rank]) continue;
    }
    if (fits(rank)) copy(out_at(rank), place(rank, slot) + begin_of(rank, rank_), out_bytes[rank]);
  }
  all_reached_ = std::max(all_reached_, tick);
  if (Misfit misfit; block_sizes_.find_misfit(kEveryone, &misfit)) {
    remember(misfit.from == rank_ ? misfit.to : misfit.from, tick_);
    failure_.misfit = misfit;
    return Status::kMismatch;
  }
  std::uint64_t longest = 0;
  for (int from = 0; from < size_; ++from) {
    if (fits(from)) continue;
    const std::uint64_t* const sent = block_sizes_.is_same() ? nullptr : block_sizes_.row_of(from);
    longest = std::max(longest, sent == nullptr ? each : *std::max_element(sent, sent + size_));
  }
  const std::size_t slot_bytes = slot_bytes_for(longest * size_);
  const std::size_t piece = std::min<std::size_t>(longest, slot_bytes / size_);
  const auto part = [&](std::size_t bytes, std::size_t start) {
    return start >= bytes ? 0 : std::min(piece, bytes - start);
  };
  for (std::size_t start = 0; start < longest; start += piece) {
    RETURN_IF_FAILED(move(
        piece * size_,
        [&](char* slot, std::size_t, std::size_t) {
          for (int rank = 0; rank < size_ && !fits(rank_); ++rank) {
            const std::size_t length = part(in_bytes[rank], start);
            if (rank != rank_ && length != 0) copy(slot + rank * piece, in_at(rank) + start, length);
          }
        },
        kEveryone,
        [&](int rank, const char* slot, std::size_t, std::size_t) {
          const std::size_t length = fits(rank) ? 0 : part(out_bytes[rank], start);
          if (length != 0) copy(out_at(rank) + start, slot + rank_ * piece, length);
        }));
  }
  return Status::kDone;
}

}  // namespace parallel_state
