// One rank's connections to ranks of other hosts, for a group's collectives. Both ranks post and expect messages in the
// same order. A body is read only if its record equals this rank's call. The kernel's buffers bound how far a rank gets
// ahead. Not thread-safe, except Connections::close.
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
#include "sockets.h"
#include "wait.h"

namespace parallel_state {

class Inbox {
 public:
  enum class State { kHead, kChosen, kBody, kDiffers, kFailed, kLeft, kForeign };
  static constexpr std::size_t kBufferBytes = (64 << 10) + sizeof(CallRecord);

  Inbox() : buffer_(new char[kBufferBytes]) {}

  struct Stripe {
    char* place = nullptr;
    std::uint64_t missing = 0;
  };
  // Bodies of at least `bytes` arrive in parts, over this and `count` other connections.
  void stripe(std::size_t count, std::uint64_t bytes) {
    stripes_.resize(count);
    striped_bytes_ = bytes;
  }

  void begin(const CallRecord* own);
  void expect(char* at, std::uint64_t bytes);
  // The state is kChosen from the head until `take`.
  void expect_any();
  void take(char* at);
  void listen(bool on = true) { listens_ = on; }
  bool listens() const { return listens_; }

  int room(iovec* pieces);
  void came(std::size_t bytes);
  Stripe& stripe_at(std::size_t index) { return stripes_[index]; }
  void stripe_came(std::size_t index, std::size_t bytes);

  State state() const { return state_; }
  std::uint32_t done() const { return done_; }
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
  std::vector<Expected> expected_;
  std::uint32_t done_ = 0;
  bool listens_ = false;
  bool is_failure_ = false;
  CallRecord head_;
  FailureNote failure_;
  char* place_ = nullptr;
  std::uint64_t missing_ = 0;
  std::size_t stripes_left_ = 0;
  std::uint64_t striped_bytes_ = UINT64_MAX;
  std::vector<Stripe> stripes_;
  std::unique_ptr<char[]> buffer_;
  std::size_t begin_ = 0, end_ = 0;
};

class Outbox {
 public:
  void begin();
  void post(const CallRecord& head, const char* body, std::uint64_t bytes);
  int pieces(iovec* pieces, int most) const;
  void sent(std::size_t bytes);
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
  std::vector<Message> messages_;
  std::uint32_t done_ = 0;
};

class Link {
 public:
  static constexpr std::uint64_t kStripedBytes = 256 << 10;

  // Owns the descriptors; the first one carries heads.
  Link(int rank, std::vector<int> descriptors);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  void begin(const CallRecord* own);
  void send(const CallRecord& head, const void* body, std::uint64_t bytes);
  bool write();
  bool read();
  // A failure note may follow messages that arrived before the call began.
  void read_behind();
  bool is_sending() const { return !out_.is_idle() || striped_ != 0; }
  bool has_sent(std::uint32_t count) const;
  bool is_broken() const { return broken_; }
  bool wants_to_read() const {
    return error_.empty() && !in.is_stuck() && (!in.is_idle() || broken_ || (in.listens() && is_sending()));
  }
  bool is_in_trouble() const { return in.is_stuck() || !error_.empty(); }
  void poll_for(std::vector<pollfd>* polled) const;
  void leave();
  void end(const FailureNote* why);
  const std::vector<int>& descriptors() const { return descriptors_; }
  const std::string& error() const { return error_; }
  std::uint32_t posted() const { return out_.posted(); }

  const int rank;
  Inbox in;
  std::atomic<std::uint64_t> sends{0}, receives{0};

 private:
  void break_off(int error);
  bool read_stripe(std::size_t index);

  const std::vector<int> descriptors_;
  Outbox out_;
  std::vector<StripeSends<std::uint32_t>> stripes_;
  std::size_t striped_ = 0;
  bool broken_ = false;
  std::string broken_by_, error_;
  std::uint64_t receives_before_ = 0;
};

class Connections final : public SideWork {
 public:
  // Owns `descriptors`; several to one rank are in the order of the other side.
  Connections(int size, const int* ranks, const int* descriptors, int count);

  void begin(const CallRecord* own);
  bool has(int rank) const { return by_rank_[static_cast<std::size_t>(rank)] != nullptr; }
  Link& operator[](int rank) { return *by_rank_[static_cast<std::size_t>(rank)]; }
  std::vector<std::unique_ptr<Link>>& links() { return links_; }

  bool move();
  bool advance() override { return move(), !is_idle(); }
  bool is_idle() const;
  int late() const;
  Link* trouble();
  Link* failed();
  bool sleep(std::int64_t limit_ns);
  void leave();
  void end(const FailureNote* why);
  // Thread-safe. Peers read the end of the stream.
  void close();

 private:
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<Link*> by_rank_;
  std::vector<pollfd> polled_;
};

}  // namespace parallel_state
