// The connections of one rank to ranks of other hosts, as the collectives of one group use them.
//
// Every message is a head of 64 bytes, the record of its call, and a body. A call posts what it sends to a rank, and
// says where the messages that it expects from a rank go to, both in an order that the two ranks have in common. A
// message's body is read to its place only after its head was compared with this rank's own call. Nothing is read that
// no call expects: what a rank sends ahead stays in the kernel, whose buffers bound how far a rank gets ahead.
//
// Inbox and Outbox are values without I/O: bytes in, positions and states out. Link and Connections move the bytes.
// One thread at a time; Connections::close is for any thread.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "group.h"
#include "wait.h"

namespace parallel_state {

// What a rank says of its call with every message of it.
struct CallRecord {
  static constexpr std::uint16_t kMagic = 0x3150;  // "P1"
  static constexpr std::uint16_t kBody = 1, kFailure = 2, kLeave = 3;

  std::uint16_t magic = kMagic;
  std::uint16_t kind = kBody;
  std::uint32_t sequence = 0;  // of the call
  std::uint64_t bytes = 0;     // of the body
  std::uint64_t word = 0, shape = 0;
  std::uint64_t history = 0;  // a digest of this call and all before
  std::uint64_t sizes = 0;    // 1 + the bytes of each block of an all_to_all whose blocks are even; else 0
  std::uint64_t earlier = 0, earlier_shape = 0;  // the call before, in words
};
static_assert(sizeof(CallRecord) == 64, "the head of every message");

inline bool is_same_call(const CallRecord& own, const CallRecord& other) {
  return own.history == other.history && own.sequence == other.sequence;
}

// The body of a message of kind kFailure: why the call of its sender failed, which ends the connection.
struct FailureNote {
  std::int64_t status = 0, suspect = -1, reporter = -1;
  Misfit misfit;
  Shown expected, found;
};

// What is received over one connection.
class Inbox {
 public:
  enum class State { kHead, kChosen, kBody, kDiffers, kFailed, kLeft, kForeign };
  static constexpr std::size_t kBufferBytes = (64 << 10) + sizeof(CallRecord);

  Inbox() : buffer_(new char[kBufferBytes]) {}

  // A stripe of a large body, which another connection brings.
  struct Stripe {
    char* place = nullptr;  // null: the bytes are dropped
    std::uint64_t missing = 0;
  };
  // Bodies from `bytes` on come in parts over this and `count` other connections.
  void stripe(std::size_t count, std::uint64_t bytes) {
    stripes_.resize(count);
    striped_bytes_ = bytes;
  }

  // A call begins, in which `own` stays as it is; no message is expected yet.
  void begin(const CallRecord* own);
  // The next message has `bytes`, for `at` (null: for nowhere).
  void expect(char* at, std::uint64_t bytes);
  // The next message has any number of bytes: with its head the state is kChosen, until `take`.
  void expect_any();
  void take(char* at);  // as many as the head says
  // Whether a failure note is read though no message is expected.
  void listen(bool on = true) { listens_ = on; }
  bool listens() const { return listens_; }

  // Where bytes are to be read to, in up to two pieces; none if nothing is to be read.
  int room(iovec* pieces);
  void came(std::size_t bytes);
  Stripe& stripe_at(std::size_t index) { return stripes_[index]; }
  void stripe_came(std::size_t index, std::size_t bytes);

  State state() const { return state_; }
  std::uint32_t done() const { return done_; }  // of the call's expected messages
  std::uint32_t expected() const { return static_cast<std::uint32_t>(expected_.size()); }
  bool is_idle() const { return done_ == expected_.size(); }
  bool is_stuck() const {
    return state_ == State::kDiffers || state_ == State::kFailed || state_ == State::kLeft || state_ == State::kForeign;
  }
  const CallRecord& head() const { return head_; }
  std::uint64_t expected_bytes() const { return expected_[done_].bytes; }
  const FailureNote& failure() const { return failure_; }

 private:
  struct Expected {
    char* at;
    std::uint64_t bytes;
    bool is_any;
  };
  void parse();
  void begin_body(char* at, std::uint64_t bytes);

  const CallRecord* own_ = nullptr;
  State state_ = State::kHead;
  std::vector<Expected> expected_;  // of this call
  std::uint32_t done_ = 0;
  bool listens_ = false;
  bool is_failure_ = false;  // what is read is a failure's body
  CallRecord head_;
  FailureNote failure_;
  char* place_ = nullptr;      // of what is missing
  std::uint64_t missing_ = 0;  // of the body that is read, on this connection
  std::size_t stripes_left_ = 0;
  std::uint64_t striped_bytes_ = UINT64_MAX;
  std::vector<Stripe> stripes_;
  std::unique_ptr<char[]> buffer_;
  std::size_t begin_ = 0, end_ = 0;
};

// What is sent over one connection.
class Outbox {
 public:
  void begin();  // all of the last call has been sent
  void post(const CallRecord& head, const char* body, std::uint64_t bytes);
  // Up to `most` pieces of what is to be sent next.
  int pieces(iovec* pieces, int most) const;
  void sent(std::size_t bytes);
  // Drops messages of which nothing was sent; false if a part of one was.
  bool drop();

  bool is_idle() const { return done_ == messages_.size(); }
  std::uint32_t posted() const { return static_cast<std::uint32_t>(messages_.size()); }
  std::uint32_t done() const { return done_; }

 private:
  struct Message {
    CallRecord head;
    const char* body;
    std::uint64_t bytes, sent;
  };
  std::vector<Message> messages_;  // of this call
  std::uint32_t done_ = 0;
};

// The connection to one rank, or several: a large body is striped over them.
class Link {
 public:
  static constexpr std::uint64_t kStripedBytes = 256 << 10;

  // Owns the descriptors, the first of which carries heads.
  Link(int rank, std::vector<int> descriptors);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  void begin(const CallRecord* own);
  void send(const CallRecord& head, const void* body, std::uint64_t bytes);
  bool write();
  bool read();
  // Reads once if the call's messages all came before it began: a failure note may lie behind them.
  void read_behind();
  bool is_sending() const { return !out_.is_idle() || striped_ != 0; }
  bool has_sent(std::uint32_t count) const;  // the first `count` messages of the call
  bool is_broken() const { return broken_; }
  bool wants_to_read() const {
    return error_.empty() && !in.is_stuck() && (!in.is_idle() || broken_ || (in.listens() && is_sending()));
  }
  bool is_in_trouble() const { return in.is_stuck() || !error_.empty(); }
  void poll_for(std::vector<pollfd>* polled) const;
  // Says that this rank leaves the group, if nothing is being sent.
  void leave();
  // Whether the other rank's kernel has received all bytes that were sent.
  bool is_received() const;
  // Ends sending, after a last message if there is one.
  void end(const FailureNote* why);
  const std::vector<int>& descriptors() const { return descriptors_; }
  const std::string& error() const { return error_; }
  std::uint32_t posted() const { return out_.posted(); }

  const int rank;
  Inbox in;
  std::atomic<std::uint64_t> sends{0}, receives{0};  // system calls that moved something; read by any thread

 private:
  struct Piece {
    const char* at;
    std::uint64_t bytes;
    std::uint32_t message;
  };
  struct StripeOut {
    std::vector<Piece> pieces;
    std::size_t first = 0;
  };
  void break_off(int error);
  bool write_stripe(std::size_t index);
  bool read_stripe(std::size_t index);

  const std::vector<int> descriptors_;
  Outbox out_;
  std::vector<StripeOut> stripes_;
  std::size_t striped_ = 0;  // pieces that are yet to be sent
  bool broken_ = false;      // nothing can be sent any more
  std::string broken_by_, error_;
  std::uint64_t receives_before_ = 0;  // when the call began
};

class Connections final : public SideWork {
 public:
  // `descriptors` of connections to `ranks`, whose order is that of the other side; owned from now on.
  Connections(int size, const int* ranks, const int* descriptors, int count);

  void begin(const CallRecord* own);
  bool has(int rank) const { return by_rank_[static_cast<std::size_t>(rank)] != nullptr; }
  Link& operator[](int rank) { return *by_rank_[static_cast<std::size_t>(rank)]; }
  std::vector<std::unique_ptr<Link>>& links() { return links_; }

  // Moves what can be moved at once; whether anything was.
  bool move();
  bool advance() override { return move(), !is_idle(); }
  bool is_idle() const;
  int late() const;  // the first rank that something is expected from or has yet to be sent to; -1: none
  Link* trouble();   // the first link that has any
  Link* failed();    // the first link whose other rank said that it failed, whether or not that was awaited
  // Sleeps until something can be moved. Returns true if a signal ended it.
  bool sleep(std::int64_t limit_ns);
  void leave();
  void end(const FailureNote* why);
  // Any thread: the other sides see the end of what this one sends.
  void close();

 private:
  std::vector<std::unique_ptr<Link>> links_;  // ascending by rank
  std::vector<Link*> by_rank_;
  std::vector<pollfd> polled_;
};

}  // namespace parallel_state
