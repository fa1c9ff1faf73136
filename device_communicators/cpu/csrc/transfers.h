// Sends and receives of plain tensors between the ranks of one host: a ring of chunks from each rank to each other.
//
// A send is done once its ring holds the whole message. Receives take messages by source and tag, as matcher.h has it.
// A message that no receive wants yet is copied out of the ring as soon as one behind it is wanted. Within a host no
// credit bounds these copies; the rings alone bound what a sender is ahead while nothing is received.
//
// A waiting caller moves the group's transfers itself; otherwise the process' progress thread does. Any thread may
// call. The memory of a transfer is borrowed until `release` is called.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "matcher.h"
#include "open_queue.h"
#include "progress.h"
#include "queue.h"
#include "transfer_call.h"
#include "windows.h"

namespace parallel_state {

// Locates a group's queues of tensors: `transfer_places` of cpu/channels.py.
struct TransferPlaces {
  char* control;
  Windows* windows;
  std::int64_t descriptor;
  std::uint64_t data_offset;
  std::uint64_t chunk_bytes;
  std::uint64_t chunks;
  std::int64_t kinds;  // queues between two ranks; the first is the one of tensors
  std::int64_t spin_ns;
  std::int64_t yields;
};

class Transfers final : public Movable, public std::enable_shared_from_this<Transfers> {
 public:
  using Number = std::uint64_t;
  static constexpr int kAnySource = -1;

  Transfers(std::shared_ptr<const Losses> losses, int rank, int size, const TransferPlaces& places);
  ~Transfers() override;

  // `waits`: the caller waits for it at once.
  std::int64_t start(const TransferCall& call, bool waits);

  // Waits until a transfer was settled. At the timeout (below 0: none) returns kLateTransfer, or fails it if `expires`.
  // Interrupted, nothing has failed yet.
  int wait(Number number, double timeout_s, bool expires);
  bool is_done(Number number);
  // Ends a transfer whose wait was broken off. All others fail with it if it has begun to move bytes, or `ends_all`.
  void interrupt(Number number, bool ends_all);

  // Sends or receives with tag 0 in one step, without an allocation. kNoRoom: the ring has none for all of it; kLeft:
  // another transfer is first, the next message is another one, or the call failed: `start` finds out which.
  enum class Outcome : int { kLeft = 0, kDone = 1, kNoRoom = 2 };
  Outcome send_now(int dst, int dtype, std::uint64_t bytes, const std::function<void*()>& data);
  // `data` and `begins` are called before it waits.
  Outcome receive_now(int src, int dtype, std::uint64_t bytes, const std::function<void()>& begins,
                      const std::function<void*()>& data);
  void set_timeout(double timeout_s) { timeout_s_.store(timeout_s, std::memory_order_relaxed); }  // of `receive_now`

  bool is_foreign() const;  // of a process that was forked from its own
  // False while nothing has failed.
  bool failure(TransferFailure* found);
  // Whether this thread is in the middle of moving bytes to or from `peer`.
  bool is_inside(int peer, bool sends) const;
  int waiting_sends(int dst);

  // Returns once nothing is under way, or false at the deadline.
  bool drain(double timeout_s);
  // Fails what is under way with kClosed; nothing starts afterwards. False where a thread is still in a queue: then the
  // memory must stay.
  bool close();

  bool move() override;
  bool has_left() override;

 private:
  struct Transfer {
    explicit Transfer(const TransferCall& given) : call(given), started_ns(now_ns()) {}
    ~Transfer() {
      if (call.user->release != nullptr) call.user->release(call.self);
    }
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;
    bool is_open() const { return state.load(std::memory_order_acquire) == kOpen; }

    static constexpr int kOpen = 0, kEnded = 1, kSettled = 2;
    const TransferCall call;
    const std::int64_t started_ns;
    std::int64_t deadline_ns = INT64_MAX;  // this and the next: by mutex_
    int source = -1;
    Number number = 0;
    std::atomic<int> state{kOpen};
  };
  using Held = std::shared_ptr<Transfer>;

  struct Form {
    std::int32_t tag = 0;
    std::int32_t dtype = 0;
    std::uint64_t bytes = 0;
  };
  // A message that came before its receive.
  struct Body {
    int source;
    Form form;
    std::unique_ptr<char[]> bytes;
    bool is_whole = false;  // this and the next: by mutex_
    Held receiver;          // of one that isn't whole yet
  };
  using Early = std::shared_ptr<Body>;

  struct End {
    Turn turn;
    std::atomic<pthread_t> holder{};      // 0: nobody
    std::atomic<RingEnd*> ring{nullptr};  // once it is open
    std::atomic<bool> is_broken{false};   // a transfer failed in it, which is announced after the turn
  };
  struct Outgoing : End {
    std::unique_ptr<QueueWriter> writer;  // this and the next: by the turn
    Held current;                         // begun, and not written to its end
    std::deque<Held> waiting;             // by mutex_
    std::atomic<int> count{0};            // what is in the two
  };
  struct Incoming : End {
    std::unique_ptr<QueueReader> reader;  // this and what follows: by the turn
    bool in_message = false;
    Form form;
    Held current;  // the receive of the message that is read; null: that is `early`
    Early early;
  };
  class Inside;

  // What a thread brought to its end in its turn. Announced once the turn is given back: callbacks may start transfers.
  struct Done {
    std::vector<Held> transfers;
    TransferFailure failure;  // if its status isn't 0
    Held first;               // to fail; may be null
  };
  enum class Moved { kBusy, kIdle, kSome, kInterrupted };

  Moved push(int peer, double timeout_s, Transfer* goal = nullptr);
  Moved pull(int peer, double timeout_s, Transfer* goal = nullptr);
  Moved push_in_turn(Outgoing& out, int peer, double timeout_s, Transfer* goal, Done* done);
  Moved pull_in_turn(Incoming& in, int peer, double timeout_s, Transfer* goal, Done* done);
  bool push_all();
  bool pull_all();
  char* open(int src, int dst, bool writes, char** control);
  bool open_reader(Incoming& in, int peer, Done* done);
  bool open_writer(Outgoing& out, int peer, Done* done);
  bool begin_message(Incoming& in, int peer, Done* done);
  bool check_form(const Held& receive, int peer, const Form& sent, Done* done);
  void take(const Held& receive, const Body& body, Done* done);
  void finish(const Held& transfer, int source, Done* done);
  void announce(Done& done);
  void settle(const std::vector<Held>& ended, const TransferFailure* failure);
  void note_failure(QueueStatus status, bool sends, int peer, const RingEnd* end, const Held& first, Done* done);
  void fail(TransferFailure failure, const Held& first);
  void expire();
  void expire(const Held& late);
  void find_losses();
  void find_loss(const Held& first);
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }

  std::shared_ptr<const Losses> losses_;  // null once it is closed; by mutex_, or the turn of an end
  const int rank_, size_, generation_;
  const TransferPlaces places_;
  WaitPolicy policy_;
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  std::vector<std::unique_ptr<Incoming>> incoming_;
  std::atomic<int> waiters_{0}, movers_{0};  // callers in `wait`, and those that move all transfers
  std::atomic<int> left_{0};                 // open transfers
  std::atomic<std::int64_t> next_deadline_ns_{INT64_MAX};
  std::atomic<bool> has_failed_{false};
  std::atomic<double> timeout_s_{0};
  std::atomic<std::int64_t> next_look_ns_{0};  // for lost ranks

  std::mutex mutex_;
  std::condition_variable finished_;
  Matcher<Held, Early> matcher_;  // this and what follows: by mutex_
  Number numbers_ = 0;
  std::map<Number, Held> open_;  // all that aren't settled
  std::set<Number> failed_;
  TransferFailure failure_;
  bool closed_ = false;
};

}  // namespace parallel_state
