// Messages over TCP connections between ranks on different hosts. device_communicators/cpu/streams.py describes
// messages, announcements, and bodies that arrive before their receive.
//
// Descriptors are the caller's, who closes them after `close`. The memory of a body is its owner's, an object of Python
// that a transfer has until it is done, or its connection has an error: from then on nobody touches it. What callers do
// meanwhile, as on Ctrl-C, doesn't matter. Any thread may call anything, and several may wait at once; none holds the
// lock while it sleeps, or while it asks for Python's.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "matcher.h"
#include "progress.h"

namespace parallel_state {

struct Transfer {
  std::uint64_t number = 0;
  std::string text;   // of the call; both ends must have the same
  std::string found;  // the other one's, where that differs
  char* at = nullptr;
  std::uint64_t bytes = 0;
  void* owner = nullptr;   // of Python; null for none
  bool announced = false;  // a send without its body
  int left = 0;            // what has yet to be written or read of it
};

class Streams;

// A further connection to the same rank, for a stripe of each large body: their bytes alone, in the order of the
// bodies.
struct Stripe {
  struct Piece {
    const char* at;
    std::uint64_t bytes;
    Transfer* transfer;
  };
  int descriptor;
  std::deque<Piece> sends;
  char* place = nullptr;  // of what is missing of the body that is read; null: it goes nowhere
  std::uint64_t missing = 0;
};

class Stream {
 public:
  Stream(Streams& all, int rank, int descriptor, std::uint64_t early_bytes);
  void add(int descriptor) { stripes_.push_back(Stripe{descriptor, {}}); }

  bool is_sending() const { return !sends_.empty() || striped_ > 0; }
  bool is_receiving() const { return receiving_ > 0; }
  bool is_broken() const { return !broken_.empty(); }
  void fail(std::string error) {
    if (error_.empty()) error_ = std::move(error);
    to_forget_ = true;
  }
  bool has_room(std::uint64_t bytes);

  // What the kernel has room for, or has; false where that is nothing.
  bool write();
  bool read();
  void read_last();
  void parse();

  void send(std::string head, const char* body, std::uint64_t bytes, Transfer* transfer);
  std::string head_of(const char* magic, std::uint32_t kind, const std::string& text, std::uint64_t bytes) const;
  void send_at_once(std::uint32_t kind, const std::string& text, const char* body, std::uint64_t bytes, Transfer*);
  void receive(std::uint32_t kind, Transfer* transfer, bool is_answer = false);
  void poll_for(std::vector<pollfd>* polled) const;
  void end_sending();
  void close();
  void forget();  // after an error: where bodies come from and go to

  const int rank;

 private:
  friend class Streams;
  struct Outgoing {
    std::string head;
    const char* body;
    std::uint64_t bytes, sent;
    Transfer* transfer;
  };
  struct Incoming {
    Transfer* transfer;
    bool is_answer;
  };
  struct Early {
    std::uint32_t kind;
    std::string text;
    std::uint64_t bytes;
    bool announced;
    std::unique_ptr<char[]> body;  // null for what was announced
    bool is_whole;
    std::optional<Incoming> receiver;  // of a body that isn't whole yet
  };
  using Message = std::shared_ptr<Early>;

  void deliver(const Incoming& incoming, const Early& message);
  void begin_body(std::uint32_t kind, std::string text, std::uint64_t bytes);
  void begin_asked(std::uint32_t kind, std::uint64_t bytes);
  void ask(Transfer* transfer, std::uint32_t kind, const std::string& text, std::uint64_t bytes);
  bool match(const Incoming& incoming, std::uint32_t kind, const std::string& text, std::uint64_t bytes, char** at);
  void note_answer(Transfer* transfer, std::uint32_t kind, const std::string& text);
  void answer(Transfer* transfer, std::uint32_t kind, std::uint64_t bytes, bool announced);
  void expect(char* at, std::uint64_t bytes);
  void consume();
  void end_part();
  void end_message();
  bool write_messages();
  bool read_messages();
  bool write_stripe(Stripe& stripe);
  bool read_stripe(Stripe& stripe);
  bool is_striped(std::uint64_t bytes) const;
  std::uint64_t stripe_bytes(std::uint64_t bytes) const;  // of each connection but the last ones
  bool awaits_stripes() const { return in_body_ && missing_ == 0; }
  void drop_sends();

  Streams& all_;
  int descriptor_;  // -1 once it is closed
  std::vector<Stripe> stripes_;
  int striped_ = 0;       // pieces in their `sends`
  int stripes_left_ = 0;  // of which something is missing of the body that is read
  std::string error_;
  std::string broken_;      // nothing more can be written, for this reason; there may be something to read
  bool to_forget_ = false;  // it has an error, and may still know bodies
  std::deque<Outgoing> sends_;
  std::map<std::uint32_t, std::deque<Transfer*>> asked_;
  int receiving_ = 0;  // posted receives, what is in `asked_`, and what is being read of these
  const std::uint64_t early_limit_;
  std::uint64_t sent_bytes_ = 0, received_bytes_ = 0;  // sent at once, and what of that the other side has received
  std::uint64_t taken_bytes_ = 0;                      // received by this side of what came at once
  std::vector<char> buffer_;
  std::size_t begin_ = 0, end_ = 0;
  bool in_body_ = false;
  char* place_ = nullptr;  // of what is missing of a body; null: it goes nowhere
  std::uint64_t missing_ = 0;
  Transfer* reading_ = nullptr;  // the receive that it is of
  bool counted_ = false;         // whether that is one of `receiving_`
  Message early_;                // whose body is being read
};

struct Part {
  int rank;
  char* at;
  std::uint64_t bytes;
  void* owner = nullptr;  // the caller has it held; null once a transfer has it
};

class Streams final : public Movable, public std::enable_shared_from_this<Streams> {
 public:
  // What came of a call, where it isn't a number from 0 on.
  static constexpr std::int64_t kLook = -1;    // a slice of time has passed
  static constexpr std::int64_t kFailed = -2;  // less the rank whose connection has an error

  // Bodies from `striped_bytes` on are striped, where there is more than one connection.
  Streams(std::int64_t spin_ns, std::uint64_t striped_bytes);
  void add(int rank, int descriptor, std::uint64_t early_bytes);
  void add_stripe(int rank, int descriptor);  // the other side has it in the same place

  // Both return the number of a transfer.
  std::int64_t send(Part& part, std::uint32_t kind, std::string text);
  std::int64_t receive(Part& part, std::uint32_t kind, std::string text);
  // Moves data of all connections until the transfer is done, which returns 0.
  std::int64_t wait(std::int64_t slice_ns, std::uint64_t number);
  bool move() override;  // what nobody waits for
  bool has_left() override;

  // The owners that no transfer needs any more.
  std::vector<void*> take_owners();
  bool is_foreign() const;  // whether this is a forked process's copy, of which all calls are refused
  bool is_done(std::uint64_t number);
  std::string found(std::uint64_t number);
  std::string error(int rank);
  void fail(const std::string& error);
  void end_sending();
  void close();
  void facts(int rank, std::uint64_t* out);

  std::shared_ptr<Streams> itself;  // until `ps_streams_delete`

 private:
  friend class Stream;
  class Waiting;
  struct Pending {
    Transfer transfer;
    Stream* stream;
  };
  Stream* at(int rank);
  Transfer* make(Stream* stream, Part& part, std::string text);
  void part_done(Transfer* transfer);
  bool step();
  bool sleep(std::unique_lock<std::mutex>& lock, std::int64_t limit_ns);

  std::mutex mutex_;
  const std::int64_t spin_ns_;
  const std::uint64_t striped_bytes_;
  const int generation_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Stream*> by_rank_;
  Matcher<Stream::Incoming, Stream::Message> matcher_{0};  // tags are the messages' kinds
  std::unordered_map<std::uint64_t, Pending> pending_;
  std::unordered_map<std::uint64_t, std::string> found_;
  std::uint64_t numbers_ = 0;
  std::vector<void*> owners_;  // to be let go
  int waiters_ = 0;
};

}  // namespace parallel_state
