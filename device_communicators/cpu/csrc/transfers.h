// Sends and receives of plain tensors between the ranks of a group: what is the same over the rings of a host (rings.h)
// and over connections between hosts (streams.h).
//
// Receives take messages by source and tag, as matcher.h has it. A message says its size and dtype; one that doesn't
// fit its receive is written nowhere. A failure of one transfer fails all that are open, and nothing starts afterwards.
//
// A waiting caller moves the group's transfers itself; otherwise the process' progress thread does. Any thread may
// call. The memory of a transfer is borrowed until `release` is called.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "liveness.h"
#include "matcher.h"
#include "progress.h"
#include "queue.h"
#include "taker.h"
#include "transfer_call.h"
#include "wait.h"

namespace parallel_state {

// A message that is sent. The memory is kept until the transfer is released.
struct OutgoingMessage {
  std::vector<Piece> head, tensors;
  std::uint64_t head_bytes = 0;  // of `head`
};

// A message that is received. Its taker runs on the thread that waits for it, and nothing else is read from its source
// meanwhile.
struct IncomingMessage {
  Taker* taker = nullptr;             // null between two calls; used by the thread that waits
  std::uint64_t most_head_bytes = 0;  // of the taker. This and what follows: by the medium's lock, until `asks` is set
  std::vector<char> head;             // all of it, or its beginning
  std::uint64_t head_bytes = 0, tensor_bytes = 0;
  bool is_at_hand = false;            // see `Head`
  std::shared_ptr<const char> early;  // all of a message that arrived before its receive, in one piece
  bool is_refused = false;            // by the taker
};

class Transfers : public Movable, public std::enable_shared_from_this<Transfers> {
 public:
  using Number = std::uint64_t;
  static constexpr int kAnySource = -1;

  Transfers(std::shared_ptr<const Losses> losses, int rank, int size);

  // `waits`: the caller waits for it at once.
  std::int64_t start(const TransferCall& call, bool waits);

  // Waits until a transfer was settled. At the timeout (below 0: none) returns kLateTransfer, or fails it if `expires`.
  // Interrupted, nothing has failed yet.
  int wait(Number number, double timeout_s, bool expires);
  bool is_done(Number number);
  // As `interrupt`, of a transfer whose caller drops the message, so that those after it can't be received either.
  void break_off(Number number);
  // Ends a transfer whose wait was broken off. All others fail with it if it has begun to move bytes, or `ends_all`.
  void interrupt(Number number, bool ends_all);
  // Whether the transfers go with one whose wait was broken off: a message may have several.
  virtual bool end_together() const { return false; }

  // Sends or receives in one step with the tag given to `serve`, for callers without Python. kNoRoom: the ring has no
  // room for all of it. kLeft: the caller goes on with `start`, which reports the failure if there was one.
  enum class Outcome : int { kLeft = 0, kDone = 1, kNoRoom = 2 };
  virtual Outcome send_now(int dst, int dtype, std::uint64_t bytes, double timeout_s,
                           const std::function<void*()>& data) = 0;
  // `data` and `begins` are called before it waits.
  virtual Outcome receive_now(int src, int dtype, std::uint64_t bytes, double timeout_s,
                              const std::function<void()>& begins, const std::function<void*()>& data) = 0;
  // Sets the tag of `send_now` and `receive_now`. Once, before them.
  void serve(int tag) { served_tag_ = tag; }

  // Messages, where the medium carries them.
  virtual bool carries_messages() const { return false; }
  int message_tag() const { return served_tag_ + 1; }  // of calls without Python
  // Receives the next message of a rank, or that which an earlier receive has left. Returns how the wait ended.
  // `is_refused`: by the taker; then the message has arrived.
  struct Received {
    int how = kFailedTransfer;
    bool is_refused = false;
    std::uint64_t head_bytes = 0, tensor_bytes = 0;
  };
  Received receive_message(int src, int tag, double timeout_s, Taker& taker);
  // Receives that were started: calls without Python don't overtake them.
  void reserve(int src, int receives) { reserved_[static_cast<std::size_t>(src)] += receives; }
  bool has_reserved() const {
    return std::any_of(reserved_.begin(), reserved_.end(), [](const auto& each) { return each != 0; });
  }
  bool is_reserved(int src) const { return reserved_[static_cast<std::size_t>(src)] != 0; }

  bool is_foreign() const;  // of a process that was forked from its own
  // False while nothing has failed.
  bool failure(TransferFailure* found);
  std::string failure_text();  // what a connection's end said, after kBroken
  // Whether this thread is in the middle of moving bytes to or from `peer`, or in a signal handler that interrupted it
  // there.
  virtual bool is_inside(int peer, bool sends) const = 0;
  int waiting_sends(int dst);

  // Fails what is under way, as a call of this rank failed.
  void abandon();
  // Returns once nothing is under way, or false at the deadline.
  bool drain(double timeout_s);
  // Fails what is under way with kClosed; nothing starts afterwards. False where a thread is still in a queue: then the
  // memory must stay.
  bool close();

  bool move() override;
  bool has_left() override;
  void fall_asleep(Sleep* sleep) override;
  void wake_up() override;

 protected:
  struct Transfer {
    explicit Transfer(const TransferCall& given) : call(given), started_ns(now_ns()) {}
    ~Transfer() { release(); }
    void release() {
      if (call.user->release != nullptr && !is_released.exchange(true)) call.user->release(call.self);
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
    int parts = 1;           // what has yet to be written or read of it; over connections
    bool has_begun = false;  // over connections: what came before it was looked at
    std::atomic<int> state{kOpen};
    std::atomic<bool> asks{false};  // the head of its message is there, and waits for the taker
    std::atomic<bool> is_released{false};
  };
  using Held = std::shared_ptr<Transfer>;

  struct Form {
    std::int32_t tag = 0;
    std::int32_t dtype = 0;
    std::uint64_t bytes = 0;
    std::uint64_t head_bytes = 0;  // of these, the head of a message
  };
  // A message that came before its receive.
  struct Body {
    int source;
    Form form;
    std::unique_ptr<char[]> bytes;  // null for one that was only announced
    bool is_whole = false;          // this and the next: by mutex_
    Held receiver;                  // of one that isn't whole yet
  };
  using Early = std::shared_ptr<Body>;

  // What a thread brought to its end. Announced without locks: callbacks may start transfers.
  struct Done {
    std::vector<Held> transfers;
    TransferFailure failure;  // if its status isn't 0
    std::string text;
    Held first;         // to fail; may be null
    bool asks = false;  // a waiter has a message's head to look at
  };
  enum class Moved { kBusy, kIdle, kSome, kInterrupted, kSignal };

  // One of those that a number counts, while it lives.
  class Presence {
   public:
    explicit Presence(std::atomic<int>& all, bool counts = true) : all_(all), counts_(counts ? 1 : 0) {
      all_ += counts_;
    }
    ~Presence() { all_ -= counts_; }
    Presence(const Presence&) = delete;
    Presence& operator=(const Presence&) = delete;

   private:
    std::atomic<int>& all_;
    const int counts_;
  };

  // The sends to one rank, in their order.
  struct Sends {
    std::deque<Held> waiting;   // by mutex_
    std::atomic<int> count{0};  // of these, and one that is being written
  };

  // The medium. `begin` moves what it can of a transfer that has just begun; `early` is the whole message that came
  // before it, or null.
  virtual void begin(const Held& transfer, const Early& early) = 0;
  // Moves what can be moved without waiting. Returns true if anything moved.
  virtual bool move_all() = 0;
  // Moves until the transfer has ended, at most until `until_ns`. kBusy: another thread does. kSignal: a signal
  // arrived; the caller runs its handler, so that other threads can move meanwhile.
  virtual Moved move_for(Transfer* transfer, std::int64_t until_ns) = 0;
  // Whether all that came from a rank before it was lost has been read.
  virtual bool read_last(const Transfer& transfer, int from, int end) = 0;
  // Adds what tells that something can be moved.
  virtual void sleep_on(Sleep* sleep) = 0;
  virtual void end_sleep() {}
  // Whether something must be moved that no open transfer stands for.
  virtual bool has_unsent() { return false; }
  // Whether the progress thread may use the medium's memory: see `wake_up`.
  bool is_asleep() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return asleep_.load(std::memory_order_acquire);
  }
  virtual void stop() {}  // after a failure
  // Goes on with a message whose taker has said where its tensors go, or has refused it. The transfer is open.
  virtual void go_on(const Held&, const std::vector<Piece>&, Done*) {}
  virtual bool leave() { return true; }  // see `close`

  // Copies a whole message that came early.
  void take(const Held& receive, const Early& body, Done* done);
  // Has the thread that waits for a message look at its head.
  void ask_taker(const Held& receive, int source, Done* done);
  bool check_form(const Held& receive, int peer, const Form& sent, Done* done);
  // Notes that a message's form isn't the one that its receive has.
  void note_form(const Held& first, int peer, const Form& sent, const Form& expected, Done* done);
  Held first_with(int peer);  // the oldest open transfer that has begun
  // Forgets a transfer of which nothing has moved. False if it has ended.
  bool take_back(Number number);
  void finish(const Held& transfer, int source, Done* done);
  void announce(Done& done);
  void fail(TransferFailure failure, const Held& first, std::string_view text = {});
  void end_open(TransferFailure* failure, const Held& first, std::string_view text, std::vector<Held>* failed);
  // As `interrupted`; see `in_handler`.
  bool handles_signals(bool surely);
  // Whether this thread is in a signal handler that interrupted a wait in these transfers.
  bool in_handler() const;
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }

  std::shared_ptr<const Losses> losses_;  // null once it is closed; by mutex_, or the turn of an end
  const int rank_, size_;
  std::vector<std::unique_ptr<Sends>> sends_;
  std::vector<std::atomic<int>> reserved_;   // by source
  std::atomic<int> waiters_{0}, movers_{0};  // callers in `wait`, and those that move all transfers
  std::atomic<int> left_{0};                 // open transfers
  int served_tag_ = 0;

  std::mutex mutex_;
  std::condition_variable finished_;
  Matcher<Held, Early> matcher_;  // by mutex_

 private:
  void settle(const std::vector<Held>& ended, const TransferFailure* failure);
  bool run_taker(const Held& receive);
  void expire();
  void expire(const Held& late);
  void find_losses();
  void find_loss(const Held& first);

  const int generation_;
  std::atomic<std::int64_t> next_deadline_ns_{INT64_MAX};
  std::atomic<bool> has_failed_{false}, asleep_{false};
  std::shared_ptr<const Losses> watched_;      // of a sleep
  std::atomic<std::int64_t> next_look_ns_{0};  // for lost ranks
  Number numbers_ = 0;                         // this and what follows: by mutex_
  std::map<Number, Held> open_;                // all that aren't settled
  std::set<Number> failed_;
  struct Found {
    Number number;
    std::shared_ptr<IncomingMessage> message;
  };
  std::map<int, Found> found_;  // messages that their receives have left, by source
  TransferFailure failure_;
  std::string failure_text_;
  bool closed_ = false;
};

// As `after` seconds from now; of no use to compare where that is far away.
std::int64_t after(double seconds);

}  // namespace parallel_state
