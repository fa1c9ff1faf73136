#include "streams.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "forks.h"
#include "wait.h"

namespace parallel_state {
namespace {

constexpr std::size_t kHead = 32;  // magic, bytes received so far, kind, bytes of the text and the body, four unused
constexpr char kAtOnce[] = "PSH\1", kAnnounced[] = "PSHA", kAskedFor[] = "PSHB";
constexpr std::uint64_t kMessageBytes = 256;  // the memory that a kept message takes beside its body
constexpr std::size_t kBufferBytes = 64 << 10;
constexpr std::uint32_t kMostTextBytes = 1 << 10;
static_assert(kHead + kMostTextBytes <= kBufferBytes, "a head and its text fit the buffer");
constexpr std::uint64_t kAnsweredBytes = 64 << 10;  // ANSWERED_BYTES of pairs.py
constexpr char kNoMemory[] = "there was no memory for a message";
constexpr int kPiecesAtOnce = 16;
constexpr std::int64_t kTwoWaitNs = 1'000'000;

std::string in_words(int error) {
  const bool broken = error == ECONNRESET || error == EPIPE || error == ECONNABORTED || error == ECONNREFUSED;
  return std::string(strerror(error)) + (broken ? " (closed by peer)" : "");
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

template <typename Number>
Number number_at(const char* at) {
  Number number;
  std::memcpy(&number, at, sizeof number);
  return number;
}

std::string other_size(std::uint64_t expected, std::uint64_t found) {
  return std::to_string(expected) + " bytes were to come, and " + std::to_string(found) + " came";
}

}  // namespace

Stream::Stream(Streams& all, int rank, int descriptor, std::uint64_t early_bytes)
    : rank(rank), all_(all), descriptor_(descriptor), early_limit_(early_bytes), buffer_(kBufferBytes) {}

bool Stream::is_striped(std::uint64_t bytes) const { return !stripes_.empty() && bytes >= all_.striped_bytes_; }

std::uint64_t Stream::stripe_bytes(std::uint64_t bytes) const {
  const std::uint64_t connections = stripes_.size() + 1;
  return (bytes + connections - 1) / connections;
}

bool Stream::has_room(std::uint64_t bytes) {
  const std::uint64_t needed = bytes + kMessageBytes;
  if (sent_bytes_ - received_bytes_ + needed > early_limit_) read();  // the other side may have received some since
  return sent_bytes_ - received_bytes_ + needed <= early_limit_;
}

std::string Stream::head_of(const char* magic, std::uint32_t kind, const std::string& text, std::uint64_t bytes) const {
  std::string head(kHead, '\0');
  const auto text_bytes = static_cast<std::uint32_t>(text.size());
  std::memcpy(&head[0], magic, 4);
  std::memcpy(&head[4], &taken_bytes_, 8);
  std::memcpy(&head[12], &kind, 4);
  std::memcpy(&head[16], &text_bytes, 4);
  std::memcpy(&head[20], &bytes, 8);
  return head += text;
}

void Stream::send(std::string head, const char* body, std::uint64_t bytes, Transfer* transfer) {
  std::uint64_t own = bytes;
  if (is_striped(bytes)) {
    const std::uint64_t step = own = stripe_bytes(bytes);
    std::uint64_t start = step;
    for (Stripe& stripe : stripes_) {
      const std::uint64_t size = std::min(step, bytes - start);
      if (size == 0) break;
      stripe.sends.push_back({body + start, size, transfer});
      ++striped_;
      ++transfer->left;
      start += size;
    }
  }
  sends_.push_back({std::move(head), body, own, 0, transfer});
  write();
}

void Stream::send_at_once(std::uint32_t kind, const std::string& text, const char* body, std::uint64_t bytes,
                          Transfer* transfer) {
  sent_bytes_ += bytes + kMessageBytes;
  send(head_of(kAtOnce, kind, text, bytes), body, bytes, transfer);
}

bool Stream::write() {
  bool moved = write_messages();
  for (Stripe& stripe : stripes_) moved |= write_stripe(stripe);
  return moved;
}

bool Stream::write_stripe(Stripe& stripe) {
  bool moved = false;
  while (!stripe.sends.empty() && error_.empty() && broken_.empty()) {
    Stripe::Piece& first = stripe.sends.front();
    const ssize_t sent = ::send(stripe.descriptor, first.at, first.bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (!would_block(errno)) broken_ = in_words(errno);
      return moved;
    }
    moved = true;
    first.at += sent;
    first.bytes -= static_cast<std::uint64_t>(sent);
    if (first.bytes > 0) continue;
    Transfer* const transfer = first.transfer;
    stripe.sends.pop_front();
    --striped_;
    all_.part_done(transfer);
  }
  return moved;
}

bool Stream::write_messages() {
  bool moved = false;
  while (!sends_.empty() && error_.empty() && broken_.empty()) {
    iovec pieces[kPiecesAtOnce];
    int count = 0;
    for (const Outgoing& each : sends_) {
      if (count + 2 > kPiecesAtOnce) break;
      const std::uint64_t in_head = std::min<std::uint64_t>(each.sent, each.head.size());
      const std::uint64_t in_body = each.sent - in_head;
      if (in_head < each.head.size()) {
        pieces[count++] = {const_cast<char*>(each.head.data()) + in_head, each.head.size() - in_head};
      }
      if (in_body < each.bytes) pieces[count++] = {const_cast<char*>(each.body) + in_body, each.bytes - in_body};
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = static_cast<std::size_t>(count);
    const ssize_t sent = sendmsg(descriptor_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (!would_block(errno)) broken_ = in_words(errno);
      return moved;
    }
    moved = true;
    auto left = static_cast<std::uint64_t>(sent);
    while (!sends_.empty()) {
      Outgoing& first = sends_.front();
      const std::uint64_t missing = first.head.size() + first.bytes - first.sent;
      first.sent += std::min(left, missing);
      if (left < missing) break;
      left -= missing;
      Transfer* const transfer = first.transfer;
      sends_.pop_front();
      if (transfer != nullptr) all_.part_done(transfer);
    }
  }
  return moved;
}

// The other side may have said why before it left.
void Stream::read_last() {
  while (read()) {
  }
  fail(broken_);
}

void Stream::receive(std::uint32_t kind, Transfer* transfer, bool is_answer) {
  const Incoming incoming{transfer, is_answer};
  const auto found = all_.matcher_.post(rank, kind, incoming);
  if (found && (*found)->is_whole) return deliver(incoming, **found);
  if (found) (*found)->receiver = incoming;
  ++receiving_;
}

// Gives a message that came early to its receive.
void Stream::deliver(const Incoming& incoming, const Early& message) {
  if (message.announced) return ask(incoming.transfer, message.kind, message.text, message.bytes);
  char* to = nullptr;
  if (!match(incoming, message.kind, message.text, message.bytes, &to)) return;
  if (to != nullptr && message.bytes > 0) std::memcpy(to, message.body.get(), message.bytes);
  all_.part_done(incoming.transfer);
}

void Stream::expect(char* at, std::uint64_t bytes) {
  in_body_ = true;
  place_ = at;
  missing_ = bytes;
  if (is_striped(bytes)) {
    const std::uint64_t step = missing_ = stripe_bytes(bytes);
    std::uint64_t start = step;
    for (Stripe& stripe : stripes_) {
      stripe.missing = std::min(step, bytes - start);
      stripe.place = at == nullptr ? nullptr : at + start;
      if (stripe.missing > 0) ++stripes_left_;
      start += stripe.missing;
    }
  }
  consume();
}

// Has what is in the buffer of a body go to its place.
void Stream::consume() {
  const std::uint64_t size = std::min<std::uint64_t>(missing_, end_ - begin_);
  if (place_ != nullptr && size > 0) {
    std::memcpy(place_, &buffer_[begin_], size);
    place_ += size;
  }
  begin_ += size;
  missing_ -= size;
  end_part();
}

void Stream::end_part() {
  if (missing_ == 0 && stripes_left_ == 0) end_message();
}

void Stream::end_message() {
  in_body_ = false;
  Transfer* const transfer = reading_;
  reading_ = nullptr;
  if (counted_) --receiving_;
  counted_ = false;
  if (early_ != nullptr) {
    const Message message = std::exchange(early_, nullptr);
    message->is_whole = true;
    if (!message->receiver) return;
    --receiving_;
    deliver(*message->receiver, *message);
  } else if (transfer != nullptr) {
    all_.part_done(transfer);
  }
}

bool Stream::read() {
  bool moved = false;
  for (Stripe& stripe : stripes_) moved |= read_stripe(stripe);
  return (!awaits_stripes() && read_messages()) || moved;
}

bool Stream::read_stripe(Stripe& stripe) {
  if (stripe.missing == 0 || !error_.empty()) return false;
  std::vector<char> nowhere(stripe.place == nullptr ? std::min<std::uint64_t>(stripe.missing, kBufferBytes) : 0);
  const bool stays = stripe.place != nullptr;
  const ssize_t come =
      recv(stripe.descriptor, stays ? stripe.place : nowhere.data(), stays ? stripe.missing : nowhere.size(), 0);
  if (come <= 0) {
    if (come == 0) fail("Connection closed by peer");
    if (come < 0 && !would_block(errno)) fail(in_words(errno));
    return false;
  }
  if (stays) stripe.place += come;
  stripe.missing -= static_cast<std::uint64_t>(come);
  if (stripe.missing > 0) return true;
  --stripes_left_;
  end_part();
  parse();
  return true;
}

bool Stream::read_messages() {
  if (!error_.empty()) return false;
  iovec pieces[2];
  int count = 0;
  std::uint64_t at_place = 0;
  if (in_body_ && place_ != nullptr) {  // then the buffer is empty
    at_place = missing_;
    pieces[count++] = {place_, missing_};
  }
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (begin_ > 0) {
    std::memmove(&buffer_[0], &buffer_[begin_], end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (end_ < buffer_.size()) pieces[count++] = {&buffer_[end_], buffer_.size() - end_};
  const ssize_t come = readv(descriptor_, pieces, count);
  if (come <= 0) {
    if (come == 0) fail("Connection closed by peer");
    if (come < 0 && !would_block(errno)) fail(in_words(errno));
    return false;
  }
  const std::uint64_t direct = std::min<std::uint64_t>(at_place, static_cast<std::uint64_t>(come));
  end_ += static_cast<std::uint64_t>(come) - direct;
  if (direct > 0) {
    place_ += direct;
    missing_ -= direct;
    end_part();
  }
  parse();
  return true;
}

void Stream::parse() {
  while (error_.empty()) {
    if (in_body_) {
      if (awaits_stripes() || begin_ == end_) return;
      consume();
      continue;
    }
    if (end_ - begin_ < kHead) return;
    const char* const head = &buffer_[begin_];
    const auto kind = number_at<std::uint32_t>(head + 12), text_bytes = number_at<std::uint32_t>(head + 16);
    const auto bytes = number_at<std::uint64_t>(head + 20);
    const bool at_once = std::memcmp(head, kAtOnce, 4) == 0, announced = std::memcmp(head, kAnnounced, 4) == 0;
    const bool asked_for = std::memcmp(head, kAskedFor, 4) == 0;
    if (!at_once && !announced && !asked_for) return fail("what came is no message of this version's");
    if (text_bytes > kMostTextBytes) {
      return fail("a text of " + std::to_string(text_bytes) + " bytes was to come, more than there may be");
    }
    if (end_ - begin_ - kHead < text_bytes) return;
    std::string text(head + kHead, text_bytes);
    begin_ += kHead + text_bytes;
    received_bytes_ = number_at<std::uint64_t>(head + 4);
    if (announced) {
      const auto message = std::make_shared<Early>(Early{kind, std::move(text), bytes, true, nullptr, true, {}});
      if (const auto incoming = all_.matcher_.arrive(rank, kind, [&] { return message; })) {
        --receiving_;
        deliver(*incoming, *message);
      }
    } else if (asked_for) {
      begin_asked(kind, bytes);
    } else {
      begin_body(kind, std::move(text), bytes);
    }
  }
}

// Has an announced body come to its place; that of another message than is expected stays where it is.
void Stream::ask(Transfer* transfer, std::uint32_t kind, const std::string& text, std::uint64_t bytes) {
  const std::string own = transfer->text;
  if (text != own) {
    transfer->found = text;
  } else if (transfer->bytes != bytes) {
    return fail(other_size(transfer->bytes, bytes));
  } else {
    asked_[kind].push_back(transfer);
    ++receiving_;
  }
  answer(transfer, kind, bytes, true);
  if (text != own) all_.part_done(transfer);
}

void Stream::begin_asked(std::uint32_t kind, std::uint64_t bytes) {
  auto& asked = asked_[kind];
  if (asked.empty() || asked.front()->bytes != bytes) {
    return fail(std::to_string(bytes) + " bytes came that nobody had asked for");
  }
  reading_ = asked.front();
  counted_ = true;
  asked.pop_front();
  expect(reading_->at, bytes);
}

void Stream::begin_body(std::uint32_t kind, std::string text, std::uint64_t bytes) {
  const auto incoming = all_.matcher_.arrive(rank, kind, [&] {
    early_ = std::make_shared<Early>(Early{kind, text, bytes, false, nullptr, false, {}});
    if (bytes <= PTRDIFF_MAX) early_->body.reset(new (std::nothrow) char[bytes]);
    return early_;
  });
  if (!incoming) {
    if (early_->body != nullptr) return expect(early_->body.get(), bytes);
    return fail("there is no memory for " + std::to_string(bytes) + " bytes that came before they were asked for");
  }
  char* to = nullptr;
  if (!match(*incoming, kind, text, bytes, &to)) {
    --receiving_;
    return;
  }
  reading_ = incoming->transfer;
  counted_ = true;
  expect(to, bytes);
}

// Whether a message may come to its receive; where: nowhere if its text is another, by which the receiver knows.
bool Stream::match(const Incoming& incoming, std::uint32_t kind, const std::string& text, std::uint64_t bytes,
                   char** at) {
  Transfer* const transfer = incoming.transfer;
  *at = nullptr;
  if (incoming.is_answer) {
    if (bytes != 0) return fail(other_size(0, bytes)), false;
    taken_bytes_ += kMessageBytes;
    note_answer(transfer, kind, text);
    return true;
  }
  if (text != transfer->text) {
    transfer->found = text;
  } else if (bytes != transfer->bytes) {
    return fail(other_size(transfer->bytes, bytes)), false;
  } else {
    *at = transfer->at;
  }
  taken_bytes_ += bytes + kMessageBytes;
  answer(transfer, kind, bytes, false);
  return true;
}

// The receiver of a large message, or of one without room, says what its call is.
void Stream::note_answer(Transfer* transfer, std::uint32_t kind, const std::string& text) {
  if (text != transfer->text) {
    transfer->found = text;
  } else if (transfer->announced) {
    ++transfer->left;
    send(head_of(kAskedFor, kind - 1, {}, transfer->bytes), transfer->at, transfer->bytes, transfer);
  }
}

void Stream::answer(Transfer* transfer, std::uint32_t kind, std::uint64_t bytes, bool announced) {
  if (announced || bytes > kAnsweredBytes) send_at_once(kind + 1, transfer->text, nullptr, 0, nullptr);
}

void Stream::poll_for(std::vector<pollfd>* polled) const {
  const auto add = [polled](int descriptor, bool sends, bool receives) {
    if (!sends && !receives) return;
    polled->push_back({descriptor, static_cast<short>((sends ? POLLOUT : 0) | (receives ? POLLIN : 0)), 0});
  };
  add(descriptor_, !sends_.empty(), !awaits_stripes());
  for (const Stripe& stripe : stripes_) add(stripe.descriptor, !stripe.sends.empty(), stripe.missing > 0);
}

void Stream::drop_sends() {
  sends_.clear();
  for (Stripe& stripe : stripes_) stripe.sends.clear();
  striped_ = 0;
}

void Stream::end_sending() {
  fail("a call of this rank in this group failed");
  drop_sends();
  shutdown(descriptor_, SHUT_WR);
  for (const Stripe& stripe : stripes_) shutdown(stripe.descriptor, SHUT_WR);
}

void Stream::close() {
  fail("the group was closed");
  shutdown(descriptor_, SHUT_WR);
  descriptor_ = -1;  // its number may soon be another file's
  for (Stripe& stripe : stripes_) {
    shutdown(stripe.descriptor, SHUT_WR);
    stripe.descriptor = -1;
  }
}

void Stream::forget() {
  to_forget_ = false;
  drop_sends();
  for (Stripe& stripe : stripes_) stripe.missing = 0;
  stripes_left_ = 0;
  all_.matcher_.clear_receives(rank);
  asked_.clear();
  receiving_ = 0;
  in_body_ = counted_ = false;
  early_ = nullptr;
  place_ = nullptr;
  reading_ = nullptr;
}

// Streams.

class Streams::Waiting {
 public:
  explicit Waiting(int& waiters) : waiters_(waiters) { ++waiters_; }
  ~Waiting() { --waiters_; }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  int& waiters_;  // under the lock
};

Streams::Streams(std::int64_t spin_ns, std::uint64_t striped_bytes)
    : spin_ns_(spin_ns), striped_bytes_(striped_bytes), generation_(fork_generation()) {}

void Streams::add(int rank, int descriptor, std::uint64_t early_bytes) {
  streams_.push_back(std::make_unique<Stream>(*this, rank, descriptor, early_bytes));
  if (by_rank_.size() <= static_cast<std::size_t>(rank)) by_rank_.resize(static_cast<std::size_t>(rank) + 1);
  by_rank_[static_cast<std::size_t>(rank)] = streams_.back().get();
  matcher_.add_sources(rank + 1);
}

void Streams::add_stripe(int rank, int descriptor) {
  if (Stream* const stream = at(rank)) stream->add(descriptor);
}

// Whether this is the copy of a process that was forked, whose other threads may have held the lock.
bool Streams::is_foreign() const { return generation_ != fork_generation(); }

Stream* Streams::at(int rank) {
  return rank >= 0 && static_cast<std::size_t>(rank) < by_rank_.size() ? by_rank_[static_cast<std::size_t>(rank)]
                                                                       : nullptr;
}

Transfer* Streams::make(Stream* stream, Part& part, std::string text) {
  Pending& made = pending_[++numbers_];
  made.stream = stream;
  made.transfer.number = numbers_;
  made.transfer.at = part.at;
  made.transfer.bytes = part.bytes;
  std::swap(made.transfer.owner, part.owner);
  if (!stream->error_.empty()) stream->to_forget_ = true;
  made.transfer.text = std::move(text);
  made.transfer.left = 1;
  return &made.transfer;
}

void Streams::part_done(Transfer* transfer) {
  if (--transfer->left > 0) return;
  if (!transfer->found.empty()) found_.emplace(transfer->number, std::move(transfer->found));
  if (transfer->owner != nullptr) owners_.push_back(transfer->owner);
  pending_.erase(transfer->number);
}

// Moves what can be moved without waiting.
bool Streams::step() {
  bool moved = false;
  for (const auto& stream : streams_) {
    if (!stream->error_.empty()) continue;
    const bool sends = stream->is_sending();
    if (sends) moved |= stream->write();
    if (stream->is_broken()) {
      stream->read_last();
      moved = true;
    } else if (sends || stream->is_receiving()) {
      moved |= stream->read();
    }
  }
  return moved;
}

// Returns false if a signal came: Python runs its handler between two slices.
bool Streams::sleep(std::unique_lock<std::mutex>& lock, std::int64_t limit_ns) {
  std::vector<pollfd> polled;
  for (const auto& stream : streams_) {
    if (!stream->error_.empty()) continue;
    if (stream->is_sending() || stream->is_receiving()) stream->poll_for(&polled);
  }
  if (waiters_ > 1) limit_ns = std::min(limit_ns, kTwoWaitNs);  // another one may move what this one waits for
  lock.unlock();
  const int limit_ms = static_cast<int>(std::max<std::int64_t>(1, limit_ns / 1'000'000));
  const bool interrupted = poll(polled.data(), polled.size(), limit_ms) < 0 && errno == EINTR;
  lock.lock();
  return !interrupted;
}

std::int64_t Streams::send(Part& part, std::uint32_t kind, std::string text) {
  if (is_foreign()) return kFailed;
  const std::lock_guard<std::mutex> lock(mutex_);
  Stream* const stream = at(part.rank);
  if (stream == nullptr) return kFailed - part.rank;
  const bool has_room = stream->has_room(part.bytes);
  Transfer* const transfer = make(stream, part, std::move(text));
  const std::uint64_t number = transfer->number;
  if (!has_room || part.bytes > kAnsweredBytes) {
    transfer->announced = !has_room;
    transfer->left = 2;
    stream->receive(kind + 1, transfer, true);
  }
  if (has_room) {
    stream->send_at_once(kind, transfer->text, part.at, part.bytes, transfer);
  } else {
    stream->send(stream->head_of(kAnnounced, kind, transfer->text, part.bytes), nullptr, 0, transfer);
  }
  return static_cast<std::int64_t>(number);
}

std::int64_t Streams::receive(Part& part, std::uint32_t kind, std::string text) {
  if (is_foreign()) return kFailed;
  const std::lock_guard<std::mutex> lock(mutex_);
  Stream* const stream = at(part.rank);
  if (stream == nullptr) return kFailed - part.rank;
  Transfer* const transfer = make(stream, part, std::move(text));
  const std::uint64_t number = transfer->number;
  stream->receive(kind, transfer);
  return static_cast<std::int64_t>(number);
}

std::int64_t Streams::wait(std::int64_t slice_ns, std::uint64_t number) {
  if (is_foreign()) return kFailed;
  std::unique_lock<std::mutex> lock(mutex_);
  std::int64_t now = now_ns();
  const std::int64_t until = now + slice_ns, spin_until = now + spin_ns_;
  const Waiting waiting{waiters_};
  bool late = false;
  for (;;) {
    const auto found = pending_.find(number);
    if (found == pending_.end()) return 0;
    const Stream& stream = *found->second.stream;
    if (!stream.error_.empty()) return kFailed - stream.rank;
    if (late) return kLook;
    const bool moved = step();
    now = now_ns();
    late = now >= until;
    if (moved || late) continue;
    if (now < spin_until) {
      lock.unlock();
      lock.lock();
      continue;
    }
    if (!sleep(lock, until - now)) return kLook;
  }
}

bool Streams::move() {
  if (is_foreign()) return false;
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || waiters_ > 0) return false;
  try {
    return step();
  } catch (const std::bad_alloc&) {
    for (const auto& stream : streams_) stream->fail(kNoMemory);
    return false;
  }
}

bool Streams::has_left() {
  if (is_foreign()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(streams_.begin(), streams_.end(), [](const auto& stream) {
    return stream->error_.empty() && (stream->is_sending() || stream->is_receiving());
  });
}

std::vector<void*> Streams::take_owners() {
  if (is_foreign()) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  bool has_failed = false;
  for (const auto& stream : streams_) {
    if (!stream->to_forget_) continue;
    has_failed = true;
    stream->forget();
  }
  if (has_failed) {
    for (auto& [number, pending] : pending_) {
      if (pending.transfer.owner != nullptr && !pending.stream->error_.empty()) {
        owners_.push_back(std::exchange(pending.transfer.owner, nullptr));
      }
    }
  }
  return std::exchange(owners_, {});
}

bool Streams::is_done(std::uint64_t number) {
  if (is_foreign()) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  return pending_.find(number) == pending_.end();
}

std::string Streams::found(std::uint64_t number) {
  if (is_foreign()) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = found_.find(number);
  if (entry == found_.end()) return {};
  std::string text = std::move(entry->second);
  found_.erase(entry);
  return text;
}

std::string Streams::error(int rank) {
  if (is_foreign()) return "this process was forked from the one that made the connection";
  const std::lock_guard<std::mutex> lock(mutex_);
  const Stream* const stream = at(rank);
  return stream == nullptr ? "the group was closed" : stream->error_;
}

void Streams::fail(const std::string& error) {
  if (is_foreign()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : streams_) stream->fail(error);
}

void Streams::end_sending() {
  if (is_foreign()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : streams_) stream->end_sending();
}

void Streams::close() {
  if (is_foreign()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : streams_) stream->close();
}

// For tests: bytes kept for receives to come, bytes sent at once, bytes received of these, bytes taken.
void Streams::facts(int rank, std::uint64_t* out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Stream& stream = *at(rank);
  out[0] = 0;
  matcher_.for_each_held(rank,
                         [out](const Stream::Message& message) { out[0] += message->announced ? 0 : message->bytes; });
  out[1] = stream.sent_bytes_;
  out[2] = stream.received_bytes_;
  out[3] = stream.taken_bytes_;
}

}  // namespace parallel_state
