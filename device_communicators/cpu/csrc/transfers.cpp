#include "transfers.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "forks.h"
#include "interrupt.h"

namespace parallel_state {
namespace {

constexpr std::int64_t kShortestNapNs = 50'000;
constexpr std::int64_t kLongestNapNs = 1'000'000;
constexpr std::uint64_t kFewBytes = 64 << 10;  // copied without releasing the interpreter lock
constexpr std::int64_t kLooksNs = 50'000'000;
thread_local const Transfers* interrupted_transfers = nullptr;

}  // namespace

std::int64_t after(double seconds) {
  return seconds > 1e9 ? INT64_MAX : now_ns() + static_cast<std::int64_t>(seconds * 1e9);
}

Transfers::Transfers(std::shared_ptr<const Losses> losses, int rank, int size)
    : losses_(std::move(losses)),
      rank_(rank),
      size_(size),
      reserved_(static_cast<std::size_t>(size)),
      matcher_(size),
      generation_(fork_generation()) {
  for (int peer = 0; peer < size; ++peer) sends_.push_back(std::make_unique<Sends>());
}

bool Transfers::is_foreign() const { return generation_ != fork_generation(); }

void Transfers::fall_asleep(Sleep* sleep) {
  asleep_.store(true, std::memory_order_relaxed);
  std::atomic_thread_fence(
      std::memory_order_seq_cst);  // either this thread sees a failure, or `close` sees that it sleeps
  if (is_foreign()) return;
  find_losses();
  if (has_failed() || movers_ > 0 || !has_left()) {
    sleep->naps = true;
    return;
  }
  if (left_ > 0 && waiters_ >= left_) return;
  sleep->until_ns = std::min(sleep->until_ns, next_deadline_ns_.load());
  watched_ = losses();
  if (watched_ == nullptr || !watched_->watch(sleep)) sleep->naps = true;
  sleep_on(sleep);
}

void Transfers::wake_up() {
  end_sleep();
  watched_ = nullptr;
  asleep_.store(false, std::memory_order_release);
}

namespace {

// Calls of this thread meanwhile come from a signal handler, or a taker.
class Interrupted {
 public:
  explicit Interrupted(const Transfers* by) : outer_(std::exchange(interrupted_transfers, by)) {}
  ~Interrupted() { interrupted_transfers = outer_; }
  Interrupted(const Interrupted&) = delete;
  Interrupted& operator=(const Interrupted&) = delete;

 private:
  const Transfers* const outer_;
};

}  // namespace

bool Transfers::handles_signals(bool surely) {
  const Interrupted here{this};
  return interrupted(surely);
}

bool Transfers::in_handler() const { return interrupted_transfers == this; }

std::int64_t Transfers::start(const TransferCall& call, bool waits) {
  const Held transfer = std::make_shared<Transfer>(call);
  const int peer = call.peer;
  if (is_foreign()) return kRefusedTransfer;
  if (is_inside(peer, call.sends != 0) && (waits || call.sends == 0)) return kInsideTransfer;
  Early early;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_failed() || closed_) return kRefusedTransfer;
    if (call.timeout_s > 0) {
      transfer->deadline_ns = after(call.timeout_s);
      if (transfer->deadline_ns < next_deadline_ns_) next_deadline_ns_ = transfer->deadline_ns;
    }
    transfer->number = ++numbers_;
    open_.emplace_hint(open_.end(), transfer->number, transfer);
    ++left_;
    if (call.sends != 0) {
      sends_[peer]->waiting.push_back(transfer);
      ++sends_[peer]->count;
    } else if (call.window != 0) {
    } else if (auto held = matcher_.post(peer, static_cast<std::uint32_t>(call.tag), transfer)) {
      early = std::move(*held);
      if (!early->is_whole) {
        early->receiver = transfer;
        early = nullptr;
      }
    }
  }
  begin(transfer, early);
  if (transfer->state.load(std::memory_order_acquire) == Transfer::kSettled && !has_failed()) {
    if (left_ == 0 && has_unsent()) keep_moving(shared_from_this());
    return kDoneTransfer;
  }
  if (!waits) keep_moving(shared_from_this());
  return static_cast<std::int64_t>(transfer->number);
}

bool Transfers::check_form(const Held& receive, int peer, const Form& sent, Done* done) {
  const TransferCall& call = receive->call;
  if (call.dtype == sent.dtype && (call.incoming != nullptr || call.bytes == sent.bytes)) return true;
  note_form(receive, peer, sent, {call.tag, call.dtype, call.bytes}, done);
  return false;
}

void Transfers::note_form(const Held& first, int peer, const Form& sent, const Form& expected, Done* done) {
  TransferFailure& failure = done->failure;
  failure.status = static_cast<std::int64_t>(QueueStatus::kMalformed);
  failure.sends = first->call.sends;
  failure.peer = failure.suspect = peer;
  failure.sent_dtype = sent.dtype;
  failure.sent_bytes = static_cast<std::int64_t>(sent.bytes);
  failure.expected_dtype = expected.dtype;
  failure.expected_bytes = static_cast<std::int64_t>(expected.bytes);
  done->first = first;
}

Transfers::Held Transfers::first_with(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(open_.begin(), open_.end(), [peer](const auto& entry) {
    return entry.second->call.peer == peer && entry.second->is_open() && entry.second->has_begun;
  });
  return found == open_.end() ? nullptr : found->second;
}

bool Transfers::take_back(Number number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = open_.find(number);
  if (found == open_.end() || !found->second->is_open()) return false;
  found->second->state.store(Transfer::kSettled, std::memory_order_release);
  open_.erase(found);
  --left_;
  return true;
}

void Transfers::take(const Held& receive, const Early& body, Done* done) {
  const Form& form = body->form;
  if (!check_form(receive, body->source, form, done)) return;
  if (IncomingMessage* const message = receive->call.incoming) {
    message->head_bytes = form.head_bytes;
    message->tensor_bytes = form.bytes - form.head_bytes;
    message->early = {body, body->bytes.get()};
    message->is_at_hand = message->tensor_bytes <= kFewBytes;
    return ask_taker(receive, body->source, done);
  }
  if (form.bytes != 0) std::memcpy(receive->call.address, body->bytes.get(), form.bytes);
  finish(receive, body->source, done);
}

void Transfers::ask_taker(const Held& receive, int source, Done* done) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    receive->source = source;
  }
  done->asks = true;
  receive->asks.store(true, std::memory_order_release);
}

bool Transfers::run_taker(const Held& receive) {
  IncomingMessage& message = *receive->call.incoming;
  if (!receive->is_open()) return receive->asks = false, true;
  const char* const early = message.early.get();
  const std::uint64_t found_bytes = early == nullptr                               ? message.head.size()
                                    : message.head_bytes > message.most_head_bytes ? kHeadStart
                                                                                   : message.head_bytes;
  std::vector<Loan> loans;
  std::vector<Piece> pieces;
  {
    const Interrupted here{this};
    char* const head = message.taker->head_buffer(found_bytes);
    if (found_bytes != 0) std::memcpy(head, early == nullptr ? message.head.data() : early, found_bytes);
    message.is_refused = !message.taker->take_head(
        {head, found_bytes, message.head_bytes, message.tensor_bytes, message.is_at_hand, &loans}, &pieces);
  }
  if (message.is_refused && message.taker->leaves_message()) return false;
  receive->asks.store(false, std::memory_order_relaxed);
  std::uint64_t wanted_bytes = 0;
  for (const Piece& piece : pieces) wanted_bytes += piece.bytes;
  Done done;
  if (!message.is_refused && wanted_bytes != message.tensor_bytes) {
    done.failure.status = static_cast<std::int64_t>(QueueStatus::kMalformed);
    done.failure.peer = done.failure.suspect = receive->source;
    done.first = receive;
  } else if (early == nullptr) {
    go_on(receive, pieces, &done);
  } else {
    const char* from = early + message.head_bytes;
    for (const Piece& piece : pieces) {
      if (piece.bytes != 0) std::memcpy(piece.address, from, piece.bytes);
      from += piece.bytes;
    }
    message.early = nullptr;
    finish(receive, receive->source, &done);
  }
  announce(done);
  return true;
}

Transfers::Received Transfers::receive_message(int src, int tag, double timeout_s, Taker& taker) {
  static constexpr TransferUser kKeeps{nullptr, nullptr,
                                       [](void* self) { delete static_cast<std::shared_ptr<IncomingMessage>*>(self); }};
  Received received;
  Found found{};
  try {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto at = found_.find(src);
      if (at != found_.end()) {
        found = std::move(at->second);
        found_.erase(at);
      }
    }
    if (found.message == nullptr) {
      found.message = std::make_shared<IncomingMessage>();
      found.message->most_head_bytes = taker.most_head_bytes();
      found.message->taker = &taker;
      TransferCall call{src, 0, tag, kMessageDtype, nullptr, 0, 0, &kKeeps, nullptr};
      call.self = new std::shared_ptr<IncomingMessage>(found.message);
      call.incoming = found.message.get();
      const std::int64_t number = start(call, true);
      if (number < 0) return received.how = number == kInsideTransfer ? kInsideWait : kFailedTransfer, received;
      found.number = static_cast<Number>(number);
    }
    IncomingMessage& message = *found.message;
    message.taker = &taker;
    received.how = wait(found.number, timeout_s, true);
    if (received.how == kInterruptedTransfer) break_off(found.number);
    received.is_refused = message.is_refused;
    received.head_bytes = message.head_bytes;
    received.tensor_bytes = message.tensor_bytes;
    if (received.how == kLeftMessage) {
      const std::lock_guard<std::mutex> lock(mutex_);
      found_[src] = std::move(found);
    }
  } catch (const std::bad_alloc&) {
    abandon();  // the taker's memory must not be used after this
    received.how = kFailedTransfer;
  }
  return received;
}

void Transfers::finish(const Held& transfer, int source, Done* done) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!transfer->is_open()) return;
  done->transfers.push_back(transfer);  // first, because it may throw
  transfer->source = source;
  transfer->state.store(Transfer::kEnded, std::memory_order_release);
  --left_;
}

void Transfers::announce(Done& done) {
  if (!done.transfers.empty()) settle(done.transfers, nullptr);
  if (done.asks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_.notify_all();
  }
  if (done.failure.status != 0) fail(done.failure, done.first, done.text);
}

void Transfers::settle(const std::vector<Held>& ended, const TransferFailure* failure) {
  std::vector<const Transfer*> announced;
  for (const Held& each : ended) {
    const TransferUser& user = *each->call.user;
    if (user.settle == nullptr) {
      // Before a waiter returns and releases memory.
      if (failure == nullptr) each->release();
      continue;
    }
    if (user.settle(each->call.self, each->source, failure) != 0) announced.push_back(each.get());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Held& each : ended) {
      each->state.store(Transfer::kSettled, std::memory_order_release);
      open_.erase(each->number);
    }
    finished_.notify_all();
  }
  if (announced.empty()) return;
  const StepOut out;
  for (const Transfer* const each : announced) each->call.user->announce(each->call.self);
}

void Transfers::fail(TransferFailure failure, const Held& first, std::string_view text) {
  std::vector<Held> failed;
  try {
    end_open(&failure, first, text, &failed);
  } catch (const std::bad_alloc&) {
    has_failed_.store(true, std::memory_order_release);
    stop(false);  // waits end at their deadlines, or with the next failure
    throw;
  }
  stop(failure.status == TransferFailure::kClosed);
  settle(failed, &failure);
}

void Transfers::end_open(TransferFailure* given, const Held& first, std::string_view text, std::vector<Held>* ended) {
  TransferFailure& failure = *given;
  std::vector<Held>& failed = *ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_failed()) {
      failure = failure_;
    } else {
      Held oldest = first;
      for (auto at = open_.begin(); at != open_.end() && oldest == nullptr; ++at) {
        if (at->second->call.peer == failure.peer) oldest = at->second;
      }
      if (oldest == nullptr && !open_.empty()) oldest = open_.begin()->second;
      if (oldest != nullptr && failure.elapsed_us == 0) failure.elapsed_us = us_since(oldest->started_ns);
      if (oldest != nullptr && failure.status == TransferFailure::kBroken && failure.peer < 0) {
        failure.peer = oldest->call.peer;
      }
      failure_ = failure;
      failure_text_ = text;
      has_failed_.store(true, std::memory_order_release);
    }
    if (first != nullptr && first->is_open()) failed.push_back(first);
    for (const auto& [number, each] : open_) {
      if (each->is_open() && each != first) failed.push_back(each);
    }
    for (const Held& each : failed) {
      each->state.store(Transfer::kEnded, std::memory_order_release);
      failed_.insert(each->number);
    }
    left_ -= static_cast<int>(failed.size());
    matcher_.clear();
    for (const auto& each : sends_) {
      each->count -= static_cast<int>(each->waiting.size());
      each->waiting.clear();
    }
  }
}

bool Transfers::is_done(Number number) {
  if (is_foreign()) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  return open_.find(number) == open_.end();
}

bool Transfers::failure(TransferFailure* found) {
  if (is_foreign()) return found->status = TransferFailure::kClosed, true;
  const std::lock_guard<std::mutex> lock(mutex_);
  *found = failure_;
  if (!has_failed() && closed_) found->status = TransferFailure::kClosed;
  return has_failed() || closed_;
}

std::string Transfers::failure_text() {
  if (is_foreign()) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_text_;
}

int Transfers::waiting_sends(int dst) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(sends_[dst]->waiting.size());
}

int Transfers::wait(Number number, double timeout_s, bool expires) {
  if (is_foreign()) return kFailedTransfer;
  Held transfer;
  const auto outcome = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failed_.count(number) != 0 ? kFailedTransfer : kEndedTransfer;
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = open_.find(number);
    if (found != open_.end()) transfer = found->second;
  }
  if (transfer == nullptr) return outcome();
  const TransferCall& call = transfer->call;
  const bool sends = call.sends != 0;
  const std::int64_t until_ns = timeout_s < 0 ? INT64_MAX : after(timeout_s);
  const auto leaves = [this](int how) {
    keep_moving(shared_from_this());
    return how;
  };
  // The progress thread sleeps while each transfer has a waiter.
  struct Waking {
    Transfers& all;
    ~Waking() {
      if (all.is_asleep() && all.has_left()) wake_progress();
    }
  } const waking{*this};
  const Presence waiting{waiters_};  // ends before `waking`
  std::int64_t next_look_ns = now_ns() + kLooksNs, nap_ns = kShortestNapNs;
  while (transfer->state.load(std::memory_order_acquire) != Transfer::kSettled) {
    if (transfer->asks.load(std::memory_order_acquire)) {
      if (!run_taker(transfer)) return leaves(kLeftMessage);
      continue;
    }
    const std::int64_t now = now_ns();
    const bool late = now >= until_ns;
    if (now >= next_look_ns) {
      find_losses();
      if (handles_signals(false)) return leaves(kInterruptedTransfer);
      next_look_ns = now + kLooksNs;
    }
    if (now >= next_deadline_ns_) expire();
    Moved moved = Moved::kBusy;
    if (transfer->is_open()) {
      moved = move_for(transfer.get(), late ? now : std::min({until_ns, next_deadline_ns_.load(), next_look_ns}));
    }
    if (moved == Moved::kSignal && handles_signals(true)) return leaves(kInterruptedTransfer);
    if (moved == Moved::kInterrupted) return leaves(kInterruptedTransfer);
    if (late && transfer->is_open() && !transfer->asks) {
      if (!expires) return leaves(kLateTransfer);
      expire(transfer);
      continue;
    }
    if (moved != Moved::kBusy) continue;
    if (transfer->is_open() && is_inside(call.peer, sends)) return leaves(kInsideWait);
    std::unique_lock<std::mutex> lock(mutex_);
    if (transfer->state.load(std::memory_order_acquire) != Transfer::kSettled && !transfer->asks) {
      finished_.wait_for(lock, std::chrono::nanoseconds(nap_ns));
    }
    nap_ns = std::min(nap_ns + nap_ns / 16, kLongestNapNs);
  }
  return outcome();
}

int Transfers::run(const TransferCall& call, double timeout_s) {
  const std::int64_t number = start(call, true);
  if (number == kDoneTransfer) return kEndedTransfer;
  if (number < 0) return number == kInsideTransfer ? kInsideWait : kFailedTransfer;
  const int how = wait(static_cast<Number>(number), timeout_s, true);
  if (how == kInterruptedTransfer) break_off(static_cast<Number>(number));
  return how;
}

void Transfers::break_off(Number number) {
  interrupt(number, end_together());
  if (end_together() && !has_failed()) abandon();
}

void Transfers::interrupt(Number number, bool ends_all) {
  Held transfer;
  TransferFailure failure;
  failure.status = static_cast<std::int64_t>(QueueStatus::kInterrupted);
  bool is_removed = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = open_.find(number);
    if (found == open_.end()) return;
    transfer = found->second;
    failure.sends = transfer->call.sends;
    failure.peer = transfer->call.peer;
    failure.elapsed_us = us_since(transfer->started_ns);
    if (ends_all || end_together() || !transfer->is_open()) {
    } else if (transfer->call.sends != 0) {
      auto& [waiting, count] = *sends_[transfer->call.peer];
      const auto at = std::find(waiting.begin(), waiting.end(), transfer);
      is_removed = at != waiting.end();
      if (is_removed) {
        waiting.erase(at);
        --count;
      }
    } else {
      is_removed = matcher_.cancel(transfer);
    }
    if (is_removed) {
      transfer->state.store(Transfer::kEnded, std::memory_order_release);
      failed_.insert(number);
      --left_;
    }
  }
  is_removed ? settle({transfer}, &failure) : fail(failure, transfer);
}

void Transfers::expire(const Held& late) {
  TransferFailure failure;
  failure.status = static_cast<std::int64_t>(QueueStatus::kTimedOut);
  failure.sends = late->call.sends;
  failure.peer = failure.suspect = late->call.peer;
  failure.elapsed_us = us_since(late->started_ns);
  fail(failure, late);
}

void Transfers::expire() {
  const std::int64_t now = now_ns();
  Held late;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::int64_t next = INT64_MAX;
    for (const auto& [number, each] : open_) {
      if (!each->is_open()) continue;
      if (late == nullptr && each->deadline_ns <= now) late = each;
      next = std::min(next, each->deadline_ns);
    }
    next_deadline_ns_ = next;
  }
  if (late != nullptr) expire(late);
}

// A ring doesn't report the loss of its other end to polls.
void Transfers::find_losses() {
  std::vector<Held> firsts;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    for (const auto& [number, each] : open_) {
      const auto is_alike = [&call = each->call](const Held& other) {
        return other->call.peer == call.peer && other->call.sends == call.sends;
      };
      if (each->is_open() && std::none_of(firsts.begin(), firsts.end(), is_alike)) firsts.push_back(each);
    }
  }
  for (const Held& first : firsts) {
    if (first->is_open()) find_loss(first);
  }
}

void Transfers::find_loss(const Held& first) {
  // A rank that left on purpose counts as lost only when all have.
  const bool is_any = first->call.peer == kAnySource;
  int awaited = is_any ? 0 : first->call.peer;
  const int end = is_any ? size_ : awaited + 1;
  const std::shared_ptr<const Losses> known = losses();
  if (known == nullptr) return;
  Loss loss;
  for (; awaited < end; ++awaited) {
    if (awaited == rank_) continue;
    loss = known->loss(awaited);
    if (loss.rank < 0 && loss.reporter < 0) return;
    if (loss.rank != awaited || loss.reporter >= 0) break;
  }
  awaited = std::min(awaited, end - 1);
  if (!read_last(*first, is_any ? 0 : awaited, end) || !first->is_open()) return;
  TransferFailure failure;
  failure.status = static_cast<std::int64_t>(loss.reporter < 0 ? QueueStatus::kPeerDied : QueueStatus::kGivenUp);
  failure.sends = first->call.sends;
  failure.peer = awaited;
  failure.suspect = loss.rank;
  failure.reporter = loss.reporter;
  failure.reason = loss.status;
  failure.elapsed_us = us_since(first->started_ns);
  fail(failure, first);
}

bool Transfers::move() {
  if (movers_ > 0 || (left_ > 0 && waiters_ >= left_) || is_foreign()) return false;
  const bool moved = move_all();
  const std::int64_t now = now_ns();
  if (now >= next_deadline_ns_) expire();
  if (now >= next_look_ns_) {
    find_losses();
    next_look_ns_ = now + kLooksNs;
  }
  return moved;
}

bool Transfers::has_left() { return left_ > 0 && !is_foreign(); }

void Transfers::abandon() {
  if (is_foreign()) return;
  TransferFailure failure;
  failure.status = TransferFailure::kBroken;
  fail(failure, nullptr, "a call of this rank in this group failed");
}

bool Transfers::drain(double timeout_s) {
  if (is_foreign()) return true;
  const std::int64_t until_ns = after(timeout_s);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_empty = [this] { return open_.empty(); };
    if (!finished_.wait_for(lock, std::chrono::duration<double>(timeout_s), is_empty)) return false;
  }
  while (has_unsent() && !has_failed() && now_ns() < until_ns) {  // answers that peers wait for
    if (!move_all()) std::this_thread::sleep_for(std::chrono::nanoseconds(kShortestNapNs));
  }
  return true;
}

bool Transfers::close() {
  if (is_foreign()) return false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  TransferFailure failure;
  failure.status = TransferFailure::kClosed;
  fail(failure, nullptr);
  const bool is_free = leave();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_free) losses_ = nullptr;  // it owns the group's memory
  return is_free;
}

}  // namespace parallel_state
