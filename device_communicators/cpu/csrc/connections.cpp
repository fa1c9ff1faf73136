#include "connections.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace parallel_state {
namespace {

constexpr int kPiecesAtOnce = 16;
constexpr char kEnded[] = "this rank ended the connection";

}  // namespace

void Inbox::begin(const CallRecord* own) {
  own_ = own;
  expected_.clear();
  done_ = 0;
  listens_ = false;
}

void Inbox::expect(char* at, std::uint64_t bytes) {
  expected_.push_back({at, bytes, false});
  if (state_ == State::kHead) parse();
}

void Inbox::expect_any() {
  expected_.push_back({nullptr, 0, true});
  if (state_ == State::kHead) parse();
}

void Inbox::take(char* at) {
  begin_body(at, head_.bytes);
  parse();
}

int Inbox::room(iovec* pieces) {
  int count = 0;
  if (state_ == State::kBody) {
    if (missing_ == 0) return 0;
    pieces[count++] = {place_, missing_};
  } else if (state_ != State::kHead || (is_idle() && !listens_)) {
    return 0;
  }
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (begin_ > 0) {
    std::memmove(&buffer_[0], &buffer_[begin_], end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (end_ < kBufferBytes) pieces[count++] = {&buffer_[end_], kBufferBytes - end_};
  return count;
}

void Inbox::came(std::size_t bytes) {
  std::uint64_t direct = 0;
  if (state_ == State::kBody) {
    direct = std::min<std::uint64_t>(missing_, bytes);
    place_ += direct;
    missing_ -= direct;
  }
  end_ += bytes - direct;
  parse();
}

void Inbox::stripe_came(std::size_t index, std::size_t bytes) {
  Stripe& stripe = stripes_[index];
  stripe.place += bytes;
  stripe.missing -= bytes;
  if (stripe.missing == 0 && --stripes_left_ == 0) parse();
}

void Inbox::begin_body(char* at, std::uint64_t bytes) {
  state_ = State::kBody;
  place_ = at;
  const std::size_t others = bytes < striped_bytes_ || is_failure_ ? 0 : stripes_.size();
  missing_ = divide(bytes, others, [&](std::size_t index, std::uint64_t begin, std::uint64_t end) {
    stripes_[index] = {at + begin, end - begin};
    ++stripes_left_;
  });
}

void Inbox::parse() {
  for (;;) {
    if (state_ == State::kBody) {
      const std::uint64_t size = std::min<std::uint64_t>(missing_, end_ - begin_);
      if (size > 0) {
        std::memcpy(place_, &buffer_[begin_], size);
        place_ += size;
      }
      begin_ += size;
      missing_ -= size;
      if (missing_ > 0 || stripes_left_ > 0) return;
      state_ = is_failure_ ? State::kFailed : State::kHead;
      if (!is_failure_) ++done_;
      continue;
    }
    if (state_ != State::kHead || end_ - begin_ < sizeof head_) return;
    CallRecord head;
    std::memcpy(&head, &buffer_[begin_], sizeof head);
    const bool is_failure = head.magic == CallRecord::kMagic && head.kind == CallRecord::kFailure;
    if (is_idle() && !listens_ && !is_failure) return;
    head_ = head;
    if (head_.magic != CallRecord::kMagic) {
      state_ = State::kForeign;
    } else if (head_.kind == CallRecord::kFailure) {
      if (head_.bytes != sizeof failure_) {
        state_ = State::kForeign;
        return;
      }
      begin_ += sizeof head_;
      is_failure_ = true;
      begin_body(reinterpret_cast<char*>(&failure_), head_.bytes);
    } else if (head_.kind == CallRecord::kLeave) {
      state_ = State::kLeft;
    } else if (is_idle()) {
      // The head belongs to a later message; else the calls differ.
      if (head_.sequence == own_->sequence && head_.history != own_->history) state_ = State::kDiffers;
      listens_ = false;
    } else if (!is_same_call(*own_, head_) || (!expected_[done_].is_any && head_.bytes != expected_[done_].bytes)) {
      state_ = State::kDiffers;
    } else {
      begin_ += sizeof head_;
      if (expected_[done_].is_any) {
        state_ = State::kChosen;
      } else {
        begin_body(expected_[done_].at, head_.bytes);
      }
    }
  }
}

void Outbox::begin() {
  messages_.clear();
  done_ = 0;
}

void Outbox::post(const CallRecord& head, const char* body, std::uint64_t bytes) {
  messages_.push_back({head, body, bytes, 0});
}

int Outbox::pieces(iovec* pieces, int most) const {
  int count = 0;
  for (std::size_t at = done_; at < messages_.size() && count + 2 <= most; ++at) {
    const Message& each = messages_[at];
    const std::uint64_t in_head = std::min<std::uint64_t>(each.sent, sizeof each.head);
    const std::uint64_t in_body = each.sent - in_head;
    if (in_head < sizeof each.head) {
      const char* const head = reinterpret_cast<const char*>(&each.head) + in_head;
      pieces[count++] = {const_cast<char*>(head), sizeof each.head - in_head};
    }
    if (in_body < each.bytes) pieces[count++] = {const_cast<char*>(each.body) + in_body, each.bytes - in_body};
  }
  return count;
}

void Outbox::sent(std::size_t bytes) {
  while (done_ < messages_.size()) {
    Message& first = messages_[done_];
    const std::uint64_t missing = sizeof first.head + first.bytes - first.sent;
    first.sent += std::min<std::uint64_t>(bytes, missing);
    if (bytes < missing) return;
    bytes -= missing;
    ++done_;
  }
}

bool Outbox::drop() {
  const bool is_whole = is_idle() || messages_[done_].sent == 0;
  messages_.resize(done_);
  return is_whole;
}

Link::Link(int rank, std::vector<int> descriptors)
    : rank(rank), descriptors_(std::move(descriptors)), stripes_(descriptors_.size() - 1) {
  if (!stripes_.empty()) in.stripe(stripes_.size(), kStripedBytes);
}

Link::~Link() {
  for (const int descriptor : descriptors_) close(descriptor);
}

void Link::begin(const CallRecord* own) {
  in.begin(own);
  receives_before_ = receives;
  out_.begin();
}

void Link::send(const CallRecord& head, const void* body, std::uint64_t bytes) {
  const auto* const at = static_cast<const char*>(body);
  CallRecord own = head;
  own.bytes = bytes;
  const std::size_t others = bytes < kStripedBytes ? 0 : stripes_.size();
  const bool was_idle = out_.is_idle();
  const std::uint64_t first = divide(bytes, others, [&](std::size_t index, std::uint64_t begin, std::uint64_t end) {
    stripes_[index].add(at + begin, end - begin, out_.posted() + 1);
    ++striped_;
  });
  out_.post(own, at, first);
  if (was_idle || others != 0) write();
}

void Link::read_behind() {
  if (in.expected() == 0 || receives != receives_before_ || broken_ || is_in_trouble()) return;
  in.listen();
  read();
}

bool Link::has_sent(std::uint32_t count) const {
  if (out_.done() < count) return false;
  return std::all_of(stripes_.begin(), stripes_.end(),
                     [count](const auto& stripe) { return stripe.is_idle() || stripe.owner() > count; });
}

// The peer may have reported its failure first.
void Link::break_off(int error) {
  broken_ = true;
  broken_by_ = in_words(error);
  in.listen();
}

bool Link::write() {
  bool moved = false;
  while (!out_.is_idle() && !broken_ && error_.empty()) {
    iovec pieces[kPiecesAtOnce];
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = static_cast<std::size_t>(out_.pieces(pieces, kPiecesAtOnce));
    const ssize_t sent = sendmsg(descriptors_[0], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (!would_block(errno)) break_off(errno);
      break;
    }
    ++sends;
    moved = true;
    out_.sent(static_cast<std::size_t>(sent));
  }
  for (std::size_t index = 0; index < stripes_.size() && !broken_ && error_.empty(); ++index) {
    const int error = stripes_[index].write(descriptors_[index + 1], &moved, [this](std::uint32_t) { --striped_; });
    if (error != 0) break_off(error);
  }
  return moved;
}

bool Link::read() {
  bool moved = false;
  for (std::size_t index = 0; index < stripes_.size(); ++index) moved |= read_stripe(index);
  iovec pieces[2];
  const int count = in.room(pieces);
  if (count == 0) {
    if (broken_ && in.state() == Inbox::State::kHead) error_ = broken_by_;
    return moved;
  }
  const ssize_t come = count == 1 ? recv(descriptors_[0], pieces[0].iov_base, pieces[0].iov_len, MSG_DONTWAIT)
                                  : readv(descriptors_[0], pieces, count);
  if (come > 0) {
    ++receives;
    in.came(static_cast<std::size_t>(come));
    return true;
  }
  if (come == 0) {
    error_ = broken_ ? broken_by_ : "Connection closed by peer";
  } else if (!would_block(errno)) {
    error_ = in_words(errno);
  } else if (broken_) {
    error_ = broken_by_;
  }
  return moved;
}

bool Link::read_stripe(std::size_t index) {
  Inbox::Stripe& stripe = in.stripe_at(index);
  if (stripe.missing == 0 || !error_.empty()) return false;
  const ssize_t come = recv(descriptors_[index + 1], stripe.place, stripe.missing, MSG_DONTWAIT);
  if (come <= 0) {
    if (come == 0) error_ = "Connection closed by peer";
    if (come < 0 && !would_block(errno)) error_ = in_words(errno);
    return false;
  }
  in.stripe_came(index, static_cast<std::size_t>(come));
  return true;
}

void Link::poll_for(std::vector<pollfd>* polled) const {
  auto& inbox = const_cast<Inbox&>(in);
  iovec pieces[2];
  add_polled(polled, descriptors_[0], !out_.is_idle() && !broken_, wants_to_read() && inbox.room(pieces) > 0);
  for (std::size_t index = 0; index < stripes_.size(); ++index) {
    add_polled(polled, descriptors_[index + 1], !stripes_[index].is_idle() && !broken_,
               inbox.stripe_at(index).missing > 0);
  }
}

void Link::leave() {
  if (is_sending() || broken_) return;
  CallRecord head;
  head.kind = CallRecord::kLeave;
  static_cast<void>(::send(descriptors_[0], &head, sizeof head, MSG_NOSIGNAL | MSG_DONTWAIT));
  broken_ = true;
  broken_by_ = kEnded;
}

void Link::end(const FailureNote* why) {
  // A note can't follow a part of a striped body.
  if (out_.drop() && striped_ == 0 && why != nullptr && !broken_) {
    CallRecord head;
    head.kind = CallRecord::kFailure;
    head.bytes = sizeof *why;
    out_.post(head, reinterpret_cast<const char*>(why), sizeof *why);
    write();
    out_.drop();
  }
  for (auto& stripe : stripes_) stripe.clear();
  striped_ = 0;
  if (!broken_) broken_by_ = kEnded;
  broken_ = true;
  for (const int descriptor : descriptors_) shutdown(descriptor, SHUT_WR);
}

Connections::Connections(int size, const int* ranks, const int* descriptors, int count)
    : by_rank_(static_cast<std::size_t>(size)) {
  std::vector<std::vector<int>> of_rank(static_cast<std::size_t>(size));
  for (int at = 0; at < count; ++at) of_rank[static_cast<std::size_t>(ranks[at])].push_back(descriptors[at]);
  for (int rank = 0; rank < size; ++rank) {
    auto& of_one = of_rank[static_cast<std::size_t>(rank)];
    if (of_one.empty()) continue;
    links_.push_back(std::make_unique<Link>(rank, std::move(of_one)));
    by_rank_[static_cast<std::size_t>(rank)] = links_.back().get();
  }
}

void Connections::begin(const CallRecord* own) {
  for (const auto& link : links_) link->begin(own);
}

bool Connections::move() {
  bool moved = false;
  for (const auto& link : links_) {
    if (link->is_sending()) {
      moved |= link->write();
    }
    // A failed rank reads no more, but reports why.
    link->in.listen(link->is_sending() || link->is_broken());
    if (link->wants_to_read()) moved |= link->read();
  }
  return moved;
}

bool Connections::is_idle() const {
  return std::all_of(links_.begin(), links_.end(),
                     [](const auto& link) { return !link->is_sending() && link->in.is_idle(); });
}

int Connections::late() const {
  const Link* sending = nullptr;
  for (const auto& link : links_) {
    if (!link->in.is_idle()) return link->rank;
    if (sending == nullptr && link->is_sending()) sending = link.get();
  }
  return sending == nullptr ? -1 : sending->rank;
}

Link* Connections::trouble() {
  for (const auto& link : links_) {
    if (link->is_in_trouble()) return link.get();
  }
  return nullptr;
}

bool Connections::sleep(std::int64_t limit_ns) {
  polled_.clear();
  for (const auto& link : links_) link->poll_for(&polled_);
  const int limit_ms = static_cast<int>(std::max<std::int64_t>(1, limit_ns / 1'000'000));
  return poll(polled_.data(), polled_.size(), limit_ms) < 0 && errno == EINTR;
}

Link* Connections::failed() {
  for (const auto& link : links_) {
    if (link->in.state() == Inbox::State::kFailed) return link.get();
  }
  return nullptr;
}

void Connections::leave() {
  for (const auto& link : links_) link->leave();
}

void Connections::end(const FailureNote* why) {
  for (const auto& link : links_) link->end(why);
}

void Connections::close() {
  for (const auto& link : links_) {
    for (const int descriptor : link->descriptors()) shutdown(descriptor, SHUT_WR);
  }
}

}  // namespace parallel_state
