#include "hosts_group.h"

#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "copy.h"
#include "interrupt.h"

namespace parallel_state {
namespace {

constexpr char kForeignText[] = "it sent bytes that are no message of this version";
constexpr std::int64_t kSliceNs = 20'000'000;
constexpr std::int64_t kNoticeNs = 200'000'000;  // NOTICE_S of liveness/health.py
constexpr std::uint64_t kDirectBytes = 64 << 10;
constexpr std::uint32_t kMovesAtOnce = 64;
constexpr std::size_t kCopiedBytes = 1 << 20;
constexpr std::size_t kMostKept = 1 << 20;
constexpr std::uint64_t kPieceBytes = 4 << 20;
constexpr std::uint64_t kSmallBytes = 32 << 10;

// A rank may give up after it had sent its part.
void read_failure(Link& link) {
  if (!link.in.is_idle() || link.is_broken() || link.is_in_trouble()) return;
  CallRecord head;
  const ssize_t bytes = recv(link.descriptors()[0], &head, sizeof head, MSG_PEEK | MSG_DONTWAIT);
  if (bytes != static_cast<ssize_t>(sizeof head) || head.magic != CallRecord::kMagic) return;
  if (head.kind != CallRecord::kFailure) return;
  link.in.listen();
  link.read();
}

}  // namespace

char* HostsGroup::Scratch::take(std::size_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    bytes_ = 0;
    memory_.reset(new char[bytes]);
    bytes_ = bytes;
  }
  return memory_.get();
}

HostsGroup::HostsGroup(HostGroup& local, GroupLiveness& liveness, int rank, std::vector<int> host_of_rank,
                       std::unique_ptr<Connections> connections, bool meshed, bool rounded, WaitPolicy policy)
    : Group(rank, static_cast<int>(host_of_rank.size())),
      local_(local),
      liveness_(liveness),
      host_of_rank_([&] {
        std::vector<int> numbers, of_rank;
        for (const int host : host_of_rank) {
          const auto found = std::find(numbers.begin(), numbers.end(), host);
          of_rank.push_back(static_cast<int>(found - numbers.begin()));
          if (found == numbers.end()) numbers.push_back(host);
        }
        return of_rank;
      }()),
      connections_(std::move(connections)),
      meshed_(meshed),
      rounded_(rounded),
      policy_(policy),
      ended_(new std::vector<std::atomic<std::uint8_t>>(host_of_rank.size())) {
  hosts_ = 1 + *std::max_element(host_of_rank_.begin(), host_of_rank_.end());
  ranks_.resize(static_cast<std::size_t>(hosts_));
  for (int each = 0; each < size_; ++each) {
    ranks_[static_cast<std::size_t>(host_of_rank_[static_cast<std::size_t>(each)])].push_back(each);
  }
  for (const auto& ranks : ranks_) order_.insert(order_.end(), ranks.begin(), ranks.end());
  is_in_order_ = std::is_sorted(order_.begin(), order_.end());
  host_ = host_of_rank_[static_cast<std::size_t>(rank)];
  place_ = place_of(rank);
  const bool is_even =
      std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& ranks) { return ranks.size() == ranks_[0].size(); });
  has_lanes_ = meshed && hosts_ != size_ && is_even;
  has_subtrees_ = is_even && is_in_order_ && (size_ & (size_ - 1)) == 0 && hosts_ <= kMaxRanks;
  for (auto* scratch : {&parts_, &rounded_parts_}) scratch->resize(kTurns);
  padded_.resize(2 * kTurns);
  received_.resize(static_cast<std::size_t>(kTurns * hosts_));
  sources_.resize(static_cast<std::size_t>(hosts_));
  wide_.resize(static_cast<std::size_t>(hosts_));
  local_.be_part();
  local_.set_side_work(connections_.get());
}

HostsGroup::~HostsGroup() {
  stop_listening();
  local_.set_side_work(nullptr);
}

void HostsGroup::listen_to(std::shared_ptr<control::EndListeners> source, std::vector<int> ranks) {
  const auto note = [this](int rank, int, bool died) {
    if (rank >= size_ || rank == rank_) return;
    // Release: a wait that reads any_died_ also reads which rank died.
    (*ended_)[static_cast<std::size_t>(rank)].store(died ? kDied : kLeft, std::memory_order_release);
    if (died) any_died_.store(true, std::memory_order_release);
  };
  listener_ = std::make_unique<EndWatch>(std::move(source), std::move(ranks), note);
}

void HostsGroup::stop_listening() { listener_.reset(); }

int HostsGroup::place_of(int rank) const {
  if (!is_here(rank)) return -1;
  const auto& own = local_ranks();
  return static_cast<int>(std::find(own.begin(), own.end(), rank) - own.begin());
}

bool HostsGroup::has_left(int rank) const {
  return is_here(rank) ? liveness_.has_left(place_of(rank)) : end_of(rank) == kLeft;
}

Loss HostsGroup::loss(int rank) const {
  if (is_here(rank)) {
    Loss found = liveness_.loss(place_of(rank));
    if (found.reporter >= 0) {  // its suspect is a rank of the whole group
      found.reporter = local_ranks()[static_cast<std::size_t>(found.reporter)];
    } else if (found.rank >= 0 && found.rank != kOutside) {
      found.rank = local_ranks()[static_cast<std::size_t>(found.rank)];
    }
    return found;
  }
  if (const int end = end_of(rank); end != kAlive) return Loss(rank, -1, end == kLeft ? 1 : 0);
  return liveness_.is_doomed() ? Loss(kOutside) : Loss();
}

void HostsGroup::begin(Kind kind, std::uint64_t size, Method method, double timeout_s, std::uint64_t digest,
                       int reduction, int root) {
  make_record(kind, size, method, digest, reduction, root);
  const double most_s = std::min(timeout_s, 1e9);
  deadline_ns_ = now_ns() + static_cast<std::int64_t>(most_s * 1e9);
  // Earlier than the local ranks that wait for this one, so that they get its failure.
  waits_until_ns_ = deadline_ns_ - static_cast<std::int64_t>(std::min(1.0, most_s / 10) * 1e9);
  noticed_ns_ = 0;
  was_left_ = false;
  connections_->begin(&record_);
  local_.tell(told_);
  local_.measure(measures_);
}

double HostsGroup::left_s() { return std::max(1e-3, static_cast<double>(deadline_ns_ - now_ns()) * 1e-9); }

Status HostsGroup::wait_until(bool (*is_done)(const void*), const void* what) {
  if (is_done(what)) return Status::kDone;
  const bool gentle = waits_gently();
  const std::int64_t spin_ns = gentle ? kGentleSpinNs : policy_.spin_ns;
  std::int64_t started = 0, looked = 0;
  int yields = gentle ? 0 : policy_.yields, late = -1;
  std::uint32_t moves = 0;
  for (bool signal = false;;) {
    const bool moved = connections_->move();
    const std::int64_t now = started != 0 || measures_ ? now_ns() : 0;
    if (is_done(what)) {
      if (measures_ && started != 0) {
        waited_ns_ += now - started;
        if (late >= 0) last_ = late;
      }
      return Status::kDone;
    }
    if (Link* const link = connections_->trouble()) return blame(*link);
    if (moved && ++moves % kMovesAtOnce != 0) continue;
    if (started == 0) {
      started = looked = now_ns();
      continue;
    }
    RETURN_IF_FAILED(ends(now));
    if (now >= waits_until_ns_) {
      failure_.suspect = connections_->late();
      return Status::kTimedOut;
    }
    if (now - started < spin_ns) {
      pause_cpu();
      continue;
    }
    late = connections_->late();
    if (yields > 0) {
      --yields;
      sched_yield();
      continue;
    }
    if (interrupted(signal)) return Status::kInterrupted;
    RETURN_IF_FAILED(at_home_ended());
    if (now - looked >= kSliceNs) {
      looked = now;
      for (const auto& link : connections_->links()) read_failure(*link);
    }
    signal = connections_->sleep(std::min(kSliceNs, waits_until_ns_ - now));
  }
}

Status HostsGroup::wait_from(const std::vector<int>& ranks, std::uint32_t messages) {
  return wait([&] {
    return std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return link(rank).in.done() >= messages; });
  });
}

Status HostsGroup::wait_sent(const std::vector<int>& ranks, std::uint32_t messages) {
  return wait(
      [&] { return std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return link(rank).has_sent(messages); }); });
}

Status HostsGroup::finish() {
  RETURN_IF_FAILED(wait([&] { return connections_->is_idle(); }));
  for (const auto& link : connections_->links()) link->read_behind();
  Link* const failed = connections_->failed();
  return failed == nullptr ? Status::kDone : blame(*failed);
}

void HostsGroup::copy_meanwhile(void* out, const void* in, std::size_t bytes) {
  for (std::size_t start = 0; start < bytes; start += kCopiedBytes) {
    copy(static_cast<char*>(out) + start, static_cast<const char*>(in) + start, std::min(kCopiedBytes, bytes - start));
    if (bytes > kCopiedBytes) connections_->move();
  }
}

Status HostsGroup::ends(std::int64_t now) {
  if (!any_died_.load(std::memory_order_acquire) && !liveness_.is_doomed()) return Status::kDone;
  if (noticed_ns_ == 0) noticed_ns_ = now;
  return now - noticed_ns_ < kNoticeNs ? Status::kDone : blame_dead();
}

// Another rank may doom the group before this rank's control plane reports the death.
Status HostsGroup::blame_dead() {
  failure_.suspect = kOutside;
  const std::int64_t until = (noticed_ns_ != 0 ? noticed_ns_ : now_ns()) + kNoticeNs;
  for (;; connections_->sleep(1'000'000)) {
    for (int rank = size_ - 1; rank >= 0; --rank) {
      if (has_died(rank)) failure_.suspect = rank;
    }
    if (failure_.suspect != kOutside || now_ns() >= until) return Status::kPeerDied;
  }
}

Status HostsGroup::at_home_ended() {
  const Loss loss = liveness_.loss(place_);
  if (loss.reporter < 0) return is_alone() ? Status::kDone : at_home(local_.compare(left_s()));
  failure_.expected = {loss.expected};
  failure_.found = {loss.found};
  failure_.misfit = loss.misfit;
  return take_failure(loss.reporter, loss.rank, static_cast<Status>(loss.status));
}

Status HostsGroup::take_failure(int reporter, int suspect, Status status) {
  failure_.suspect = suspect;
  failure_.reporter = -1;
  if (status != Status::kPeerDied) {
    failure_.reporter = local_ranks()[static_cast<std::size_t>(reporter)];
  } else if (suspect >= 0 && suspect < size_) {
    std::uint8_t end = kAlive;
    (*ended_)[static_cast<std::size_t>(suspect)].compare_exchange_strong(end, kLeft, std::memory_order_acq_rel);
  }
  return status;
}

Status HostsGroup::blame(Link& link) {
  failure_.suspect = link.rank;
  switch (link.in.state()) {
    case Inbox::State::kFailed: {
      const FailureNote& why = link.in.failure();
      if (!is_sound(why)) {
        text_ = kForeignText;
        return Status::kBroken;
      }
      failure_ = why;
      const auto status = static_cast<Status>(why.status);
      if (status != Status::kPeerDied) {
        if (why.reporter < 0) failure_.reporter = link.rank;
        return status;
      }
      failure_.reporter = -1;
      if (why.suspect < 0 || why.suspect >= size_ || !is_here(why.suspect) || dies_soon(why.suspect)) {
        learn_end(why.suspect);
        return status;
      }
      failure_.suspect = link.rank;
      return Status::kUnreachable;
    }
    case Inbox::State::kDiffers: show_difference(link.in.head()); return Status::kMismatch;
    case Inbox::State::kLeft:
      (*ended_)[static_cast<std::size_t>(link.rank)].store(kLeft, std::memory_order_release);
      return Status::kPeerDied;
    case Inbox::State::kForeign: text_ = kForeignText; return Status::kBroken;
    default: break;
  }
  return blame_broken(link);
}

bool HostsGroup::is_sound(const FailureNote& why) const {
  const auto is_rank = [this](int rank) { return rank >= -1 && rank < size_; };
  const auto is_count = [](int count) { return count >= 0 && count <= kMaxRanks; };
  const bool is_failure =
      why.status > static_cast<int>(Status::kDone) && why.status <= static_cast<int>(Status::kTooLarge) &&
      why.status != static_cast<int>(Status::kUnsupported) && why.status != static_cast<int>(Status::kBusy);
  return is_failure && is_rank(why.reporter) && is_rank(why.misfit.from) && is_rank(why.misfit.to) &&
         is_count(why.expected.count) && is_count(why.found.count) &&
         (is_rank(why.suspect) || (why.suspect == kOutside && why.status == static_cast<int>(Status::kPeerDied)));
}

bool HostsGroup::dies_soon(int rank) const {
  if (rank == rank_) return false;
  for (const std::int64_t until = now_ns() + kNoticeNs; now_ns() < until; connections_->sleep(1'000'000)) {
    if (has_died(rank)) return true;
  }
  return false;
}

// Another rank's report of an end can arrive before the end itself.
void HostsGroup::learn_end(int rank) {
  const auto& links = connections_->links();
  const auto found = std::find_if(links.begin(), links.end(), [&](const auto& each) { return each->rank == rank; });
  if (found == links.end()) return;
  Link& link = **found;
  for (const std::int64_t until = now_ns() + kNoticeNs; now_ns() < until; connections_->sleep(1'000'000)) {
    if (has_died(rank) || has_left(rank)) return;
    link.in.listen();
    if (!link.is_in_trouble()) link.read();
    if (link.in.state() == Inbox::State::kLeft)
      (*ended_)[static_cast<std::size_t>(rank)].store(kLeft, std::memory_order_release);
    if (link.is_in_trouble()) return;
  }
}

// A rank that failed within a message can't report why.
Status HostsGroup::blame_broken(Link& link) {
  for (const std::int64_t until = now_ns() + kNoticeNs; now_ns() < until; connections_->sleep(1'000'000)) {
    if (has_died(link.rank) || has_left(link.rank)) break;
    for (const auto& each : connections_->links()) {
      each->in.listen();
      if (!each->is_in_trouble()) each->read();
      if (each->in.state() == Inbox::State::kFailed) return blame(*each);
    }
    RETURN_IF_FAILED(at_home_ended());
  }
  failure_.suspect = link.rank;
  text_ = link.error();
  return has_died(link.rank) || has_left(link.rank) ? Status::kPeerDied : Status::kBroken;
}

void HostsGroup::show_difference(const CallRecord& other) {
  const bool ahead = other.sequence == record_.sequence + 1, behind = other.sequence + 1 == record_.sequence;
  const bool before = other.sequence == record_.sequence && other.told == record_.told;
  failure_.expected.told = before || behind ? record_.earlier : record_.told;
  failure_.found.told = before || ahead ? other.earlier : other.told;
  failure_.expected.count = failure_.found.count = 0;
}

Status HostsGroup::at_home(Status status) {
  if (measures_) {
    waited_ns_ += local_.waited_ns();
    if (local_.waited_ns() > 0) last_ = local_ranks()[static_cast<std::size_t>(local_.last())];
    local_.measure(true);
  }
  if (status == Status::kDone) return status;
  const auto rank_at = [&](int place) {
    return place >= 0 && place < local_size() ? local_ranks()[static_cast<std::size_t>(place)] : place;
  };
  failure_ = local_.failure();
  if (failure_.reporter >= 0) return take_failure(failure_.reporter, failure_.suspect, status);
  failure_.misfit.from = rank_at(failure_.misfit.from);
  failure_.misfit.to = rank_at(failure_.misfit.to);
  if (status == Status::kPeerDied && failure_.suspect == kOutside) return blame_dead();
  failure_.suspect = rank_at(failure_.suspect);
  return status;
}

void HostsGroup::give_up(Status status) {
  FailureNote why = failure_;
  const bool unreachable = status == Status::kUnreachable;  // other hosts see a death of this rank
  why.status = static_cast<int>(unreachable ? Status::kPeerDied : status);
  if (unreachable) why.suspect = rank_;
  connections_->end(&why);
}

void HostsGroup::fail(Status status, int suspect) {
  forget_failure();
  failure_.suspect = suspect;
  give_up(status);
}

Status HostsGroup::barrier(double timeout_s) {
  begin(Kind::kBarrier, 0, Method::kBarrier, timeout_s);
  if (!is_alone()) RETURN_IF_FAILED(at_home(local_.barrier(left_s())));
  if (is_lead()) {
    for_other_hosts([&](int host) {
      expect(at(host), nullptr, 0);
      send(at(host), nullptr, 0);
    });
    RETURN_IF_FAILED(finish());
  }
  return is_alone() ? Status::kDone : at_home(local_.broadcast(nullptr, 0, 0, left_s()));
}

// Reveals mismatches within the host before this rank waits for another host.
Status HostsGroup::pass() { return is_alone() ? Status::kDone : at_home(local_.pass(left_s())); }

void HostsGroup::find_tree(int root, int* parent, std::vector<int>* children) const {
  const int place = (host_ - root + hosts_) % hosts_;
  int step = 1;
  while (step < hosts_ && (place & step) == 0) step *= 2;
  *parent = place == 0 ? -1 : (place - step + root) % hosts_;
  children->clear();
  while (step > 1) {
    step /= 2;
    if (place + step < hosts_) children->push_back((place + step + root) % hosts_);
  }
}

Status HostsGroup::broadcast(void* data, std::size_t bytes, int src, double timeout_s) {
  begin(Kind::kBroadcast, bytes, Method::kBroadcast, timeout_s, 0, -1, src);
  if (host_ != host_of_rank_[static_cast<std::size_t>(src)]) RETURN_IF_FAILED(pass());
  chunks_.clear();
  cut(static_cast<char*>(data), bytes);
  return send_to_all(bytes, src);
}

void HostsGroup::cut(char* data, std::uint64_t bytes) {
  std::uint64_t start = 0;
  do {
    chunks_.push_back({data + start, std::min(kPieceBytes, bytes - start)});
  } while ((start += kPieceBytes) < bytes);
}

// If only leads are connected, the root is the lead of the source's host.
Status HostsGroup::send_to_all(std::uint64_t bytes, int src) {
  const int root_host = host_of_rank_[static_cast<std::size_t>(src)], root = meshed_ ? src : at(root_host);
  int parent = root_host;
  children_.clear();
  if (bytes > kDirectBytes) {
    find_tree(root_host, &parent, &children_);
  } else if (host_ == root_host) {
    for_other_hosts([&](int host) { children_.push_back(host); });
  }
  const bool is_root = rank_ == root, receives = host_ != root_host && is_lead();
  peers_ = {parent == root_host ? root : parent < 0 ? rank_ : at(parent)};
  std::uint32_t awaited = receives ? link(peers_[0]).in.expected() : 0;
  for (const Piece& chunk : chunks_) {
    if (receives) expect(peers_[0], chunk.address, chunk.bytes);
  }
  for (const Piece& chunk : chunks_) {
    const auto at_home_now = [&] {
      if (is_alone()) return Status::kDone;
      const int source = host_ == root_host ? place_of(src) : 0;
      return at_home(local_.broadcast(chunk.address, chunk.bytes, source, left_s()));
    };
    const bool has_it = is_root && rank_ == src;
    if (is_root && !has_it) RETURN_IF_FAILED(at_home_now());
    if (receives) RETURN_IF_FAILED(wait_from(peers_, ++awaited));
    if (is_root || receives) {
      for (const int child : children_) send(at(child), chunk.address, chunk.bytes);
    }
    if (!is_root || has_it) RETURN_IF_FAILED(at_home_now());
  }
  return finish();
}

Status HostsGroup::send_tensors(const Piece* tensors, std::size_t count, std::uint64_t bytes, int src) {
  const auto* const end = tensors + count;
  const auto is_copied = [](const Piece& tensor) { return tensor.bytes <= kSmallBytes; };
  const auto add = [&](std::uint64_t size, const Piece& tensor) {
    return size + (is_copied(tensor) ? tensor.bytes : 0);
  };
  char* const copies = blocks_.take(std::min(kPieceBytes, std::accumulate(tensors, end, std::uint64_t{0}, add)));
  while (tensors != end) {
    const auto* const first = tensors;
    std::uint64_t copied = 0;
    bool joins = false;
    chunks_.clear();
    for (; tensors != end && add(copied, *tensors) <= kPieceBytes; ++tensors) {
      if (tensors->bytes == 0) continue;
      if (!is_copied(*tensors)) {
        cut(static_cast<char*>(tensors->address), tensors->bytes);
      } else {
        if (!joins) chunks_.push_back({copies + copied, 0});
        chunks_.back().bytes += tensors->bytes;
        if (rank_ == src) std::memcpy(copies + copied, tensors->address, tensors->bytes);
        copied += tensors->bytes;
      }
      joins = is_copied(*tensors);
    }
    RETURN_IF_FAILED(send_to_all(bytes, src));
    const char* from = copies;
    for (const auto* tensor = first; tensor != tensors && rank_ != src; ++tensor) {
      if (!is_copied(*tensor) || tensor->bytes == 0) continue;
      std::memcpy(tensor->address, from, tensor->bytes);
      from += tensor->bytes;
    }
  }
  return Status::kDone;
}

namespace {

struct MessageSizes {
  std::uint64_t head_bytes, tensor_bytes;
};

}  // namespace

Status HostsGroup::send_message(const std::vector<Piece>& pieces, int heads, double timeout_s) {
  const auto tensors = pieces.begin() + heads;
  const auto total = [](std::uint64_t bytes, const Piece& piece) { return bytes + piece.bytes; };
  MessageSizes sizes{};
  sizes.head_bytes = std::accumulate(pieces.begin(), tensors, sizes.head_bytes, total);
  sizes.tensor_bytes = std::accumulate(tensors, pieces.end(), sizes.tensor_bytes, total);
  const bool is_packed = sizes.tensor_bytes <= kPackedBytes;
  forget_message();
  message_.resize(sizeof sizes + sizes.head_bytes + (is_packed ? sizes.tensor_bytes : 0));
  std::memcpy(message_.data(), &sizes, sizeof sizes);
  char* to = message_.data() + sizeof sizes;
  for (auto piece = pieces.begin(); piece != (is_packed ? pieces.end() : tensors); ++piece) {
    if (piece->bytes != 0) std::memcpy(to, piece->address, piece->bytes);
    to += piece->bytes;
  }
  begin(Kind::kMessage, 0, Method::kNone, timeout_s, 0, -1, rank_);
  RETURN_IF_FAILED(share_message(message_.size(), rank_, 0));
  if (is_packed) return finish();
  return send_tensors(pieces.data() + heads, pieces.size() - heads, sizes.tensor_bytes, rank_);
}

Status HostsGroup::receive_message(int src, Taker& taker, Taken* taken, double timeout_s) {
  const std::uint64_t most_bytes = sizeof(MessageSizes) + taker.most_head_bytes() + kPackedBytes;
  if (!was_left_) {
    forget_message();
    begin(Kind::kMessage, 0, Method::kNone, timeout_s, 0, -1, src);
    if (host_ != host_of_rank_[static_cast<std::size_t>(src)]) RETURN_IF_FAILED(pass());
    RETURN_IF_FAILED(share_message(0, src, most_bytes));
  }
  const auto refuse = [&] {
    failure_.suspect = src;
    text_ = kForeignText;
    return Status::kBroken;
  };
  MessageSizes sizes{};
  if (message_.size() < sizeof sizes) return refuse();
  std::memcpy(&sizes, message_.data(), sizeof sizes);
  const std::uint64_t rest = message_.size() - sizeof sizes;
  if (sizes.head_bytes > rest) return refuse();
  const bool is_packed = sizes.tensor_bytes <= kPackedBytes;
  if (rest - sizes.head_bytes != (is_packed ? sizes.tensor_bytes : 0)) return refuse();
  const std::uint64_t found = sizes.head_bytes > taker.most_head_bytes() ? kHeadStart : sizes.head_bytes;
  char* const head = taker.head_buffer(found);
  const char* from = message_.data() + sizeof sizes;
  std::memcpy(head, from, found);
  from += sizes.head_bytes;
  *taken = {sizes.head_bytes, sizes.tensor_bytes, false};
  std::vector<Piece> places;
  std::vector<Loan> loans;
  const bool is_at_hand = is_packed && connections_->is_idle();
  was_left_ = false;
  if (!taker.take_head({head, found, sizes.head_bytes, sizes.tensor_bytes, is_at_hand, &loans}, &places)) {
    taken->is_refused = true;
    was_left_ = taker.leaves_message();
    failure_.suspect = src;
    RETURN_IF_FAILED(finish());
    return is_packed || was_left_ ? Status::kDone : Status::kFailed;
  }
  std::uint64_t wanted = 0;
  for (const Piece& place : places) wanted += place.bytes;
  if (wanted != sizes.tensor_bytes) return refuse();
  if (!is_packed) return send_tensors(places.data(), places.size(), sizes.tensor_bytes, src);
  for (const Piece& place : places) {
    if (place.bytes != 0) std::memcpy(place.address, from, place.bytes);
    from += place.bytes;
  }
  return finish();
}

void HostsGroup::forget_message() {
  if (message_.capacity() > kMostKept) message_ = {};
}

Status HostsGroup::share_message(std::uint64_t bytes, int src, std::uint64_t most_bytes) {
  const int root_host = host_of_rank_[static_cast<std::size_t>(src)], root = meshed_ ? src : at(root_host);
  const auto room = [&](std::uint64_t found) {
    if (found > most_bytes) return static_cast<char*>(nullptr);
    message_.resize(found);
    return message_.data();
  };
  const auto too_large = [&](std::uint64_t found) {
    failure_.suspect = src;
    failure_.misfit = {src, rank_, found, most_bytes};
    return Status::kTooLarge;
  };
  const auto at_home_now = [&](int source) {
    if (is_alone()) return Status::kDone;
    const Status status = at_home(local_.broadcast_sized(message_.data(), bytes, source, room, left_s()));
    return status == Status::kTooLarge && failure_.reporter < 0 ? too_large(failure_.misfit.sent_bytes) : status;
  };
  const auto send_on = [&] { for_other_hosts([&](int host) { send(at(host), message_.data(), message_.size()); }); };
  if (host_ == root_host) {
    if (rank_ == src && rank_ == root) send_on();
    RETURN_IF_FAILED(at_home_now(place_of(src)));
    if (rank_ != src && rank_ == root) send_on();
    return Status::kDone;
  }
  if (!is_lead()) return at_home_now(0);
  Inbox& inbox = link(root).in;
  inbox.expect_any();
  RETURN_IF_FAILED(wait([&] { return inbox.state() == Inbox::State::kChosen; }));
  bytes = inbox.head().bytes;
  if (room(bytes) == nullptr) return too_large(bytes);
  inbox.take(message_.data());
  peers_ = {root};
  RETURN_IF_FAILED(wait_from(peers_, 1));
  return at_home_now(0);
}

Status HostsGroup::compare(double timeout_s) {
  forget_failure();
  local_.tell(told_);
  return is_alone() ? Status::kDone : at_home(local_.compare(timeout_s));
}

}  // namespace parallel_state
