#include "streams.h"

#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "interrupt.h"

namespace parallel_state {
namespace {

constexpr char kAtOnce[] = "PSM\1", kAnnounced[] = "PSMA", kAskedFor[] = "PSMB", kAnswer[] = "PSMC", kPut[] = "PSMW",
               kLeave[] = "PSML";
constexpr std::uint64_t kMessageBytes = 256;
constexpr std::uint64_t kMostAnnounced = 1 << 20;
constexpr std::size_t kBufferBytes = 64 << 10;
constexpr int kPiecesAtOnce = 1024;              // the kernel's maximum
constexpr std::uint32_t kAwaitsPuts = 1u << 31;  // in the tag of messages of `await_puts`; no other tag has it
constexpr std::int64_t kNoticeNs = 200'000'000;  // NOTICE_S of liveness/health.py
constexpr char kEnded[] = "a call of this rank in this group failed";

constexpr TransferUser kNobody{nullptr, nullptr, nullptr};  // the caller's memory stays until its call returns

}  // namespace

// Guarded by streams_mutex_.
class Streams::Stream {
 public:
  Stream(Streams& all, int rank, int descriptor, std::uint64_t early_bytes)
      : rank(rank), all_(all), descriptor_(descriptor), early_limit_(early_bytes), buffer_(kBufferBytes) {}
  void add(int descriptor) { stripes_.push_back(Stripe{descriptor}); }

  bool is_sending() const { return !sends_.empty() || striped_ > 0; }
  bool is_receiving() const { return reading_ != nullptr || !answers_.empty() || !asked_.empty() || wants(); }
  bool has_error() const { return stopped_ != nullptr || !error_.empty(); }
  std::string error() const { return error_.empty() && stopped_ != nullptr ? stopped_ : error_; }

  void start(const Held& transfer);
  void go_on(const Held& receive, const std::vector<Piece>& pieces);
  void deliver(const Held& receive, const Early& message);
  bool move();
  void poll_for(std::vector<pollfd>* polled) const;
  void leave();
  void stop(const char* why);
  void close();
  Held unfinished() const;
  void facts(std::uint64_t* out) const;

  const int rank;
  Done* done = nullptr;
  bool has_left = false;

 private:
  struct Outgoing {
    Frame frame;
    std::uint64_t frame_left;
    Pieces body;
    Held transfer;
  };
  struct Awaited {
    Held transfer;
    bool announced;
  };
  struct Asked {
    Held receive;
    Form form;
  };
  template <typename What>
  struct ByTag : std::map<std::uint32_t, std::deque<What>> {
    What take(typename ByTag::iterator at) {
      What first = std::move(at->second.front());
      at->second.pop_front();
      if (at->second.empty()) this->erase(at);
      return first;
    }
  };

  void fail(std::string error) {
    if (error_.empty()) error_ = std::move(error);
  }
  bool wants() const;
  bool has_room(std::uint64_t bytes);
  Frame frame_of(const char* magic, const Form& form) const;
  Frame frame_of(const char* magic, const TransferCall& call) const { return frame_of(magic, form_of(call)); }
  static Form form_of(const TransferCall& call) {
    return {call.tag, call.dtype, call.bytes, call.outgoing == nullptr ? 0 : call.outgoing->head_bytes};
  }
  void post(const Frame& frame, const Held& transfer, bool has_body);
  void end_part(const Held& transfer);
  bool write();
  bool write_messages();
  bool read();
  bool read_messages();
  std::uint64_t receive(int descriptor, iovec* pieces, int count);
  bool read_stripe(Stripe& stripe);
  void parse();
  bool take_frame(const Frame& frame);
  bool refuse();
  static bool is_answered(const Form& form) { return form.bytes > kAnsweredBytes && form.dtype != kMessageDtype; }
  // A sender keeps to its limit; a foreign process may not.
  bool may_keep(std::uint64_t bytes) const {
    return bytes <= PTRDIFF_MAX && kept_bytes_ + bytes + kMessageBytes <= all_.granted_bytes_;
  }
  bool begin_body(const Form& form);
  bool begin_asked(const Form& form);
  void begin_reading(const Form& form);
  bool note_answer(const Form& form);
  bool begin_put(const Frame& frame);
  void end_put();
  bool match(const Held& receive, const Form& form);
  void ask(const Held& receive, const Form& form);
  void answer(const Form& form) { post(frame_of(kAnswer, form), nullptr, false); }
  void expect(const std::vector<Piece>& pieces, std::uint64_t bytes);
  void consume();
  void end_message_if_whole();
  std::size_t stripes_of(std::uint64_t bytes) const { return bytes < all_.striped_bytes_ ? 0 : stripes_.size(); }
  bool awaits_stripes() const { return in_body_ && missing_.bytes_left() == 0; }

  Streams& all_;
  int descriptor_;
  std::vector<Stripe> stripes_;
  int striped_ = 0;
  int stripes_left_ = 0;
  std::string error_;
  const char* stopped_ = nullptr;
  std::string broken_;  // can't be written; data may still be readable
  std::deque<Outgoing> sends_;
  ByTag<Awaited> answers_;
  ByTag<Asked> asked_;
  const std::uint64_t early_limit_;
  std::uint64_t sent_bytes_ = 0, received_bytes_ = 0;  // sent at once; received by the peer of these
  std::uint64_t taken_bytes_ = 0;                      // received of those sent at once
  std::uint64_t kept_bytes_ = 0;
  std::uint64_t announced_ = 0;  // that no receive has matched
  std::vector<char> buffer_;
  std::size_t begin_ = 0, end_ = 0;
  bool in_body_ = false;
  bool in_head_ = false;
  bool asks_ = false;  // nothing is read until the taker of `reading_` returns
  Pieces missing_;
  Held reading_;
  Early early_;
  struct Put {
    std::shared_ptr<char> memory;
    std::uint32_t window = 0, signals = 0;
  } put_;
};

bool Streams::Stream::wants() const {
  if (!all_.windows_.empty()) return true;
  const std::lock_guard<std::mutex> lock(all_.mutex_);
  return all_.matcher_.wants(rank) || (early_ != nullptr && early_->receiver != nullptr);
}

Streams::Held Streams::Stream::unfinished() const {
  if (reading_ != nullptr) return reading_;
  if (!answers_.empty()) return answers_.begin()->second.front().transfer;
  if (!asked_.empty()) return asked_.begin()->second.front().receive;
  for (const Outgoing& each : sends_) {
    if (each.transfer != nullptr) return each.transfer;
  }
  for (const Stripe& stripe : stripes_) {
    if (!stripe.sends.is_idle()) return stripe.sends.owner();
  }
  const std::lock_guard<std::mutex> lock(all_.mutex_);
  return early_ == nullptr ? nullptr : early_->receiver;
}

bool Streams::Stream::has_room(std::uint64_t bytes) {
  const std::uint64_t needed = bytes + kMessageBytes;
  if (sent_bytes_ - received_bytes_ + needed > early_limit_) read();  // the peer may have received some since
  return sent_bytes_ - received_bytes_ + needed <= early_limit_;
}

Streams::Frame Streams::Stream::frame_of(const char* magic, const Form& form) const {
  Frame frame{{}, static_cast<std::uint32_t>(form.tag), form.dtype, 0, taken_bytes_, form.bytes, form.head_bytes};
  std::memcpy(frame.magic, magic, sizeof frame.magic);
  return frame;
}

void Streams::Stream::start(const Held& transfer) {
  const TransferCall& call = transfer->call;
  if (call.window != 0) {
    Frame frame = frame_of(kPut, Form{static_cast<std::int32_t>(call.window), call.dtype, call.bytes, call.offset});
    frame.signals = call.signals;
    return post(frame, transfer, true);
  }
  const bool room = has_room(call.bytes);
  if (!room || is_answered(form_of(call))) {
    transfer->parts = 2;
    answers_[static_cast<std::uint32_t>(call.tag)].push_back({transfer, !room});
  }
  if (!room) return post(frame_of(kAnnounced, call), transfer, false);
  sent_bytes_ += call.bytes + kMessageBytes;
  post(frame_of(kAtOnce, call), transfer, true);
}

void Streams::Stream::post(const Frame& frame, const Held& transfer, bool has_body) {
  Outgoing outgoing{frame, sizeof frame, {}, transfer};
  if (has_body) {
    const TransferCall& call = transfer->call;
    const std::vector<Piece> tensor{{call.address, call.bytes}};
    const std::vector<Piece>& pieces = call.outgoing == nullptr ? tensor : call.outgoing->tensors;
    const std::uint64_t bytes = frame.bytes - form_of(call).head_bytes;
    const auto add = [&](std::size_t index, std::uint64_t begin, std::uint64_t end) {
      for_range(pieces, begin, end, [&](char* at, std::uint64_t size) {
        stripes_[index].sends.add(at, size, transfer);
        ++striped_;
        ++transfer->parts;
      });
    };
    const std::uint64_t own = divide(bytes, stripes_of(bytes), add);
    if (call.outgoing != nullptr) {
      for (const Piece& piece : call.outgoing->head) outgoing.body.add(piece.address, piece.bytes);
    }
    for_range(pieces, 0, own, [&](char* at, std::uint64_t size) { outgoing.body.add(at, size); });
  }
  sends_.push_back(std::move(outgoing));
  write();
}

void Streams::Stream::end_part(const Held& transfer) {
  if (transfer != nullptr && --transfer->parts == 0) all_.finish(transfer, -1, done);
}

bool Streams::Stream::write() {
  bool moved = write_messages();
  for (Stripe& stripe : stripes_) {
    if (has_error() || !broken_.empty()) break;
    const int error = stripe.sends.write(stripe.descriptor, &moved, [this](const Held& transfer) {
      --striped_;
      end_part(transfer);
    });
    if (error != 0) broken_ = in_words(error);
  }
  return moved;
}

bool Streams::Stream::write_messages() {
  bool moved = false;
  while (!sends_.empty() && !has_error() && broken_.empty()) {
    iovec pieces[kPiecesAtOnce];
    int count = 0;
    for (Outgoing& each : sends_) {
      if (count + 2 > kPiecesAtOnce) break;
      if (each.frame_left > 0) {
        pieces[count++] = {reinterpret_cast<char*>(&each.frame) + sizeof(Frame) - each.frame_left, each.frame_left};
      }
      count += each.body.next(pieces + count, kPiecesAtOnce - count);
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
      const std::uint64_t in_frame = std::min(left, first.frame_left);
      const std::uint64_t in_body = std::min(left - in_frame, first.body.bytes_left());
      first.frame_left -= in_frame;
      first.body.pass(in_body);
      left -= in_frame + in_body;
      if (first.frame_left > 0 || first.body.bytes_left() > 0) break;
      const Held transfer = std::move(first.transfer);
      sends_.pop_front();
      end_part(transfer);
    }
  }
  return moved;
}

void Streams::Stream::deliver(const Held& receive, const Early& message) {
  if (message->bytes == nullptr) return --announced_, ask(receive, message->form);
  kept_bytes_ -= message->form.bytes + kMessageBytes;
  if (match(receive, message->form)) all_.take(receive, message, done);
}

bool Streams::Stream::move() {
  const bool sends = is_sending();
  bool moved = sends && write();
  if (!broken_.empty()) {
    while (read()) {
    }
    fail(broken_);
    return true;
  }
  if (sends || is_receiving()) moved |= read();
  return moved;
}

void Streams::Stream::expect(const std::vector<Piece>& pieces, std::uint64_t bytes) {
  in_body_ = true;
  const auto add = [&](std::size_t index, std::uint64_t begin, std::uint64_t end) {
    Pieces& missing = stripes_[index].missing;
    missing.clear();
    for_range(pieces, begin, end, [&](char* at, std::uint64_t size) { missing.add(at, size); });
    ++stripes_left_;
  };
  const std::uint64_t own = divide(bytes, stripes_of(bytes), add);
  for_range(pieces, 0, own, [&](char* at, std::uint64_t size) { missing_.add(at, size); });
  consume();
}

void Streams::Stream::consume() {
  begin_ += missing_.fill(&buffer_[begin_], end_ - begin_);
  end_message_if_whole();
}

void Streams::Stream::end_message_if_whole() {
  if (missing_.bytes_left() > 0 || stripes_left_ > 0) return;
  in_body_ = false;
  if (std::exchange(in_head_, false)) {
    IncomingMessage& message = *reading_->call.incoming;
    const std::uint64_t left = message.head_bytes - message.head.size() + message.tensor_bytes;
    message.is_at_hand = stripes_of(message.tensor_bytes) == 0 && end_ - begin_ >= left;
    asks_ = true;
    return all_.ask_taker(reading_, rank, done);
  }
  if (const Held receive = std::exchange(reading_, nullptr)) return all_.finish(receive, rank, done);
  if (put_.memory != nullptr) return end_put();
  const Early message = std::exchange(early_, nullptr);
  Held receiver;
  {
    const std::lock_guard<std::mutex> lock(all_.mutex_);
    message->is_whole = true;
    receiver = std::exchange(message->receiver, nullptr);
  }
  if (receiver != nullptr) deliver(receiver, message);
}

bool Streams::Stream::read() {
  bool moved = false;
  for (Stripe& stripe : stripes_) moved |= read_stripe(stripe);
  return (!asks_ && !awaits_stripes() && read_messages()) || moved;
}

std::uint64_t Streams::Stream::receive(int descriptor, iovec* pieces, int count) {
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = static_cast<std::size_t>(count);
  const ssize_t come = recvmsg(descriptor, &message, MSG_DONTWAIT);
  if (come == 0) fail("Connection closed by peer");
  if (come < 0 && !would_block(errno)) fail(in_words(errno));
  return come < 0 ? 0 : static_cast<std::uint64_t>(come);
}

bool Streams::Stream::read_stripe(Stripe& stripe) {
  if (stripe.missing.bytes_left() == 0 || has_error()) return false;
  iovec pieces[kPiecesAtOnce];
  const std::uint64_t come = receive(stripe.descriptor, pieces, stripe.missing.next(pieces, kPiecesAtOnce));
  if (come == 0) return false;
  stripe.missing.pass(come);
  if (stripe.missing.bytes_left() > 0) return true;
  --stripes_left_;
  end_message_if_whole();
  parse();
  return true;
}

bool Streams::Stream::read_messages() {
  if (has_error()) return false;
  iovec pieces[kPiecesAtOnce];
  int count = in_body_ ? missing_.next(pieces, kPiecesAtOnce - 1) : 0;  // if any, the buffer is empty
  std::uint64_t at_place = 0;
  for (int piece = 0; piece < count; ++piece) at_place += pieces[piece].iov_len;
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (begin_ > 0) {
    std::memmove(&buffer_[0], &buffer_[begin_], end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  // The bytes after these addresses may belong to the next ones.
  if (!in_body_ || at_place == missing_.bytes_left()) pieces[count++] = {&buffer_[end_], buffer_.size() - end_};
  const std::uint64_t come = receive(descriptor_, pieces, count);
  if (come == 0) return false;
  const std::uint64_t direct = std::min(at_place, come);
  end_ += come - direct;
  if (direct > 0) {
    missing_.pass(direct);
    end_message_if_whole();
  }
  parse();
  return true;
}

void Streams::Stream::parse() {
  while (!has_error() && !asks_) {
    if (in_body_) {
      if (awaits_stripes() || begin_ == end_) return;
      consume();
      continue;
    }
    if (end_ - begin_ < sizeof(Frame)) return;
    Frame frame;
    std::memcpy(&frame, &buffer_[begin_], sizeof frame);
    begin_ += sizeof frame;
    if (!take_frame(frame)) return;
  }
}

bool Streams::Stream::refuse() {
  done->failure.status = static_cast<std::int64_t>(QueueStatus::kMalformed);
  done->failure.peer = done->failure.suspect = rank;
  return false;
}

bool Streams::Stream::take_frame(const Frame& frame) {
  const auto is = [&frame](const char* magic) { return std::memcmp(frame.magic, magic, sizeof frame.magic) == 0; };
  if (is(kPut)) return begin_put(frame);
  if (is(kLeave)) return has_left = true, fail("it left the group"), false;
  const Form form{static_cast<std::int32_t>(frame.tag), frame.dtype, frame.bytes, frame.head_bytes};
  const bool is_form = frame.head_bytes <= (frame.dtype == kMessageDtype ? frame.bytes : 0);
  if (!is_form || (!is(kAtOnce) && !is(kAnnounced) && !is(kAskedFor) && !is(kAnswer))) {
    return refuse();
  }
  received_bytes_ = frame.received;
  if (is(kAtOnce)) return begin_body(form);
  if (is(kAskedFor)) return begin_asked(form);
  if (is(kAnswer)) return note_answer(form);
  Held receive;
  {
    const std::lock_guard<std::mutex> lock(all_.mutex_);
    const auto found = all_.matcher_.arrive(rank, frame.tag, [&] {
      ++announced_;
      return std::make_shared<Body>(Body{rank, form, nullptr, true, nullptr});
    });
    if (found) receive = *found;
  }
  if (receive != nullptr) ask(receive, form);
  if (announced_ > kMostAnnounced) return refuse();
  return done->failure.status == 0;
}

bool Streams::Stream::begin_put(const Frame& frame) {
  const auto found = all_.windows_.find(frame.tag);
  if (found == all_.windows_.end()) return refuse();
  const Window& window = found->second;
  const std::uint64_t bytes = frame.bytes, offset = frame.head_bytes;
  if (bytes > window.bytes || offset > window.bytes - bytes) return refuse();
  received_bytes_ = frame.received;
  put_ = {window.memory, frame.tag, frame.signals};
  missing_.clear();
  return expect({{put_.memory.get() + offset, bytes}}, bytes), true;
}

void Streams::Stream::end_put() {
  const Put put = std::exchange(put_, {});
  const auto window = all_.windows_.find(put.window);
  if (window == all_.windows_.end()) return;
  window->second.signals[static_cast<std::size_t>(rank)].come += put.signals;
  all_.match_signals(window->second, rank, done);
}

bool Streams::Stream::begin_body(const Form& form) {
  {
    const std::lock_guard<std::mutex> lock(all_.mutex_);
    const auto found = all_.matcher_.arrive(rank, static_cast<std::uint32_t>(form.tag), [&] {
      early_ = std::make_shared<Body>(Body{rank, form, nullptr, false, nullptr});
      if (may_keep(form.bytes)) early_->bytes.reset(new (std::nothrow) char[form.bytes]);
      return early_;
    });
    if (found) reading_ = *found;
  }
  if (reading_ == nullptr) {
    if (!may_keep(form.bytes)) return refuse();
    if (early_->bytes != nullptr) {
      kept_bytes_ += form.bytes + kMessageBytes;
      const std::uint64_t bytes = form.bytes - form.head_bytes;
      missing_.clear();
      missing_.add(early_->bytes.get(), form.head_bytes);
      return expect({{early_->bytes.get() + form.head_bytes, bytes}}, bytes), true;
    }
    fail("there is no memory for " + std::to_string(form.bytes) + " bytes that arrived before this rank received them");
    return false;
  }
  if (!match(reading_, form)) return reading_ = nullptr, false;
  begin_reading(form);
  return true;
}

void Streams::Stream::begin_reading(const Form& form) {
  IncomingMessage* const message = reading_->call.incoming;
  missing_.clear();
  if (message == nullptr) return expect({{reading_->call.address, form.bytes}}, form.bytes);
  message->head_bytes = form.head_bytes;
  message->tensor_bytes = form.bytes - form.head_bytes;
  message->head.resize(form.head_bytes > message->most_head_bytes ? kHeadStart : form.head_bytes);
  missing_.add(message->head.data(), message->head.size());
  in_body_ = in_head_ = true;
  consume();
}

// Doesn't read the rest of a refused message: a peer may claim any size.
void Streams::Stream::go_on(const Held& receive, const std::vector<Piece>& pieces) {
  if (!asks_ || reading_ != receive) return;
  const IncomingMessage& message = *receive->call.incoming;
  asks_ = false;
  if (message.is_refused && message.head.size() < message.head_bytes + message.tensor_bytes) {
    done->failure.status = TransferFailure::kBroken;
    done->failure.peer = done->failure.suspect = rank;
    done->first = receive;
    done->text = kEnded;
    return;
  }
  missing_.clear();
  expect(pieces, message.tensor_bytes);
  parse();
}

bool Streams::Stream::match(const Held& receive, const Form& form) {
  taken_bytes_ += form.bytes + kMessageBytes;
  if (is_answered(form)) answer(form_of(receive->call));
  return all_.check_form(receive, rank, form, done);
}

void Streams::Stream::ask(const Held& receive, const Form& form) {
  answer(receive->call.incoming == nullptr ? form_of(receive->call) : form);
  if (!all_.check_form(receive, rank, form, done)) return;
  asked_[static_cast<std::uint32_t>(form.tag)].push_back({receive, form});
}

bool Streams::Stream::begin_asked(const Form& form) {
  const auto asked = asked_.find(static_cast<std::uint32_t>(form.tag));
  if (asked == asked_.end()) return refuse();
  const Form& announced = asked->second.front().form;
  if (form.dtype != announced.dtype || form.bytes != announced.bytes || form.head_bytes != announced.head_bytes) {
    return refuse();
  }
  reading_ = asked_.take(asked).receive;
  begin_reading(form);
  return true;
}

bool Streams::Stream::note_answer(const Form& form) {
  const auto answers = answers_.find(static_cast<std::uint32_t>(form.tag));
  if (answers == answers_.end()) return refuse();
  const Awaited first = answers_.take(answers);
  const TransferCall& call = first.transfer->call;
  if (call.dtype != form.dtype || call.bytes != form.bytes) {
    all_.note_form(first.transfer, rank, form_of(call), form, done);
    return false;
  }
  if (first.announced) {
    ++first.transfer->parts;
    post(frame_of(kAskedFor, call), first.transfer, true);
  }
  end_part(first.transfer);
  return true;
}

void Streams::Stream::poll_for(std::vector<pollfd>* polled) const {
  if (has_error() || !(is_sending() || is_receiving())) return;
  add_polled(polled, descriptor_, !sends_.empty(), !awaits_stripes() && !asks_);
  for (const Stripe& stripe : stripes_) {
    add_polled(polled, stripe.descriptor, !stripe.sends.is_idle(), stripe.missing.bytes_left() > 0);
  }
}

void Streams::Stream::leave() {
  if (has_error() || is_sending() || !broken_.empty()) return;
  const Frame frame = frame_of(kLeave, Form{});
  static_cast<void>(send(descriptor_, &frame, sizeof frame, MSG_NOSIGNAL | MSG_DONTWAIT));
}

void Streams::Stream::stop(const char* why) {
  if (stopped_ == nullptr) stopped_ = why;
  sends_.clear();
  answers_.clear();
  asked_.clear();
  for (Stripe& stripe : stripes_) {
    stripe.sends.clear();
    stripe.missing.clear();
    shutdown(stripe.descriptor, SHUT_WR);
  }
  striped_ = stripes_left_ = 0;
  in_body_ = in_head_ = asks_ = false;
  reading_ = nullptr;
  early_ = nullptr;
  put_ = {};
  shutdown(descriptor_, SHUT_WR);
}

void Streams::Stream::close() {
  stop("the group was closed");
  descriptor_ = -1;  // another file may reuse the number
  for (Stripe& stripe : stripes_) stripe.descriptor = -1;
}

void Streams::Stream::facts(std::uint64_t* out) const {
  out[1] = sent_bytes_;
  out[2] = received_bytes_;
  out[3] = taken_bytes_;
}

Streams::Streams(std::shared_ptr<const Losses> losses, int rank, int size, std::uint64_t granted_bytes,
                 std::int64_t spin_ns, std::uint64_t striped_bytes)
    : Transfers(std::move(losses), rank, size),
      granted_bytes_(granted_bytes),
      spin_ns_(spin_ns),
      striped_bytes_(striped_bytes),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      streams_(static_cast<std::size_t>(size)) {}

Streams::~Streams() {
  if (wake_ >= 0) ::close(wake_);
}

void Streams::add(int rank, int descriptor, std::uint64_t early_bytes) {
  auto& stream = streams_[static_cast<std::size_t>(rank)];
  if (stream != nullptr) return stream->add(descriptor);
  stream = std::make_unique<Stream>(*this, rank, descriptor, early_bytes);
}

Streams::Outcome Streams::send_now(int dst, int dtype, std::uint64_t bytes, double timeout_s,
                                   const std::function<void*()>& data) {
  if (is_foreign() || has_failed()) return Outcome::kLeft;
  const TransferCall call{dst, 1, served_tag_, dtype, data(), bytes, 0, &kNobody, nullptr};
  return carry(call, timeout_s) == kEndedTransfer ? Outcome::kDone : Outcome::kLeft;
}

Streams::Outcome Streams::receive_now(int src, int dtype, std::uint64_t bytes, double timeout_s,
                                      const std::function<void()>& begins, const std::function<void*()>& data) {
  if (is_foreign() || has_failed()) return Outcome::kLeft;
  void* const to = data();
  begins();
  const TransferCall call{src, 0, served_tag_, dtype, to, bytes, 0, &kNobody, nullptr};
  return carry(call, timeout_s) == kEndedTransfer ? Outcome::kDone : Outcome::kLeft;
}

int Streams::carry(const TransferCall& call, double timeout_s) {
  try {
    return run(call, timeout_s);
  } catch (const std::bad_alloc&) {
    abandon();  // the caller's memory must not be used after this
    return kFailedTransfer;
  }
}

std::uint32_t Streams::open_window(std::shared_ptr<char> memory, std::uint64_t bytes) {
  std::uint32_t number;
  {
    const std::lock_guard<std::mutex> lock(streams_mutex_);
    number = ++last_window_;
    windows_[number] = {std::move(memory), bytes, std::vector<Signals>(static_cast<std::size_t>(size_))};
    has_windows_ = true;
  }
  keep_moving(shared_from_this());
  return number;
}

void Streams::close_window(std::uint32_t number) {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  windows_.erase(number);
  has_windows_ = !windows_.empty();
}

int Streams::put(int dst, std::uint32_t window, std::uint64_t offset, const void* data, std::uint64_t bytes,
                 bool signals, double timeout_s) {
  TransferCall call{dst, 1, 0, kWindowDtype, const_cast<void*>(data), bytes, 0, &kNobody, nullptr};
  call.window = window;
  call.signals = signals ? 1 : 0;
  call.offset = offset;
  return carry(call, timeout_s);
}

void Streams::match_signals(Window& window, int src, Done* done) {
  Signals& signals = window.signals[static_cast<std::size_t>(src)];
  while (signals.come > 0 && !signals.awaited.empty()) {
    const Held first = std::move(signals.awaited.front());
    signals.awaited.pop_front();
    if (!first->is_open()) continue;
    --signals.come;
    finish(first, src, done);
  }
}

int Streams::take_signal(int src, std::uint32_t window, double timeout_s) {
  TransferCall call{src, 0, 0, kWindowDtype, nullptr, 0, 0, &kNobody, nullptr};
  call.window = window;
  const std::int64_t number = start(call, true);
  if (number == kDoneTransfer) return kEndedTransfer;
  if (number < 0) return number == kInsideTransfer ? kInsideWait : kFailedTransfer;
  const int how = wait(static_cast<Number>(number), timeout_s, false);
  if (how != kLateTransfer && how != kInterruptedTransfer) return how;
  {
    const std::lock_guard<std::mutex> lock(streams_mutex_);
    const bool is_back = take_back(static_cast<Number>(number));
    const auto found = windows_.find(window);
    if (found != windows_.end()) {
      auto& [come, awaited] = found->second.signals[static_cast<std::size_t>(src)];
      const auto has_ended = [](const Held& each) { return !each->is_open(); };
      awaited.erase(std::remove_if(awaited.begin(), awaited.end(), has_ended), awaited.end());
      if (!is_back && how == kInterruptedTransfer) ++come;  // the signal arrived after all: another wait takes it
    }
    if (is_back || how == kInterruptedTransfer) return how;
  }
  return wait(static_cast<Number>(number), 0, false);
}

// An empty message to each rank arrives after earlier puts.
int Streams::await_puts(std::uint32_t own, const std::vector<std::uint32_t>& windows, double timeout_s) {
  const std::int64_t until_ns = after(timeout_s);
  std::vector<Number> started;
  for (std::size_t rank = 0; rank < windows.size(); ++rank) {
    if (windows[rank] == 0) continue;
    for (const int sends : {1, 0}) {
      const auto tag = static_cast<int>(kAwaitsPuts | (sends != 0 ? windows[rank] : own));
      const std::int64_t number =
          start({static_cast<int>(rank), sends, tag, kWindowDtype, nullptr, 0, 0, &kNobody, nullptr}, false);
      if (number < 0) return number == kInsideTransfer ? kInsideWait : kFailedTransfer;
      if (number != kDoneTransfer) started.push_back(static_cast<Number>(number));
    }
  }
  for (const Number number : started) {
    const double left_s = static_cast<double>(until_ns - now_ns()) / 1e9;
    const int how = wait(number, std::max(left_s, 0.0), true);
    if (how == kInterruptedTransfer) break_off(number);
    if (how != kEndedTransfer) return how;
  }
  return kEndedTransfer;
}

void Streams::begin(const Held& transfer, const Early& early) {
  const TransferCall& call = transfer->call;
  Done done;
  {
    const std::lock_guard<std::mutex> lock(streams_mutex_);
    if (fails_) return;  // the thread that recorded the failure also fails this transfer
    // Until here the end of its connection doesn't fail it: its data may have arrived before.
    transfer->has_begun = true;
    try {
      if (call.sends != 0) {
        Stream* const stream = streams_[static_cast<std::size_t>(call.peer)].get();
        for (;;) {
          Held next;
          {
            const std::lock_guard<std::mutex> own(mutex_);
            auto& [waiting, count] = *sends_[call.peer];
            if (waiting.empty()) break;
            next = std::move(waiting.front());
            waiting.pop_front();
            --count;
          }
          if (stream == nullptr || stream->has_error() || done.failure.status != 0) break;
          stream->done = &done;
          stream->start(next);
        }
      } else if (early != nullptr) {
        Stream& stream = *streams_[static_cast<std::size_t>(early->source)];
        stream.done = &done;
        stream.deliver(transfer, early);
      } else if (call.window != 0) {
        const auto window = windows_.find(call.window);
        if (window != windows_.end()) {
          window->second.signals[static_cast<std::size_t>(call.peer)].awaited.push_back(transfer);
          match_signals(window->second, call.peer, &done);
        }
      }
    } catch (const std::bad_alloc&) {
      done.failure.status = TransferFailure::kNoMemory;
    }
    note_broken(&done);
    note_unsent();
    fails_ = done.failure.status != 0;
  }
  wake();
  announce(done);
}

void Streams::note_broken(Done* done) {
  if (done->failure.status != 0) return;
  bool all_ended = true;
  const Stream* ended = nullptr;
  for (const auto& stream : streams_) {
    if (stream == nullptr) continue;
    if (!stream->has_error()) {
      all_ended = false;
      continue;
    }
    ended = stream.get();
    done->first = stream->unfinished();
    if (done->first == nullptr) done->first = first_with(stream->rank);
    if (done->first != nullptr) break;
  }
  if (ended == nullptr) return;
  if (done->first == nullptr && all_ended) done->first = first_with(kAnySource);
  if (done->first == nullptr) return;
  done->failure.status = ended->has_left ? static_cast<std::int64_t>(QueueStatus::kPeerDied) : TransferFailure::kBroken;
  done->failure.reason = ended->has_left ? 1 : 0;
  done->failure.sends = done->first->call.sends;
  done->failure.peer = done->failure.suspect = ended->rank;
  done->text = ended->error();
}

void Streams::go_on(const Held& receive, const std::vector<Piece>& pieces, Done* done) {
  {
    const std::lock_guard<std::mutex> lock(streams_mutex_);
    if (fails_) return;
    Stream& stream = *streams_[static_cast<std::size_t>(receive->source)];
    stream.done = done;
    try {
      stream.go_on(receive, pieces);
    } catch (const std::bad_alloc&) {
      done->failure.status = TransferFailure::kNoMemory;
    }
    note_unsent();
    fails_ = done->failure.status != 0;
  }
  wake();  // a thread may sleep without this connection
}

void Streams::note_unsent() {
  has_unsent_ = std::any_of(streams_.begin(), streams_.end(), [](const auto& stream) {
    return stream != nullptr && !stream->has_error() && stream->is_sending();
  });
}

bool Streams::step(Done* done) {
  bool moved = false;
  if (fails_) return false;
  try {
    for (const auto& stream : streams_) {
      if (stream == nullptr || stream->has_error()) continue;
      stream->done = done;
      moved |= stream->move();
      if (done->failure.status != 0) return fails_ = true;
    }
  } catch (const std::bad_alloc&) {
    done->failure.status = TransferFailure::kNoMemory;
    return fails_ = true;
  }
  note_broken(done);
  note_unsent();
  fails_ = done->failure.status != 0;
  return moved;
}

bool Streams::move_all() {
  Done done;
  bool moved = false;
  {
    const std::unique_lock<std::mutex> lock(streams_mutex_, std::try_to_lock);
    if (!lock) return false;
    moved = step(&done);
  }
  announce(done);
  return moved;
}

Transfers::Moved Streams::move_for(Transfer* transfer, std::int64_t until_ns) {
  if (polls_.exchange(true, std::memory_order_acquire)) return Moved::kBusy;
  struct End {
    std::atomic<bool>& polls;
    ~End() { polls.store(false, std::memory_order_release); }
  } const end{polls_};
  const Presence moving{movers_};
  const std::int64_t spin_ns = waits_gently() ? kGentleSpinNs : spin_ns_;
  std::int64_t spin_until = now_ns() + spin_ns;
  for (;;) {
    Done done;
    bool moved = false;
    {
      const std::lock_guard<std::mutex> lock(streams_mutex_);
      moved = step(&done);
    }
    announce(done);
    if (transfer->asks) return Moved::kSome;
    if (!transfer->is_open()) {
      if (left_ == 0 && has_unsent()) keep_moving(shared_from_this());
      return Moved::kSome;
    }
    const std::int64_t now = now_ns();
    if (now >= until_ns) return Moved::kIdle;
    if (moved) {
      spin_until = now + spin_ns;
    } else if (now < spin_until) {
      pause_cpu();
    } else if (sleep(until_ns)) {
      return Moved::kSignal;
    }
  }
}

bool Streams::sleep(std::int64_t until_ns) {
  polled_.clear();
  {
    const std::lock_guard<std::mutex> lock(streams_mutex_);
    for (const auto& stream : streams_) {
      if (stream != nullptr) stream->poll_for(&polled_);
    }
    sleeps_.store(true, std::memory_order_relaxed);  // under the lock: a later start sees it
  }
  polled_.push_back({wake_, POLLIN, 0});
  const std::int64_t limit_ms = std::min<std::int64_t>((until_ns - now_ns() + 999'999) / 1'000'000, 1000);
  const bool signal =
      poll(polled_.data(), polled_.size(), static_cast<int>(std::max<std::int64_t>(limit_ms, 0))) < 0 && errno == EINTR;
  sleeps_.store(false, std::memory_order_relaxed);
  std::uint64_t count;
  if ((polled_.back().revents & POLLIN) != 0) static_cast<void>(::read(wake_, &count, sizeof count) > 0);
  return signal;
}

void Streams::sleep_on(Sleep* sleep) {
  {
    const std::lock_guard<std::mutex> lock(streams_mutex_);
    for (const auto& stream : streams_) {
      if (stream != nullptr) stream->poll_for(&sleep->polled);
    }
  }
  const std::int64_t noticed_ns = noticed_ns_;
  if (noticed_ns != 0) sleep->until_ns = std::min(sleep->until_ns, std::max(noticed_ns + kNoticeNs, now_ns()));
}

void Streams::wake() {
  const std::uint64_t one = 1;
  if (sleeps_.load(std::memory_order_relaxed)) static_cast<void>(::write(wake_, &one, sizeof one) > 0);
}

bool Streams::read_last(const Transfer&, int, int) {
  const std::int64_t now = now_ns();
  std::int64_t noticed = 0;
  if (noticed_ns_.compare_exchange_strong(noticed, now)) noticed = now;
  if (now - noticed < kNoticeNs) return false;
  move_all();
  return true;
}

bool Streams::has_left() {
  if (is_foreign()) return false;
  return left_ > 0 || ((has_unsent_ || has_windows_) && !has_failed());
}

void Streams::stop(bool leaves) {
  const std::shared_ptr<const Losses> known = losses();
  {
    const std::lock_guard<std::mutex> lock(streams_mutex_);
    for (const auto& stream : streams_) {
      if (stream == nullptr) continue;
      // After a failed collective the group is doomed, and no rank counts as alive.
      if (leaves && known != nullptr && known->is_alive(stream->rank)) stream->leave();
      stream->stop(kEnded);
    }
  }
  wake();
}

bool Streams::leave() {
  std::map<std::uint32_t, Window> windows;  // destroyed without the lock: it may hold the group
  {
    const std::lock_guard<std::mutex> lock(streams_mutex_);
    windows.swap(windows_);
    has_windows_ = false;
    for (const auto& stream : streams_) {
      if (stream != nullptr) stream->close();
    }
  }
  if (is_asleep()) wake_progress();  // it polls these connections
  return true;
}

void Streams::facts(int rank, std::uint64_t* out) {
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  streams_[static_cast<std::size_t>(rank)]->facts(out);
  out[0] = 0;
  const std::lock_guard<std::mutex> own(mutex_);
  matcher_.for_each_held(
      rank, [out](const Early& message) { out[0] += message->bytes == nullptr ? 0 : message->form.bytes; });
}

}  // namespace parallel_state
