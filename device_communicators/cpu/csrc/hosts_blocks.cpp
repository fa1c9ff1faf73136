#include <algorithm>
#include <cstring>
#include <numeric>

#include "copy.h"
#include "hosts_group.h"
#include "rows.h"

namespace parallel_state {
namespace {

constexpr std::size_t kAtOnceBytes = 64 << 10;
constexpr std::size_t kPieceBytes = 1 << 20;

std::size_t index_of(int rank) { return static_cast<std::size_t>(rank); }

}  // namespace

void HostsGroup::put_in_place(char* out, const char* blocks, std::size_t outer, std::size_t inner_bytes) const {
  const std::size_t bytes = outer * inner_bytes, stride = index_of(size_) * inner_bytes;
  for (std::size_t place = 0; place < order_.size(); ++place) {
    copy_rows(out + index_of(order_[place]) * inner_bytes, inner_bytes, stride, blocks + place * bytes, 0, bytes);
  }
}

Status HostsGroup::all_gather(void* out, const void* in, std::size_t outer, std::size_t inner_bytes, double timeout_s) {
  const std::size_t bytes = outer * inner_bytes;
  begin(Kind::kAllGather, bytes, Method::kAllGather, timeout_s);
  auto* const to = static_cast<char*>(out);
  const auto* const from = static_cast<const char*>(in);
  const bool as_it_is = outer == 1 && is_in_order_;
  char* const blocks = as_it_is ? to : blocks_.take(bytes * index_of(size_));
  RETURN_IF_FAILED(has_lanes_ ? gather_by_lanes(blocks, from, bytes) : gather_by_leads(blocks, from, bytes));
  if (!as_it_is) put_in_place(to, blocks, outer, inner_bytes);
  return Status::kDone;
}

Status HostsGroup::gather_by_lanes(char* blocks, const char* in, std::size_t bytes) {
  const std::size_t ranks = index_of(local_size()), place = index_of(place_);
  peers_.clear();
  for_other_hosts([&](int host) { peers_.push_back(ranks_of(host)[place]); });
  if (bytes <= kAtOnceBytes) {
    char* const lane = totals_.take(bytes * index_of(hosts_));
    std::size_t peer = 0;
    for_other_hosts([&](int host) {
      expect(peers_[peer], lane + index_of(host) * bytes, bytes);
      send(peers_[peer++], in, bytes);
    });
    copy(lane + index_of(host_) * bytes, in, bytes);
    RETURN_IF_FAILED(pass());
    RETURN_IF_FAILED(finish());
    return at_home(local_.all_gather(blocks, lane, index_of(hosts_), bytes, left_s()));
  }
  const auto block = [&](int host, std::size_t rank) { return blocks + (index_of(host) * ranks + rank) * bytes; };
  const auto length = [&](std::size_t start) { return std::min(kPieceBytes, bytes - start); };
  for (std::size_t start = 0; start < bytes; start += kPieceBytes) {
    std::size_t peer = 0;
    for_other_hosts([&](int host) { expect(peers_[peer++], block(host, place) + start, length(start)); });
    for (const int rank : peers_) send(rank, in + start, length(start));
  }
  std::uint32_t come = 0;
  for (std::size_t start = 0; start < bytes; start += kPieceBytes) {
    copy(block(host_, place) + start, in + start, length(start));
    const auto share = [&](int host) {
      void* outs[kMaxRanks];
      std::size_t sizes[kMaxRanks];
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        outs[rank] = block(host, rank) + start;
        sizes[rank] = length(start);
      }
      return at_home(local_.gatherv(outs, sizes, outs[place], -1, left_s()));
    };
    RETURN_IF_FAILED(share(host_));
    RETURN_IF_FAILED(wait_from(peers_, ++come));
    for (int host = 0; host < hosts_; ++host) {
      if (host != host_) RETURN_IF_FAILED(share(host));
    }
  }
  return finish();
}

Status HostsGroup::gather_by_leads(char* blocks, const char* in, std::size_t bytes) {
  constexpr std::size_t kPiece = 4 * kPieceBytes;
  const auto start_of = [&](int host) {
    std::size_t ranks = 0;
    for (int before = 0; before < host; ++before) ranks += ranks_of(before).size();
    return blocks + ranks * bytes;
  };
  const auto bytes_of = [&](int host) { return ranks_of(host).size() * bytes; };
  char* const own = start_of(host_);
  if (is_lead()) {
    for_other_hosts([&](int host) {
      for (std::size_t start = 0; start == 0 || start < bytes_of(host); start += kPiece) {
        expect(at(host), start_of(host) + start, std::min(kPiece, bytes_of(host) - start));
      }
    });
  }
  if (!is_alone()) RETURN_IF_FAILED(at_home(local_.all_gather(own, in, 1, bytes, left_s())));
  if (is_lead()) {
    const char* const given = is_alone() ? in : own;
    for_other_hosts([&](int host) {
      for (std::size_t start = 0; start == 0 || start < bytes_of(host_); start += kPiece) {
        send(at(host), given + start, std::min(kPiece, bytes_of(host_) - start));
      }
    });
  }
  if (is_alone()) {
    copy_meanwhile(own, in, bytes);
    return finish();
  }
  for (int host = 0; host < hosts_; ++host) {
    if (host == host_) continue;
    peers_ = {at(host)};
    std::uint32_t come = 0;
    for (std::size_t start = 0; start == 0 || start < bytes_of(host); start += kPiece) {
      if (is_lead()) RETURN_IF_FAILED(wait_from(peers_, ++come));
      const std::size_t length = std::min(kPiece, bytes_of(host) - start);
      RETURN_IF_FAILED(at_home(local_.broadcast(start_of(host) + start, length, 0, left_s())));
    }
  }
  return finish();
}

Status HostsGroup::gatherv(void* const* outs, const std::size_t* bytes, const void* in, int dst, double timeout_s) {
  if (!meshed_) return Status::kUnsupported;
  begin(Kind::kGatherv, *std::max_element(bytes, bytes + size_), Method::kNone, timeout_s, digest_of(bytes, size_), -1,
        dst);
  if (dst < 0) return gather_all(outs, bytes, in);
  if (!is_here(dst)) {
    send(dst, in, bytes[rank_]);
    RETURN_IF_FAILED(pass());
    return finish();
  }
  if (rank_ == dst) for_remote_ranks([&](int rank) { expect(rank, outs[rank], bytes[rank]); });
  if (!is_alone()) RETURN_IF_FAILED(share_at_home(local_ranks(), outs, bytes, in));
  return finish();
}

// Each rank of this host has the block of `ranks` at its own position, or none.
Status HostsGroup::share_at_home(const std::vector<int>& ranks, void* const* outs, const std::size_t* bytes,
                                 const void* in) {
  void* to[kMaxRanks] = {};
  std::size_t sizes[kMaxRanks] = {};
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    to[place] = outs[ranks[place]];
    sizes[place] = bytes[ranks[place]];
  }
  return at_home(local_.gatherv(to, sizes, in, -1, left_s()));
}

Status HostsGroup::gather_all(void* const* outs, const std::size_t* bytes, const void* in) {
  const auto ranks_here = local_ranks().size();
  for_other_hosts([&](int host) {
    const auto& theirs = ranks_of(host);
    for (std::size_t place = index_of(place_); place < theirs.size(); place += ranks_here) {
      expect(theirs[place], outs[theirs[place]], bytes[theirs[place]]);
    }
  });
  for_other_hosts([&](int host) {
    const auto& theirs = ranks_of(host);
    send(theirs[index_of(place_) % theirs.size()], in, bytes[rank_]);
  });
  if (!is_alone()) RETURN_IF_FAILED(share_at_home(local_ranks(), outs, bytes, in));
  RETURN_IF_FAILED(finish());
  for (int host = 0; host < hosts_ && !is_alone(); ++host) {
    const auto& theirs = ranks_of(host);
    for (std::size_t first = 0; host != host_ && first < theirs.size(); first += ranks_here) {
      const std::vector<int> round(
          theirs.begin() + static_cast<std::ptrdiff_t>(first),
          theirs.begin() + static_cast<std::ptrdiff_t>(std::min(theirs.size(), first + ranks_here)));
      const bool has_one = index_of(place_) < round.size();
      RETURN_IF_FAILED(share_at_home(round, outs, bytes, has_one ? outs[round[index_of(place_)]] : nullptr));
    }
  }
  return Status::kDone;
}

Status HostsGroup::scatter(void* out, const void* in, std::size_t bytes, int src, double timeout_s) {
  if (!meshed_) return Status::kUnsupported;
  begin(Kind::kScatter, bytes, Method::kNone, timeout_s, 0, -1, src);
  const auto* const blocks = static_cast<const char*>(in);
  if (!is_here(src)) {
    expect(src, out, bytes);
    RETURN_IF_FAILED(pass());
    return finish();
  }
  if (rank_ == src) for_remote_ranks([&](int rank) { send(rank, blocks + index_of(rank) * bytes, bytes); });
  if (is_alone()) {
    copy_meanwhile(out, blocks + index_of(rank_) * bytes, bytes);
    return finish();
  }
  const auto& own = local_ranks();
  const char* mine = nullptr;
  if (rank_ == src) {
    mine = blocks + index_of(own[0]) * bytes;
    if (own.back() - own[0] != local_size() - 1) {
      char* const together = blocks_.take(bytes * own.size());
      for (std::size_t place = 0; place < own.size(); ++place) {
        copy(together + place * bytes, blocks + index_of(own[place]) * bytes, bytes);
      }
      mine = together;
    }
  }
  RETURN_IF_FAILED(at_home(local_.scatter(out, mine, bytes, place_of(src), left_s())));
  return finish();
}

// A row is a message before the block.
Status HostsGroup::all_to_all(void* out, const void* in, const std::size_t* out_bytes, const std::size_t* in_bytes,
                              double timeout_s) {
  if (!meshed_) return Status::kUnsupported;
  begin(Kind::kAllToAll, 0, Method::kAllToAll, timeout_s);
  block_sizes_.begin(rank_, size_, out_bytes, in_bytes);
  record_.sizes = block_sizes_.even_sizes();
  const bool even = block_sizes_.is_even();
  const std::size_t row_bytes = block_sizes_.row_bytes();
  auto* const to = static_cast<char*>(out);
  const auto* const from = static_cast<const char*>(in);
  for (int step = 1; step < size_; ++step) {
    const int rank = (rank_ + step) % size_;
    if (is_here(rank)) continue;
    link(rank).in.expect_any();
    if (!even) send(rank, block_sizes_.row_of(rank_), row_bytes);
    send(rank, from + block_sizes_.in_start(rank), in_bytes[rank]);
  }
  is_table_.assign(index_of(size_), false);
  pending_.clear();
  for_remote_ranks([&](int rank) { pending_.push_back(rank); });
  const auto take_heads = [&] {
    for (std::size_t at = 0; at < pending_.size();) {
      const int rank = pending_[at];
      Inbox& inbox = link(rank).in;
      if (inbox.state() != Inbox::State::kChosen) {
        if (is_table_[index_of(rank)] && inbox.is_idle()) {
          pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(at));
          continue;
        }
        ++at;
        continue;
      }
      const CallRecord& head = inbox.head();
      if (even && head.sizes == record_.sizes && head.bytes == block_sizes_.each()) {
        inbox.take(to + block_sizes_.out_start(rank));
        pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(at));
        continue;
      }
      block_sizes_.note_difference();
      if (head.sizes != 0 && head.bytes != head.sizes - 1) {
        is_strange_ = true;
        return true;
      }
      if (head.sizes != 0) {
        block_sizes_.fill(rank, head.sizes - 1);
        pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(at));
      } else if (head.bytes == row_bytes) {
        is_table_[index_of(rank)] = true;
        inbox.take(reinterpret_cast<char*>(block_sizes_.row_of(rank)));
      } else {
        is_strange_ = true;
        return true;
      }
    }
    return pending_.empty();
  };
  is_strange_ = false;
  RETURN_IF_FAILED(pass());
  RETURN_IF_FAILED(wait(take_heads));
  if (is_strange_) {
    text_ = "a peer sent bytes that are no table of sizes";
    return Status::kBroken;
  }
  if (block_sizes_.find_misfit([&](int rank) { return rank == rank_ || !is_here(rank); }, &failure_.misfit)) {
    failure_.suspect = failure_.misfit.from == rank_ ? failure_.misfit.to : failure_.misfit.from;
    return Status::kMismatch;
  }
  for_remote_ranks([&](int rank) {
    Inbox& inbox = link(rank).in;
    if (inbox.state() == Inbox::State::kChosen) {
      inbox.take(to + block_sizes_.out_start(rank));
    } else if (is_table_[index_of(rank)]) {
      inbox.expect(to + block_sizes_.out_start(rank), out_bytes[rank]);
    }
  });
  RETURN_IF_FAILED(exchange_at_home(to, from, out_bytes, in_bytes));
  return finish();
}

Status HostsGroup::exchange_at_home(char* out, const char* in, const std::size_t* out_bytes,
                                    const std::size_t* in_bytes) {
  if (is_alone()) {
    copy_meanwhile(out + block_sizes_.out_start(rank_), in + block_sizes_.in_start(rank_), in_bytes[rank_]);
    return Status::kDone;
  }
  const auto& own = local_ranks();
  std::size_t outs[kMaxRanks], ins[kMaxRanks], out_total = 0, in_total = 0;
  for (std::size_t place = 0; place < own.size(); ++place) {
    out_total += outs[place] = out_bytes[own[place]];
    in_total += ins[place] = in_bytes[own[place]];
  }
  const bool together = own.back() - own[0] == local_size() - 1;
  const char* given = in + block_sizes_.in_start(own[0]);
  char* found = out + block_sizes_.out_start(own[0]);
  if (!together) {
    char* at_given = blocks_.take(in_total);
    given = at_given;
    found = totals_.take(out_total);
    for (const int rank : own) {
      copy(at_given, in + block_sizes_.in_start(rank), in_bytes[rank]);
      at_given += in_bytes[rank];
    }
  }
  RETURN_IF_FAILED(at_home(local_.all_to_all(found, given, outs, ins, left_s())));
  for (std::size_t place = 0; place < own.size() && !together; ++place) {
    copy(out + block_sizes_.out_start(own[place]), found, outs[place]);
    found += outs[place];
  }
  return Status::kDone;
}

}  // namespace parallel_state
