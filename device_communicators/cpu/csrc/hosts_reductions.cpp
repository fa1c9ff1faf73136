#include <algorithm>
#include <cstring>

#include "copy.h"
#include "hosts_group.h"
#include "rows.h"

namespace parallel_state {
namespace {

// Hosts that would send at most this much to all others do so, in one round. Above, each reduces a slice, in two
// rounds.
constexpr std::size_t kOneRoundBytes = 64 << 10;
constexpr std::size_t kLeastChunk = 1 << 18, kMostChunk = 1 << 20, kChunks = 16;
constexpr std::size_t kAlignment = 64;  // elements: whole cache lines
constexpr std::size_t kMostSources = 64;

std::size_t chunk_of(std::size_t count) { return std::clamp(count / kChunks, kLeastChunk, kMostChunk); }

struct Cut {
  std::size_t start, count;
};

Cut cut_of(std::size_t count, int parts, int part) {
  const std::size_t unit = static_cast<std::size_t>(parts) * kAlignment;
  const std::size_t step = (count + unit - 1) / unit * kAlignment;
  const std::size_t start = std::min(count, static_cast<std::size_t>(part) * step);
  return {start, std::min(step, count - start)};
}

}  // namespace

HostsGroup::Reduction HostsGroup::reduction_of(Dtype dtype, ReduceOp op) const {
  const bool is_float = dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16;
  const bool rounds = op != ReduceOp::kMax && op != ReduceOp::kMin;
  const bool widens = is_float && rounds;
  return {dtype,
          op,
          op == ReduceOp::kAverage ? ReduceOp::kSum : op,
          widens,
          widens && rounded_ && dtype == Dtype::kBfloat16 && op != ReduceOp::kTreeSum,
          size_of(dtype),
          widens ? wide_size_of(dtype) : size_of(dtype)};
}

bool HostsGroup::in_one_round(const Reduction& how, std::size_t count) const {
  const std::size_t width = hosts_ == size_ ? how.width : how.wide_width;
  if (count * width * static_cast<std::size_t>(hosts_ - 1) <= kOneRoundBytes) return true;
  return hosts_ == 2 && !how.is_rounded && width <= how.width;
}

bool HostsGroup::is_wide(const Reduction& how, int host, bool one_round) const {
  return how.widens && ranks_of(host).size() > 1 && (one_round || !how.is_rounded);
}

const void* HostsGroup::as_it_travels(const Reduction& how, const char* part, std::size_t start, std::size_t count,
                                      bool one_round, char* rounded) {
  const bool has_wide = how.widens && !is_alone();
  if (!has_wide || is_wide(how, host_, one_round)) return part + start * (has_wide ? how.wide_width : how.width);
  const void* const source = part + start * how.wide_width;
  char* const to = rounded + start * how.width;
  part_function(how.dtype, ReduceOp::kSum)(to, &source, 1, 1, count, 1);
  return to;
}

// `sources_` are in host order; `wide_` marks those in the accumulator's type. `out` may be one of them.
void HostsGroup::combine(const Reduction& how, void* out, std::size_t count) {
  std::size_t first = 0;
  const void* sources[kMostSources];
  for (bool is_last = false; !is_last;) {
    std::size_t taken = 0;
    std::uint64_t wide = 0;
    if (first != 0) {
      sources[taken++] = totals_.take(count * how.wide_width);
      wide = how.widens ? 1 : 0;
    }
    for (; first < sources_.size() && taken < kMostSources; ++first) {
      if (how.widens && wide_[first]) wide |= std::uint64_t{1} << taken;
      sources[taken++] = sources_[first];
    }
    is_last = first == sources_.size();
    void* const to = is_last ? out : totals_.take(count * how.wide_width);
    const ReduceOp op = is_last ? how.op : how.part_op;
    const int total = is_last ? size_ : 0, number = static_cast<int>(taken);
    if (wide == 0 && op != ReduceOp::kAverage && (is_last || !how.widens)) {
      reduce_function(how.dtype, op)(&to, 1, sources, number, count);
    } else {
      part_function(how.dtype, op)(to, sources, wide, number, count, total);
    }
  }
}

Status HostsGroup::all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op,
                              double timeout_s) {
  if (op == ReduceOp::kTreeSum && !has_subtrees_) return Status::kUnsupported;
  begin(Kind::kAllReduce, count, Method::kAllReduce, timeout_s, static_cast<std::uint64_t>(dtype),
        static_cast<int>(op));
  return reduce_all(static_cast<char*>(out), static_cast<const char*>(in), count, reduction_of(dtype, op));
}

Status HostsGroup::all_reduce_add_rms_norm(const AddRmsNorm& norm, double timeout_s) {
  if (add_rms_norm_function(norm.dtype) == nullptr) return Status::kUnsupported;
  begin(Kind::kAllReduceAddRmsNorm, norm.rows * norm.hidden, Method::kAllReduceAddRmsNorm, timeout_s,
        mixed(norm.hidden) + static_cast<std::uint64_t>(norm.dtype));
  RETURN_IF_FAILED(reduce_all(static_cast<char*>(norm.out), static_cast<const char*>(norm.in), norm.rows * norm.hidden,
                              reduction_of(norm.dtype, ReduceOp::kSum)));
  add_and_norm(norm, 0, norm.rows);
  return Status::kDone;
}

// Step s: reduce chunk s within the host and send its part; combine the hosts' parts of chunk s - 1 (in two rounds only
// the own slice) and send that result; share the result of chunk s - 2 within the host. Two ranks exchange P0, P1 R0,
// P2 R1, ...: parts P, and results R of chunks in two rounds. In place, another host's R arrives only after that host
// has received this one's part. Memory of step s is reused in step s + 4: another host's P of chunk s + 4 arrives after
// this one has combined chunk s + 1.
Status HostsGroup::reduce_all(char* out, const char* in, std::size_t count, const Reduction& how) {
  const std::size_t length = chunk_of(count), chunks = std::max<std::size_t>(1, (count + length - 1) / length);
  const bool small = count <= length && in_one_round(how, count), lanes = has_lanes_ && !small;
  const bool moves = lanes || is_lead();
  const auto ranks_here = static_cast<std::size_t>(local_size());
  peers_.clear();
  for_other_hosts(
      [&](int host) { peers_.push_back(lanes ? ranks_of(host)[static_cast<std::size_t>(place_)] : at(host)); });
  part_numbers_.assign(chunks, 0);
  result_numbers_.assign(chunks, 0);
  sent_numbers_.assign(chunks, 0);
  struct Chunk {
    std::size_t turn, count, piece;
    bool is_padded, one_round;
    const char* in;
    char* out;
    char* result;
    char* part;
  };
  const auto chunk_at = [&](std::size_t index) {
    Chunk chunk{};
    chunk.turn = index % kTurns;
    chunk.count = std::min(length, count - std::min(count, index * length));
    chunk.piece = lanes ? (chunk.count + ranks_here - 1) / ranks_here : chunk.count;
    chunk.is_padded = lanes && chunk.piece * ranks_here != chunk.count;
    chunk.one_round = in_one_round(how, chunk.piece);
    const std::size_t offset = index * length * how.width, padded = chunk.piece * ranks_here * how.width;
    chunk.in = chunk.is_padded ? padded_[2 * chunk.turn].take(padded) : in + offset;
    chunk.out = chunk.is_padded ? padded_[2 * chunk.turn + 1].take(padded) : out + offset;
    chunk.result = lanes ? chunk.out + static_cast<std::size_t>(place_) * chunk.piece * how.width : chunk.out;
    chunk.part = is_alone() ? const_cast<char*>(chunk.in)
                 : moves    ? parts_[chunk.turn].take(chunk.piece * how.wide_width)
                            : nullptr;
    return chunk;
  };
  const auto cut = [&](const Chunk& chunk, int host) {
    return chunk.one_round ? Cut{0, chunk.piece} : cut_of(chunk.piece, hosts_, host);
  };
  const auto received = [&](const Chunk& chunk, int host) {
    const std::size_t bytes = cut(chunk, host_).count * travelling_width(how, host, chunk.one_round);
    return received_[chunk.turn * static_cast<std::size_t>(hosts_) + static_cast<std::size_t>(host)].take(bytes);
  };
  std::uint32_t expected = 0, sent = 0;
  const auto expect_parts = [&](std::size_t index) {
    const Chunk chunk = chunk_at(index);
    std::size_t peer = 0;
    for_other_hosts([&](int host) {
      expect(peers_[peer++], received(chunk, host),
             cut(chunk, host_).count * travelling_width(how, host, chunk.one_round));
    });
    part_numbers_[index] = ++expected;
  };
  for (std::size_t step = 0; step < chunks + 2; ++step) {
    if (step < chunks) {
      const Chunk chunk = chunk_at(step);
      if (moves) {
        if (step == 0) expect_parts(0);
        if (step + 1 < chunks) expect_parts(step + 1);
        std::size_t peer = 0;
        for_other_hosts([&](int host) {
          if (chunk.one_round) return;
          const Cut theirs = cut(chunk, host);
          expect(peers_[peer++], chunk.result + theirs.start * how.width, theirs.count * how.width);
        });
        if (!chunk.one_round) result_numbers_[step] = ++expected;
        if (step >= 2) RETURN_IF_FAILED(wait_sent(peers_, sent_numbers_[step - 2]));
      }
      if (chunk.is_padded) {
        auto* const padded = const_cast<char*>(chunk.in);
        copy(padded, in + step * length * how.width, chunk.count * how.width);
        std::memset(padded + chunk.count * how.width, 0, (chunk.piece * ranks_here - chunk.count) * how.width);
      }
      if (lanes) {
        RETURN_IF_FAILED(at_home(local_.scatter_reduced(chunk.part, chunk.in, 1, chunk.piece, how.dtype, how.part_op,
                                                        how.widens, left_s())));
      } else if (!is_alone()) {
        RETURN_IF_FAILED(
            at_home(local_.reduce(chunk.part, chunk.in, chunk.piece, how.dtype, how.part_op, how.widens, left_s())));
      }
      if (moves) {
        char* const rounded = rounded_parts_[chunk.turn].take(chunk.piece * how.width);
        std::size_t peer = 0;
        for_other_hosts([&](int host) {
          const Cut theirs = cut(chunk, host);
          send(peers_[peer++], as_it_travels(how, chunk.part, theirs.start, theirs.count, chunk.one_round, rounded),
               theirs.count * travelling_width(how, host_, chunk.one_round));
        });
        ++sent;
      }
    }
    if (moves && step >= 1 && step <= chunks) {
      const Chunk chunk = chunk_at(step - 1);
      RETURN_IF_FAILED(wait_from(peers_, part_numbers_[step - 1]));
      if (chunk.one_round && is_alone()) RETURN_IF_FAILED(wait_sent(peers_, sent_numbers_[step - 1]));
      const Cut own = cut(chunk, host_);
      const bool has_wide = how.widens && !is_alone();
      for (int host = 0; host < hosts_; ++host) {
        const auto index = static_cast<std::size_t>(host);
        const bool mine = host == host_;
        sources_[index] =
            mine ? chunk.part + own.start * (has_wide ? how.wide_width : how.width) : received(chunk, host);
        wide_[index] = mine ? has_wide : is_wide(how, host, chunk.one_round);
      }
      char* const result = chunk.result + own.start * how.width;
      if (own.count != 0) combine(how, result, own.count);
      if (!chunk.one_round) {
        for (const int peer : peers_) send(peer, result, own.count * how.width);
        ++sent;
      }
    }
    if (step < chunks) sent_numbers_[step] = sent;
    if (step >= 2) {
      const Chunk chunk = chunk_at(step - 2);
      if (moves && !chunk.one_round) RETURN_IF_FAILED(wait_from(peers_, result_numbers_[step - 2]));
      if (lanes) {
        const std::size_t bytes = chunk.piece * how.width;
        RETURN_IF_FAILED(at_home(local_.all_gather(chunk.out, chunk.result, 1, bytes, left_s())));
        if (chunk.is_padded) copy(out + (step - 2) * length * how.width, chunk.out, chunk.count * how.width);
      } else if (!is_alone()) {
        RETURN_IF_FAILED(at_home(local_.broadcast(chunk.out, chunk.count * how.width, 0, left_s())));
      }
    }
  }
  return finish();
}

// A lead sends the blocks of other hosts' ranks to their leads, combines those of its own ranks and scatters them.
Status HostsGroup::reduce_scatter(void* out, const void* in, std::size_t outer, std::size_t inner, Dtype dtype,
                                  ReduceOp op, double timeout_s) {
  if (op == ReduceOp::kTreeSum && !has_subtrees_) return Status::kUnsupported;
  begin(Kind::kReduceScatter, outer * inner, Method::kReduceScatter, timeout_s, static_cast<std::uint64_t>(dtype),
        static_cast<int>(op));
  const Reduction how = reduction_of(dtype, op);
  const auto ranks = static_cast<std::size_t>(size_), ranks_here = static_cast<std::size_t>(local_size());
  const std::size_t count = outer * inner;
  const std::size_t length = std::max<std::size_t>(1, chunk_of(count * ranks) / ranks);
  const std::size_t chunks = std::max<std::size_t>(1, (count + length - 1) / length);
  const bool as_it_is = chunks == 1 && outer == 1 && is_in_order_;
  const bool has_wide = how.widens && !is_alone();
  std::vector<std::size_t> starts(1, 0);
  for (const auto& each : ranks_) starts.push_back(starts.back() + each.size());
  peers_.clear();
  for_other_hosts([&](int host) { peers_.push_back(at(host)); });
  const auto columns = [&](std::size_t chunk) { return std::min(length, count - std::min(count, chunk * length)); };
  const auto received = [&](std::size_t chunk, int host) {
    return received_[chunk % kTurns * static_cast<std::size_t>(hosts_) + static_cast<std::size_t>(host)].take(
        columns(chunk) * ranks_here * travelling_width(how, host, false));
  };
  const auto expect_parts = [&](std::size_t chunk) {
    std::size_t peer = 0;
    for_other_hosts([&](int host) {
      expect(peers_[peer++], received(chunk, host), columns(chunk) * ranks_here * travelling_width(how, host, false));
    });
  };
  const auto part_of = [&](std::size_t chunk) {
    if (!is_lead()) return static_cast<char*>(nullptr);
    if (!is_alone()) return parts_[chunk % kTurns].take(columns(chunk) * ranks * how.wide_width);
    if (as_it_is) return static_cast<char*>(const_cast<void*>(in));
    return padded_[chunk % kTurns].take(columns(chunk) * ranks * how.width);
  };
  for (std::size_t step = 0; step < chunks + 1; ++step) {
    if (step < chunks) {
      const std::size_t width = columns(step);
      if (is_lead()) {
        if (step == 0) expect_parts(0);
        if (step + 1 < chunks) expect_parts(step + 1);
        if (step >= 2) RETURN_IF_FAILED(wait_sent(peers_, static_cast<std::uint32_t>(step - 1)));
      }
      const auto* flat = static_cast<const char*>(in);
      if (!as_it_is) {
        char* const blocks = padded_[step % kTurns].take(width * ranks * how.width);
        for (std::size_t place = 0; place < ranks; ++place) {
          const std::size_t row = inner * how.width;
          collect_rows(blocks + place * width * how.width,
                       static_cast<const char*>(in) + static_cast<std::size_t>(order_[place]) * row, row, ranks * row,
                       step * length * how.width, width * how.width);
        }
        flat = blocks;
      }
      char* const part = part_of(step);
      if (!is_alone()) {
        RETURN_IF_FAILED(
            at_home(local_.reduce(part, flat, width * ranks, how.dtype, how.part_op, how.widens, left_s())));
      }
      if (is_lead()) {
        char* const rounded = rounded_parts_[step % kTurns].take(width * ranks * how.width);
        std::size_t peer = 0;
        for_other_hosts([&](int host) {
          const auto index = static_cast<std::size_t>(host);
          const std::size_t theirs = (starts[index + 1] - starts[index]) * width;
          send(peers_[peer++], as_it_travels(how, part, starts[index] * width, theirs, false, rounded),
               theirs * travelling_width(how, host_, false));
        });
      }
    }
    if (step == 0) continue;
    const std::size_t chunk = step - 1, width = columns(chunk);
    char* const to = static_cast<char*>(out) + chunk * length * how.width;
    char* total = to;
    if (is_lead()) {
      RETURN_IF_FAILED(wait_from(peers_, static_cast<std::uint32_t>(step)));
      for (int host = 0; host < hosts_; ++host) {
        const auto index = static_cast<std::size_t>(host);
        const bool mine = host == host_;
        const std::size_t own = starts[static_cast<std::size_t>(host_)] * width;
        sources_[index] = mine ? part_of(chunk) + own * (has_wide ? how.wide_width : how.width) : received(chunk, host);
        wide_[index] = mine ? has_wide : is_wide(how, host, false);
      }
      if (!is_alone()) total = blocks_.take(width * ranks_here * how.width);
      if (width != 0) combine(how, total, width * ranks_here);
    }
    if (!is_alone()) RETURN_IF_FAILED(at_home(local_.scatter(to, total, width * how.width, 0, left_s())));
  }
  return finish();
}

}  // namespace parallel_state
