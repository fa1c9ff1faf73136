// Transfers between the ranks of a group. If one fails, all open ones fail, and none can be started. A waiting caller
// moves the group's transfers; otherwise the progress thread does. Thread-safe. The memory of a transfer is borrowed
// until `release`.
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

struct OutgoingMessage {
  std::vector<Piece> head, tensors;
  std::uint64_t head_bytes = 0;
};

// Its taker runs in the thread that waits; meanwhile nothing else is read from the source.
struct IncomingMessage {
  Taker* taker = nullptr;  // null between two calls; used only by the waiting thread
  // This and the next fields are guarded by the medium's lock until `asks` is set.
  std::uint64_t most_head_bytes = 0;
  std::vector<char> head;
  std::uint64_t head_bytes = 0, tensor_bytes = 0;
  bool is_at_hand = false;
  std::shared_ptr<const char> early;  // in one piece
  bool is_refused = false;
};

class Transfers : public Movable, public std::enable_shared_from_this<Transfers> {
 public:
  using Number = std::uint64_t;
  static constexpr int kAnySource = -1;

  Transfers(std::shared_ptr<const Losses> losses, int rank, int size);

  std::int64_t start(const TransferCall& call, bool waits);

  // At the timeout (negative: none) returns kLateTransfer, or fails the transfer if `expires`. After an interruption
  // nothing has failed yet.
  int wait(Number number, double timeout_s, bool expires);
  // Starts it and waits. Returns how the wait ended.
  int run(const TransferCall& call, double timeout_s);
  bool is_done(Number number);
  // Like `interrupt`, for a dropped message: later messages can't be received then.
  void break_off(Number number);
  // After an abandoned wait. All others fail too if the transfer has moved bytes, or if `ends_all`.
  void interrupt(Number number, bool ends_all);
  virtual bool end_together() const { return false; }

  // In one step with the tag of `serve`, for callers without Python. kLeft: the caller continues with `start`.
  enum class Outcome : int { kLeft = 0, kDone = 1, kNoRoom = 2 };
  virtual Outcome send_now(int dst, int dtype, std::uint64_t bytes, double timeout_s,
                           const std::function<void*()>& data) = 0;
  // Calls `data` and `begins` before it waits.
  virtual Outcome receive_now(int src, int dtype, std::uint64_t bytes, double timeout_s,
                              const std::function<void()>& begins, const std::function<void*()>& data) = 0;
  void serve(int tag) { served_tag_ = tag; }

  virtual bool carries_messages() const { return false; }
  int message_tag() const { return served_tag_ + 1; }
  struct Received {
    int how = kFailedTransfer;
    bool is_refused = false;
    std::uint64_t head_bytes = 0, tensor_bytes = 0;
  };
  Received receive_message(int src, int tag, double timeout_s, Taker& taker);
  // Started receives, which calls without Python must not overtake.
  void reserve(int src, int receives) { reserved_[static_cast<std::size_t>(src)] += receives; }
  bool has_reserved() const {
    return std::any_of(reserved_.begin(), reserved_.end(), [](const auto& each) { return each != 0; });
  }
  bool is_reserved(int src) const { return reserved_[static_cast<std::size_t>(src)] != 0; }

  bool is_foreign() const;  // true in a process forked from the owner
  bool failure(TransferFailure* found);
  std::string failure_text();
  // This thread is moving bytes to or from `peer`, or is in a signal handler that interrupted that.
  virtual bool is_inside(int peer, bool sends) const = 0;
  int waiting_sends(int dst);

  void abandon();
  bool drain(double timeout_s);
  // Fails open transfers with kClosed. False if a thread is still in a queue: the memory must stay then.
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
    std::int64_t deadline_ns = INT64_MAX;  // this and the next: guarded by mutex_
    int source = -1;
    Number number = 0;
    int parts = 1;
    bool has_begun = false;  // over connections: earlier messages were checked
    std::atomic<int> state{kOpen};
    std::atomic<bool> asks{false};  // the head of its message waits for the taker
    std::atomic<bool> is_released{false};
  };
  using Held = std::shared_ptr<Transfer>;

  struct Form {
    std::int32_t tag = 0;
    std::int32_t dtype = 0;
    std::uint64_t bytes = 0;
    std::uint64_t head_bytes = 0;
  };
  struct Body {
    int source;
    Form form;
    std::unique_ptr<char[]> bytes;  // null if it was only announced
    bool is_whole = false;          // this and the next: guarded by mutex_
    Held receiver;
  };
  using Early = std::shared_ptr<Body>;

  // Announced without locks: callbacks may start transfers.
  struct Done {
    std::vector<Held> transfers;
    TransferFailure failure;
    std::string text;
    Held first;
    bool asks = false;  // a waiter must show a message's head to its taker
  };
  enum class Moved { kBusy, kIdle, kSome, kInterrupted, kSignal };

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

  struct Sends {
    std::deque<Held> waiting;  // guarded by mutex_
    std::atomic<int> count{0};
  };

  // `early`: the whole message if it arrived before; else null.
  virtual void begin(const Held& transfer, const Early& early) = 0;
  virtual bool move_all() = 0;
  // Until the transfer has ended or `until_ns`. kBusy: another thread moves it. kSignal: the caller runs its handler;
  // other threads can move meanwhile.
  virtual Moved move_for(Transfer* transfer, std::int64_t until_ns) = 0;
  // Everything that a lost rank sent was read.
  virtual bool read_last(const Transfer& transfer, int from, int end) = 0;
  virtual void sleep_on(Sleep* sleep) = 0;
  virtual void end_sleep() {}
  // Data without an open transfer must be sent.
  virtual bool has_unsent() { return false; }
  // The progress thread doesn't use the medium's memory.
  bool is_asleep() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return asleep_.load(std::memory_order_acquire);
  }
  virtual void stop(bool /*leaves*/) {}
  // After the taker chose addresses or refused the message. The transfer is open.
  virtual void go_on(const Held&, const std::vector<Piece>&, Done*) {}
  virtual bool leave() { return true; }

  void take(const Held& receive, const Early& body, Done* done);
  void ask_taker(const Held& receive, int source, Done* done);
  bool check_form(const Held& receive, int peer, const Form& sent, Done* done);
  void note_form(const Held& first, int peer, const Form& sent, const Form& expected, Done* done);
  Held first_with(int peer);
  bool take_back(Number number);
  void finish(const Held& transfer, int source, Done* done);
  void announce(Done& done);
  void fail(TransferFailure failure, const Held& first, std::string_view text = {});
  void end_open(TransferFailure* failure, const Held& first, std::string_view text, std::vector<Held>* failed);
  bool handles_signals(bool surely);
  // This thread is in a signal handler that interrupted a wait in these transfers.
  bool in_handler() const;
  std::shared_ptr<const Losses> losses() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return losses_;
  }
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }

  std::shared_ptr<const Losses> losses_;  // null after close; guarded by mutex_, or by the turn of an end
  const int rank_, size_;
  std::vector<std::unique_ptr<Sends>> sends_;
  std::vector<std::atomic<int>> reserved_;
  std::atomic<int> waiters_{0}, movers_{0};
  std::atomic<int> left_{0};
  int served_tag_ = 0;

  std::mutex mutex_;
  std::condition_variable finished_;
  Matcher<Held, Early> matcher_;  // guarded by mutex_

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
  std::shared_ptr<const Losses> watched_;
  std::atomic<std::int64_t> next_look_ns_{0};
  Number numbers_ = 0;           // this and the following fields are guarded by mutex_
  std::map<Number, Held> open_;  // unsettled
  std::set<Number> failed_;
  struct Found {
    Number number;
    std::shared_ptr<IncomingMessage> message;
  };
  std::map<int, Found> found_;  // left by their receives; by source
  TransferFailure failure_;
  std::string failure_text_;
  bool closed_ = false;
};

// INT64_MAX beyond 1e9 s.
std::int64_t after(double seconds);

}  // namespace parallel_state
