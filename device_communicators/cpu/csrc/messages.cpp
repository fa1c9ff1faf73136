#include "messages.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "transfers.h"

namespace parallel_state {
namespace {

constexpr std::uint64_t kFrameBytes = 4096;

std::uint64_t bytes_of(const std::vector<Piece>& pieces) {
  std::uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

std::uint64_t counted_bytes(const std::vector<Piece>& pieces, int heads) {
  std::uint64_t head_bytes = 0;
  for (int head = 0; head < heads; ++head) head_bytes += pieces[head].bytes;
  return bytes_of(pieces) - head_bytes + std::max(kFrameBytes, head_bytes);
}

Counted counted(Told told) {
  const bool is_list = (told.word & 255) == static_cast<std::uint64_t>(Method::kBroadcastTensorDictWithSpec);
  return is_list ? Counted::kBroadcastList : Counted::kBroadcastMessage;
}

template <typename End>
bool is_free(const OpenEnd<End>& open) {
  return !open.closed && open.report->broken == 0 && open.report->reserved.load(std::memory_order_acquire) == 0;
}

bool is_free_reader(const OpenReader& open) {
  return is_free(open) && (open.end.bytes_left() == 0 || open.report->found != 0);
}

class Reading {
 public:
  Reading(OpenReader& open, double timeout_s) : open_(open), timeout_s_(timeout_s), started_ns_(now_ns()) {}

  // A peer's bytes are compared with the first piece, not parsed.
  Outcome read(std::uint64_t number, const std::vector<Piece>& pieces) {
    QueueReader& end = open_.end;
    const Piece& head = pieces[0];
    if (!wait_for_head(number)) return Outcome::kLeft;
    const bool is_expected = end.header().fingerprint == number && end.bytes_left() == bytes_of(pieces) &&
                             end.is_next(static_cast<const char*>(head.address), head.bytes);
    if (!is_expected) return leave();
    const Piece passed{nullptr, head.bytes};
    const bool done = check(end.read(&passed, 1, timeout_s_)) &&
                      check(end.read(pieces.data() + 1, static_cast<int>(pieces.size()) - 1, timeout_s_));
    return done ? Outcome::kDone : Outcome::kLeft;
  }

  Outcome read_value(std::uint64_t number, Taker& taker, std::uint64_t* bytes) {
    QueueReader& end = open_.end;
    if (taker.wants_loans()) end.want_loans(true);
    if (!wait_for_head(number)) return Outcome::kLeft;
    QueueReport& report = *open_.report;
    const std::uint64_t head_bytes = end.header().head_bytes, tensor_bytes = end.bytes_left() - head_bytes;
    report.head_bytes = static_cast<std::int64_t>(head_bytes);
    report.total_bytes = static_cast<std::int64_t>(end.bytes_left());
    report.fingerprint = static_cast<std::int64_t>(end.header().fingerprint);
    if (end.header().fingerprint != number) return leave();
    const std::uint64_t found_bytes = head_bytes > taker.most_head_bytes() ? kHeadStart : head_bytes;
    char* const head = taker.head_buffer(found_bytes);
    const Piece piece{head, found_bytes};
    if (!check(end.read(&piece, 1, timeout_s_))) return Outcome::kLeft;
    std::vector<Loan> loans;
    if (taker.wants_loans() && !check(end.borrow(&loans, timeout_s_))) return Outcome::kLeft;
    std::vector<Piece> pieces;
    const bool were_lent = !loans.empty();
    const bool is_taken =
        taker.take_head({head, found_bytes, head_bytes, tensor_bytes, end.is_at_hand(), &loans}, &pieces);
    if (is_taken && were_lent) copy(&loans, pieces);
    for (const Loan& loan : loans) loan.give_back();
    const std::uint64_t wanted_bytes = bytes_of(pieces);
    bool done = is_taken || end.bytes_left() == 0;
    if (is_taken && !were_lent) {
      done = check(wanted_bytes == tensor_bytes ? QueueStatus::kDone : QueueStatus::kMalformed) &&
             check(end.read(pieces.data(), static_cast<int>(pieces.size()), timeout_s_));
    }
    if (done) *bytes = std::max(kFrameBytes, head_bytes) + tensor_bytes;
    return !is_taken ? Outcome::kRaised : done ? Outcome::kDone : Outcome::kLeft;
  }

 private:
  static void copy(std::vector<Loan>* loans, const std::vector<Piece>& pieces) {
    auto loan = loans->begin();
    std::uint64_t offset = 0;
    for (const Piece& piece : pieces) {
      for (std::uint64_t done = 0; done < piece.bytes && loan != loans->end();) {
        const std::uint64_t part = std::min(loan->bytes - offset, piece.bytes - done);
        std::memcpy(static_cast<char*>(piece.address) + done, loan->data + offset, part);
        done += part;
        offset += part;
        if (offset < loan->bytes) continue;
        ++loan;
        offset = 0;
      }
    }
  }

  bool wait_for_head(std::uint64_t number) {
    return wait(number) && check(open_.end.bytes_left() == 0 ? QueueStatus::kMalformed : QueueStatus::kDone);
  }

  bool wait(std::uint64_t number) {
    QueueReport& report = *open_.report;
    const bool is_here = report.found != 0;
    report.found = 0;
    const QueueStatus status = is_here ? QueueStatus::kDone : open_.end.next(timeout_s_);
    // The next call receives a message to this rank alone.
    if (status == QueueStatus::kInterrupted && number == 0) return false;
    return check(status);
  }

  Outcome leave() {
    open_.report->found = 1;
    return Outcome::kLeft;
  }

  bool check(QueueStatus status) {
    if (status == QueueStatus::kDone) return true;
    QueueReport& report = *open_.report;
    report.suspect = open_.end.suspect();
    report.reporter = open_.end.given_up().reporter;
    report.reason = open_.end.given_up().status;
    report.elapsed_us = us_since(started_ns_);
    report.broken = static_cast<std::int64_t>(status);
    return false;
  }

  OpenReader& open_;
  const double timeout_s_;
  const std::int64_t started_ns_;
};

bool announce(Handle& handle, Told told, int src, std::int64_t spin_ns) {
  return handle.run_entered([&](Group& self, double timeout_s) {
    self.tell(told);
    return self.announce(src, timeout_s, spin_ns);
  }) == Status::kDone;
}

template <typename Read>
Outcome receive(Served& served, ToOne from, Read read) {
  Handle& handle = served.handle();
  const std::shared_ptr<OpenReader> open = from.rank < 0 ? nullptr : handle.queues().reader(from.rank, false);
  if (open == nullptr || handle.liveness().is_doomed()) return Outcome::kLeft;
  const InTurn<QueueReader> turn{*open};
  if (!turn || !is_free_reader(*open)) return Outcome::kLeft;
  const RecordedTransfer transfer{served, from.received(), from.rank, from.method};
  std::uint64_t bytes = 0;
  const Outcome outcome = read(Reading{*open, handle.timeout_s()}, 0, &bytes);
  const bool has_come = outcome == Outcome::kDone || (outcome == Outcome::kRaised && bytes != 0);
  if (has_come) served.end(transfer.record(), from.received(), bytes);
  return outcome;
}

template <typename Carry>
Outcome record_between_hosts(Served& served, Told told, Carry carry) {
  const Entered entered{served.handle()};
  if (!entered) return Outcome::kLeft;
  Record& record = served.begin(counted(told), told);
  std::uint64_t bytes = 0;
  const Outcome outcome = carry(&bytes);
  if (outcome == Outcome::kLeft) {
    served.drop_broadcast(record);
  } else {
    served.end(record, counted(told), bytes);
  }
  return outcome;
}

template <typename Read>
Outcome receive_of_all(Served& served, Told told, int src, Read read) {
  Handle& handle = served.handle();
  const bool is_rank = src >= 0 && src < handle.size() && src != handle.rank();
  const std::shared_ptr<OpenReader> open = is_rank ? handle.queues().reader(src, true) : nullptr;
  if (open == nullptr) return Outcome::kLeft;
  const InTurn<QueueReader> turn{*open};
  if (!turn || !is_free_reader(*open)) return Outcome::kLeft;
  const Entered entered{handle};
  if (!entered) return Outcome::kLeft;
  Record& record = served.begin(counted(told), told);
  std::uint64_t bytes = 0;
  Outcome outcome = Outcome::kLeft;
  const bool is_announced = open->report->found != 0;
  if (is_announced || announce(handle, told, src, open->spin_ns)) {
    outcome = read(Reading{*open, handle.timeout_s()}, *open->broadcasts + 1, &bytes);
  }
  if (outcome == Outcome::kDone || outcome == Outcome::kRaised) {
    ++*open->broadcasts;  // else Python repeats the call
    served.end(record, counted(told), bytes);
  } else {
    served.drop_broadcast(record);
  }
  return outcome;
}

class Expected final : public Taker {
 public:
  explicit Expected(const std::vector<Piece>& pieces) : pieces_(pieces) {}
  std::uint64_t most_head_bytes() const override { return std::max(kMostListHead, pieces_[0].bytes); }
  bool wants_loans() const override { return false; }
  char* head_buffer(std::uint64_t bytes) override {
    head_.resize(bytes);
    return head_.data();
  }
  bool take_head(const Head& head, std::vector<Piece>* pieces) override {
    if (head.bytes != pieces_[0].bytes || std::memcmp(head.data, pieces_[0].address, head.bytes) != 0) return false;
    pieces->assign(pieces_.begin() + 1, pieces_.end());
    return true;
  }
  bool leaves_message() const override { return true; }

 private:
  const std::vector<Piece>& pieces_;
  std::vector<char> head_;
};

Outcome receive_between_hosts(Served& served, Told told, int src, Taker& taker) {
  return record_between_hosts(served, told, [&](std::uint64_t* bytes) {
    HostsGroup::Taken taken;
    const Status status = receive_entered(served.handle(), told, src, taker, &taken);
    *bytes = std::max(kFrameBytes, taken.head_bytes) + taken.tensor_bytes;
    if (taken.is_refused) return taker.leaves_message() ? Outcome::kLeft : Outcome::kRaised;
    return status == Status::kDone ? Outcome::kDone : Outcome::kLeft;
  });
}

Outcome outcome_of(const Transfers::Received& received) {
  if (received.is_refused && received.how != kLeftMessage) return Outcome::kRaised;
  return received.how == kEndedTransfer ? Outcome::kDone : Outcome::kLeft;
}

Outcome receive_over(Transfers& transfers, Served& served, ToOne from, Taker& taker) {
  const RecordedTransfer transfer{served, from.received(), from.rank, from.method};
  const Transfers::Received received =
      transfers.receive_message(from.rank, transfers.message_tag(), served.handle().timeout_s(), taker);
  if (received.how == kEndedTransfer) {
    served.end(transfer.record(), from.received(), std::max(kFrameBytes, received.head_bytes) + received.tensor_bytes);
  }
  return outcome_of(received);
}

}  // namespace

std::shared_ptr<Transfers> connections_of(Served& served, int rank) {
  Handle& handle = served.handle();
  if (rank < 0 || rank >= handle.size() || rank == handle.rank() || handle.liveness().is_doomed()) return nullptr;
  std::shared_ptr<Transfers> transfers = handle.transfers();
  return transfers != nullptr && transfers->carries_messages() ? transfers : nullptr;
}

std::int64_t start_message(Served& served, Transfers& transfers, ToOne to, const OutgoingMessage& message,
                           const TransferUser* user, void* self, bool waits) {
  const std::uint64_t tensor_bytes = bytes_of(message.tensors), head_bytes = message.head_bytes;
  const std::uint64_t bytes = std::max(kFrameBytes, head_bytes) + tensor_bytes;
  const RecordedTransfer transfer{served, to.counted(), to.rank, to.method};
  const TransferCall call{
      to.rank, 1, transfers.message_tag(), kMessageDtype, nullptr, head_bytes + tensor_bytes, 0, user, self, &message};
  const bool ends = waits && transfers.run(call, served.handle().timeout_s()) == kEndedTransfer;
  const std::int64_t number = !waits ? transfers.start(call, false) : ends ? kDoneTransfer : kRefusedTransfer;
  if (number == kDoneTransfer) {
    served.end(transfer.record(), to.counted(), bytes);
  } else if (number > 0) {
    served.count(to.counted(), bytes);
  }
  return number;
}

bool write_list_head(std::string_view form, const std::vector<std::uint64_t>& sizes, std::vector<char>* head) {
  constexpr std::size_t kDigits = 32, kHeaderBytes = 32;
  const std::size_t body_bytes = kDigits / 2 + 8 * sizes.size();
  if (form.size() != kDigits || kHeaderBytes + body_bytes > kMostListHead) return false;
  head->clear();
  const auto number = [head](std::uint64_t value, int bytes) {
    for (int byte = 0; byte < bytes; ++byte) head->push_back(static_cast<char>(value >> 8 * byte));
  };
  std::uint64_t tensor_bytes = 0;
  for (const std::uint64_t size : sizes) tensor_bytes += size;
  head->insert(head->end(), {'P', 'S', 'M', '1', 2, 0, 0, 0});
  number(sizes.size(), 4);
  number(0, 4);
  number(body_bytes, 8);
  number(tensor_bytes, 8);
  const auto value = [](char digit) {
    return digit >= '0' && digit <= '9' ? digit - '0' : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
  };
  for (std::size_t at = 0; at < kDigits; at += 2) {
    const int high = value(form[at]), low = value(form[at + 1]);
    if (high < 0 || low < 0) return false;
    head->push_back(static_cast<char>(high << 4 | low));
  }
  for (const std::uint64_t size : sizes) number(size, 8);
  return true;
}

Outcome send_message(Served& served, ToOne to, const std::vector<Piece>& pieces, int heads) {
  Handle& handle = served.handle();
  const std::shared_ptr<OpenWriter> open = to.rank < 0 ? nullptr : handle.queues().writer(to.rank);
  if (open == nullptr || handle.liveness().is_doomed()) return Outcome::kLeft;
  const InTurn<QueueWriter> turn{*open};
  if (!turn || !is_free(*open)) return Outcome::kLeft;
  if (!open->end.fit(pieces.data(), static_cast<int>(pieces.size()), heads)) return Outcome::kNoRoom;
  const RecordedTransfer transfer{served, to.counted(), to.rank, to.method};
  open->end.write(0);
  served.end(transfer.record(), to.counted(), counted_bytes(pieces, heads));
  return Outcome::kDone;
}

Status broadcast_entered(Handle& handle, Told told, const std::vector<Piece>& pieces, int heads) {
  return handle.run_entered([&](Group& self, double timeout_s) {
    self.tell(told);
    return handle.hosts()->send_message(pieces, heads, timeout_s);
  });
}

Status receive_entered(Handle& handle, Told told, int src, Taker& taker, HostsGroup::Taken* taken) {
  return handle.run_entered([&](Group& self, double timeout_s) {
    self.tell(told);
    return handle.hosts()->receive_message(src, taker, taken, timeout_s);
  });
}

Outcome broadcast_message(Served& served, Told told, const std::vector<Piece>& pieces, int heads) {
  Handle& handle = served.handle();
  if (handle.hosts() != nullptr) {
    return record_between_hosts(served, told, [&](std::uint64_t* bytes) {
      *bytes = counted_bytes(pieces, heads);
      return broadcast_entered(handle, told, pieces, heads) == Status::kDone ? Outcome::kDone : Outcome::kLeft;
    });
  }
  const std::shared_ptr<OpenWriter> open = handle.queues().writer(-1);
  if (open == nullptr) return Outcome::kLeft;
  const InTurn<QueueWriter> turn{*open};
  if (!turn || !is_free(*open)) return Outcome::kLeft;
  const Entered entered{handle};
  if (!entered) return Outcome::kLeft;
  if (!open->end.fit(pieces.data(), static_cast<int>(pieces.size()), heads)) return Outcome::kNoRoom;
  Record& record = served.begin(counted(told), told);
  if (!announce(handle, told, handle.rank(), open->spin_ns)) {
    open->end.drop();
    served.drop_broadcast(record);
    return Outcome::kLeft;
  }
  open->end.write(++*open->broadcasts);  // can't wait: room only grows since the check
  served.end(record, counted(told), counted_bytes(pieces, heads));
  return Outcome::kDone;
}

Outcome receive_message(Served& served, ToOne from, const std::vector<Piece>& pieces) {
  if (const auto transfers = connections_of(served, from.rank)) {
    Expected expected{pieces};
    return transfers->is_reserved(from.rank) ? Outcome::kLeft : receive_over(*transfers, served, from, expected);
  }
  return receive(served, from, [&](Reading reading, std::uint64_t number, std::uint64_t* bytes) {
    *bytes = counted_bytes(pieces, 1);
    return reading.read(number, pieces);
  });
}

Outcome receive_broadcast(Served& served, Told told, int src, const std::vector<Piece>& pieces) {
  if (served.handle().hosts() != nullptr) {
    Expected expected{pieces};
    return receive_between_hosts(served, told, src, expected);
  }
  return receive_of_all(served, told, src, [&](Reading reading, std::uint64_t number, std::uint64_t* bytes) {
    *bytes = counted_bytes(pieces, 1);
    return reading.read(number, pieces);
  });
}

Outcome receive_value(Transfers& transfers, int src, int tag, double timeout_s, Taker& taker, QueueReport* report) {
  const Transfers::Received received = transfers.receive_message(src, tag, timeout_s, taker);
  report->head_bytes = static_cast<std::int64_t>(received.head_bytes);
  report->total_bytes = static_cast<std::int64_t>(received.head_bytes + received.tensor_bytes);
  return outcome_of(received);
}

Outcome receive_value(Served& served, ToOne from, Taker& taker) {
  if (const auto transfers = connections_of(served, from.rank)) return receive_over(*transfers, served, from, taker);
  return receive(served, from, [&](Reading reading, std::uint64_t number, std::uint64_t* bytes) {
    return reading.read_value(number, taker, bytes);
  });
}

Outcome receive_broadcast_value(Served& served, Told told, int src, Taker& taker) {
  if (served.handle().hosts() != nullptr) return receive_between_hosts(served, told, src, taker);
  return receive_of_all(served, told, src, [&](Reading reading, std::uint64_t number, std::uint64_t* bytes) {
    return reading.read_value(number, taker, bytes);
  });
}

Outcome receive_value(OpenReader& open, std::uint64_t number, double timeout_s, Taker& taker) {
  const InTurn<QueueReader> turn{open, timeout_s};
  if (!turn) {
    open.report->suspect = open.end.writer();
    open.report->broken = static_cast<std::int64_t>(QueueStatus::kTimedOut);
    return Outcome::kLeft;
  }
  std::uint64_t bytes = 0;
  return open.closed || open.report->broken != 0 ? Outcome::kLeft
                                                 : Reading{open, timeout_s}.read_value(number, taker, &bytes);
}

namespace {

class TensorTransfer {
 public:
  TensorTransfer(Served& served, ToOne other, Counted counted, const PlainTensor& x)
      : served_(served), other_(other), counted_(counted), x_(x) {}

  void begin() {
    transfer_.emplace(served_, counted_, other_.rank, other_.method);
    transfer_->record().describe(x_.dtype, x_.sizes, x_.dims);
  }
  Outcome end(Transfers::Outcome outcome) {
    if (outcome == Transfers::Outcome::kDone) served_.end(transfer_->record(), counted_, x_.bytes);
    return static_cast<Outcome>(outcome);
  }

 private:
  Served& served_;
  const ToOne other_;
  const Counted counted_;
  const PlainTensor& x_;
  std::optional<RecordedTransfer> transfer_;
};

std::shared_ptr<Transfers> transfers_of(Served& served, int rank) {
  Handle& handle = served.handle();
  return rank < 0 || rank >= handle.size() || handle.liveness().is_doomed() ? nullptr : handle.transfers();
}

}  // namespace

Outcome send_tensor(Served& served, int dst, const PlainTensor& x) {
  const std::shared_ptr<Transfers> transfers = transfers_of(served, dst);
  if (transfers == nullptr) return Outcome::kLeft;
  const ToOne to{dst, ToOne::kPlainTensor};
  TensorTransfer transfer{served, to, to.counted(), x};
  const auto data = [&] {
    void* const at = x.data();
    transfer.begin();
    return at;
  };
  return transfer.end(transfers->send_now(dst, x.dtype, x.bytes, served.handle().timeout_s(), data));
}

Outcome receive_tensor(Served& served, int src, const PlainTensor& out) {
  const std::shared_ptr<Transfers> transfers = transfers_of(served, src);
  if (transfers == nullptr) return Outcome::kLeft;
  const ToOne from{src, ToOne::kPlainTensor};
  TensorTransfer transfer{served, from, from.received(), out};
  const double timeout_s = served.handle().timeout_s();
  return transfer.end(
      transfers->receive_now(src, out.dtype, out.bytes, timeout_s, [&] { transfer.begin(); }, out.data));
}

}  // namespace parallel_state
