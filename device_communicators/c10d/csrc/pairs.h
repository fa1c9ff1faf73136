// send and recv between the ranks of one host: a ring of chunks from each rank to each other, and the tags in its
// messages.
//
// A send is done when the ring has taken it, at once where there is room. Receives of a source match its messages by
// tag, in the order in which both were started; a message that nobody waits for yet is copied out of the ring as soon
// as one behind it is wanted. Who waits reads the ring itself; for what nobody waits a thread looks now and then.
#pragma once

#include <list>
#include <memory>
#include <mutex>

#include "library.h"
#include "work.h"

namespace parallel_state {

// Where a group's queues lie, see channels.py.
struct QueuePlaces {
  char* control = nullptr;  // null: there are none
  void* windows = nullptr;
  int descriptor = -1;
  std::size_t data_offset = 0;
  std::size_t chunk_bytes = 0;
  std::size_t chunks = 0;
  int kinds = 0;  // queues between two ranks, of which this uses the first
  std::int64_t spin_ns = 0;
  int yields = 0;
};

// The head of a message.
struct Message {
  std::int32_t tag = 0;
  std::int32_t dtype = 0;  // at::ScalarType
  std::int64_t bytes = 0;
};

// What went wrong in a transfer; the rank to blame, who told of it and with which status.
struct PairFailure {
  QueueStatus status;
  int peer;
  std::int64_t suspect;
  std::int64_t reporter;
  std::int64_t reason;
  double elapsed_s;
  std::string sent;  // the message, in words, where it doesn't fit its receiver; else empty
  std::string expected;
};

class Pairs : public std::enable_shared_from_this<Pairs> {
 public:
  using Raise = std::function<std::exception_ptr(const char* operation, const PairFailure&)>;
  static constexpr int kAnySource = -1;

  class Transfer final : public Operation {
   public:
    using Operation::Operation;
    Pairs* pairs = nullptr;  // outlives its transfers: `owner` holds it
    std::shared_ptr<void> owner;
    at::Tensor tensor;  // contiguous; dropped when it is done
    at::Tensor target;  // the caller's, where that isn't `tensor`
    int peer = kAnySource;
    int tag = 0;
    bool is_send = false;
    std::uint64_t order = 0;
    Clock::time_point started, deadline;

   protected:
    bool await(std::optional<Clock::time_point> until) override { return pairs->await(*this, until); }
  };
  using Held = c10::intrusive_ptr<Transfer>;

  Pairs(std::shared_ptr<const Library> library, std::uint64_t group, int rank, int size, QueuePlaces places,
        Raise raise, Interruption interruption);
  ~Pairs();

  void start(Held transfer);
  bool await(Transfer& transfer, std::optional<Clock::time_point> until);

  // Fails what is under way, and ends the thread. Nothing is started afterwards.
  void close(const std::exception_ptr& error);
  // Returns once nothing is under way, or at the deadline, with false.
  bool drain(Clock::time_point deadline);

 private:
  struct Unexpected {
    Message head;
    std::vector<char> bytes;
  };
  struct Outgoing {
    std::mutex turn;  // held by who writes; all that isn't the other mutex's is by it
    void* end = nullptr;
    QueueReport report;
    Held current;  // begun, and not written to its end
    Message head;
    std::list<Held> waiting;  // by mutex_
  };
  struct Incoming {
    std::mutex turn;  // held by who reads; all that isn't the other mutex's is by it
    void* end = nullptr;
    QueueReport report;
    Message head;  // of the message that is being read
    bool in_message = false;
    Held current;  // for which it is; null: nobody wanted it, and it goes into `spare`
    Unexpected spare;
    std::int64_t done_bytes = 0;
    std::list<Unexpected> unexpected;  // this and the next: by mutex_
    std::list<Held> posted;
  };

  // What a thread whose turn it was has brought to its end. It is told once the turn is given back: callbacks may begin
  // transfers with the same peer.
  struct Ended {
    std::vector<Held> done;
    const char* operation = nullptr;  // that failed, by `failure`
    PairFailure failure{};
    Held first;                // to fail; may be null
    std::exception_ptr error;  // or what was raised
  };

  // Each moves what can be moved to or from `peer`, waiting at most `timeout_s`, until `goal` is done or nothing more
  // comes. False where another thread is at it.
  bool push(int peer, double timeout_s, Transfer* goal = nullptr);
  bool pull(int peer, double timeout_s, Transfer* goal = nullptr);
  void push_in_turn(Outgoing& out, int peer, double timeout_s, Transfer* goal, Ended* ended);
  void pull_in_turn(Incoming& in, int peer, double timeout_s, Transfer* goal, Ended* ended);
  void announce(const Ended& ended);
  void push_all();
  void pull_all();

  void* open(int src, int dst, QueueReport* report);
  bool begin_message(Incoming& in, int peer, double timeout_s, Ended* ended);
  Held match(Incoming& in, int tag);  // under mutex_
  bool take_unexpected(const Held& transfer, Ended* ended);
  void deliver(const Held& transfer, int peer, const Message& head, const char* bytes, Ended* ended);
  void finish(const Held& transfer, Ended* ended);
  bool has_failed();

  // Every transfer that is open fails, and every later one.
  void fail(const char* operation, PairFailure failure, const Held& first);
  static void note_failure(QueueStatus status, bool sends, int peer, const QueueReport& report, const Held& first,
                           Ended* ended);
  void fail_all(const std::exception_ptr& error, const Held& first = {}, const std::exception_ptr& error_of_first = {});
  void expire();
  void interrupt(Transfer& transfer);
  void look_for_losses();
  void serve();

  const std::shared_ptr<const Library> library_;
  const std::uint64_t group_;
  const int rank_, size_;
  const QueuePlaces places_;
  const Raise raise_;
  const Interruption interruption_;
  void* liveness_;
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  std::vector<std::unique_ptr<Incoming>> incoming_;
  std::mutex mutex_;
  std::list<Held> any_source_;  // this and what follows: by mutex_
  std::uint64_t order_ = 0;
  std::list<Held> open_;  // all that aren't done
  bool closed_ = false;
  bool sleeps_ = false;  // the thread, until it is woken
  std::exception_ptr failure_;
  std::condition_variable wake_;
  std::condition_variable finished_;
  std::thread thread_;
};

}  // namespace parallel_state
