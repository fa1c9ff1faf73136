#include "transfers.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "forks.h"
#include "interrupt.h"

namespace parallel_state {
namespace {

constexpr std::int64_t kShortestNapNs = 50'000;
constexpr std::int64_t kLongestNapNs = 1'000'000;
constexpr std::int64_t kLooksNs = 50'000'000;  // between looks for lost ranks, and for signals
// For so long a waiter is in one ring before it moves its other transfers; without others, and with some.
constexpr double kSliceS = 0.02;
constexpr double kShortSliceS = 0.001;
constexpr double kCloseGraceS = 1.0;

std::uint64_t fingerprint_of(int tag, int dtype) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(dtype)) << 32 | static_cast<std::uint32_t>(tag);
}

std::int64_t us_since(std::int64_t started_ns) { return (now_ns() - started_ns) / 1000; }

std::int64_t after(double seconds) {
  return seconds > 1e9 ? INT64_MAX : now_ns() + static_cast<std::int64_t>(seconds * 1e9);
}

// One of those that a number counts, while it is set.
class Presence {
 public:
  explicit Presence(std::atomic<int>& all) : all_(all) {}
  ~Presence() { set(false); }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;
  void set(bool on) {
    if (on == is_set_) return;
    all_ += on ? 1 : -1;
    is_set_ = on;
  }

 private:
  std::atomic<int>& all_;
  bool is_set_ = false;
};

}  // namespace

// The turn of an end, for as long as this lives.
class Transfers::Inside {
 public:
  explicit Inside(End& end, double timeout_s = 0) : end_(end), has_it_(end.turn.take(timeout_s)) {
    if (has_it_) end_.holder.store(pthread_self(), std::memory_order_relaxed);
  }
  ~Inside() {
    if (!has_it_) return;
    end_.holder.store(0, std::memory_order_relaxed);
    end_.turn.let_go();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  explicit operator bool() const { return has_it_; }

 private:
  End& end_;
  const bool has_it_;
};

Transfers::Transfers(std::shared_ptr<const Losses> losses, int rank, int size, const TransferPlaces& places)
    : losses_(std::move(losses)),
      rank_(rank),
      size_(size),
      generation_(fork_generation()),
      places_(places),
      matcher_(size) {
  policy_.spin_ns = places.spin_ns;
  policy_.yields = static_cast<std::int32_t>(places.yields);
  for (int peer = 0; peer < size; ++peer) {
    outgoing_.push_back(std::make_unique<Outgoing>());
    incoming_.push_back(std::make_unique<Incoming>());
  }
}

Transfers::~Transfers() = default;

bool Transfers::is_foreign() const { return generation_ != fork_generation(); }

bool Transfers::is_inside(int peer, bool sends) const {
  if (peer < 0 || peer >= size_) return false;
  const End& end = sends ? static_cast<const End&>(*outgoing_[peer]) : *incoming_[peer];
  return pthread_equal(end.holder.load(std::memory_order_relaxed), pthread_self());
}

// Returns the ring from `src` to `dst`, which a writer backs with memory; null where there is none.
char* Transfers::open(int src, int dst, bool writes, char** control) {
  const std::uint64_t index = (static_cast<std::uint64_t>(src) * size_ + dst) * places_.kinds;
  const RingShape shape{places_.chunk_bytes, places_.chunks, 1};
  const std::uint64_t bytes = shape.data_bytes(), offset = index * bytes;
  char* const data = places_.control == nullptr ? nullptr : places_.windows->at(offset, bytes);
  const bool is_backed =
      data != nullptr &&
      (!writes || back_with_memory(data, bytes, static_cast<int>(places_.descriptor), places_.data_offset + offset));
  *control = places_.control + index * shape.control_bytes();
  return is_backed ? data : nullptr;
}

bool Transfers::open_writer(Outgoing& out, int peer, Done* done) {
  if (out.writer != nullptr) return true;
  char* control = nullptr;
  char* const data = open(rank_, peer, true, &control);
  const int ranks[] = {rank_, peer};
  if (data == nullptr) return done->failure.status = TransferFailure::kNoMemory, false;
  out.writer = std::make_unique<QueueWriter>(control, data, RingShape{places_.chunk_bytes, places_.chunks, 1}, ranks, 0,
                                             *losses_, policy_);
  out.ring.store(out.writer.get(), std::memory_order_release);
  return true;
}

bool Transfers::open_reader(Incoming& in, int peer, Done* done) {
  if (in.reader != nullptr) return true;
  char* control = nullptr;
  char* const data = open(peer, rank_, false, &control);
  const int ranks[] = {peer, rank_};
  if (data == nullptr) return done->failure.status = TransferFailure::kNoMemory, false;
  in.reader = std::make_unique<QueueReader>(control, data, RingShape{places_.chunk_bytes, places_.chunks, 1}, ranks, 1,
                                            *losses_, policy_);
  in.ring.store(in.reader.get(), std::memory_order_release);
  return true;
}

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
      outgoing_[peer]->waiting.push_back(transfer);
      ++outgoing_[peer]->count;
    } else if (auto held = matcher_.post(peer, static_cast<std::uint32_t>(call.tag), transfer)) {
      early = std::move(*held);
      if (!early->is_whole) {  // who reads it delivers it
        early->receiver = transfer;
        early = nullptr;
      }
    }
  }
  if (call.sends != 0) {
    push(peer, 0);
  } else if (early != nullptr) {
    Done done;
    take(transfer, *early, &done);
    announce(done);
  } else if (peer == kAnySource) {
    pull_all();
  } else {
    pull(peer, 0);
  }
  if (transfer->state.load(std::memory_order_acquire) == Transfer::kSettled && !has_failed()) return kDoneTransfer;
  if (!waits) keep_moving(shared_from_this());
  return static_cast<std::int64_t>(transfer->number);
}

Transfers::Moved Transfers::push(int peer, double timeout_s, Transfer* goal) {
  Outgoing& out = *outgoing_[peer];
  if (out.count.load(std::memory_order_relaxed) == 0) return Moved::kIdle;
  Done done;
  Moved moved;
  {
    const Inside inside{out};
    if (!inside) return Moved::kBusy;
    try {
      moved = push_in_turn(out, peer, timeout_s, goal, &done);
    } catch (const std::bad_alloc&) {
      out.is_broken = true;
      done.failure.status = TransferFailure::kNoMemory;
      moved = Moved::kSome;
    }
  }
  announce(done);
  return moved;
}

Transfers::Moved Transfers::pull(int peer, double timeout_s, Transfer* goal) {
  Incoming& in = *incoming_[peer];
  Done done;
  Moved moved;
  {
    const Inside inside{in};
    if (!inside) return Moved::kBusy;
    try {
      moved = pull_in_turn(in, peer, timeout_s, goal, &done);
    } catch (const std::bad_alloc&) {
      in.is_broken = true;
      done.failure.status = TransferFailure::kNoMemory;
      moved = Moved::kSome;
    }
  }
  announce(done);
  return moved;
}

Transfers::Moved Transfers::push_in_turn(Outgoing& out, int peer, double timeout_s, Transfer* goal, Done* done) {
  bool moved = false;
  while (goal == nullptr || goal->is_open()) {
    QueueStatus status;
    const std::uint64_t before = out.writer == nullptr ? 0 : out.writer->written();
    if (out.is_broken) return Moved::kBusy;
    if (out.current != nullptr) {
      if (has_failed()) {
        out.current = nullptr;
        --out.count;
        break;
      }
      status = out.writer->resume(timeout_s);
    } else {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (has_failed() || out.waiting.empty()) break;
        out.current = std::move(out.waiting.front());
        out.waiting.pop_front();
      }
      const TransferCall& call = out.current->call;
      if (!open_writer(out, peer, done)) {
        done->failure.sends = 1;
        done->failure.peer = peer;
        done->first = std::exchange(out.current, nullptr);
        --out.count;
        return Moved::kSome;
      }
      const Piece piece{call.address, call.bytes};
      status = out.writer->send(&piece, call.bytes == 0 ? 0 : 1, 0, fingerprint_of(call.tag, call.dtype), timeout_s);
    }
    moved |= out.writer->written() != before;
    if (status == QueueStatus::kInterrupted) return Moved::kInterrupted;
    if (status == QueueStatus::kTimedOut) break;
    const Held ended = std::exchange(out.current, nullptr);
    --out.count;
    if (status != QueueStatus::kDone) {
      note_failure(status, true, peer, out.writer.get(), ended, done);
      return Moved::kSome;
    }
    finish(ended, -1, done);
  }
  return moved ? Moved::kSome : Moved::kIdle;
}

// Finds the receive of the message whose header was read, or keeps the message for one to come.
bool Transfers::begin_message(Incoming& in, int peer, Done* done) {
  const ChunkHeader& header = in.reader->header();
  in.form = {static_cast<std::int32_t>(header.fingerprint), static_cast<std::int32_t>(header.fingerprint >> 32),
             header.total_bytes};
  if (header.head_bytes != 0) {
    note_failure(QueueStatus::kMalformed, false, peer, in.reader.get(), nullptr, done);
    return false;
  }
  in.in_message = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = matcher_.arrive(peer, static_cast<std::uint32_t>(in.form.tag), [&] {
      in.early = std::make_shared<Body>();
      in.early->source = peer;
      in.early->form = in.form;
      in.early->bytes.reset(new char[in.form.bytes]);
      return in.early;
    });
    if (found) in.current = std::move(*found);
  }
  if (in.current == nullptr || check_form(in.current, peer, in.form, done)) return true;
  in.current = nullptr;
  return false;
}

Transfers::Moved Transfers::pull_in_turn(Incoming& in, int peer, double timeout_s, Transfer* goal, Done* done) {
  bool moved = false;
  while (goal == nullptr || goal->is_open()) {
    if (in.is_broken) return Moved::kBusy;
    if (has_failed()) {
      in.current = nullptr;
      break;
    }
    if (!in.in_message) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!matcher_.wants(peer)) break;
      }
      if (!open_reader(in, peer, done)) return done->failure.peer = peer, Moved::kSome;
      const QueueStatus status = in.reader->next(timeout_s);
      if (status == QueueStatus::kInterrupted) return Moved::kInterrupted;
      if (status == QueueStatus::kTimedOut) break;
      if (status != QueueStatus::kDone) {
        note_failure(status, false, peer, in.reader.get(), nullptr, done);
        return Moved::kSome;
      }
      if (!begin_message(in, peer, done)) return Moved::kSome;
    }
    if (const std::uint64_t left = in.reader->bytes_left(); left != 0) {
      char* const to = in.current != nullptr ? static_cast<char*>(in.current->call.address) : in.early->bytes.get();
      const Piece piece{to + (in.form.bytes - left), left};
      const QueueStatus status = in.reader->read(&piece, 1, timeout_s);
      moved |= in.reader->bytes_left() != left;
      if (status == QueueStatus::kInterrupted) return Moved::kInterrupted;
      if (status == QueueStatus::kTimedOut) break;
      if (status != QueueStatus::kDone) {
        note_failure(status, false, peer, in.reader.get(), std::exchange(in.current, nullptr), done);
        return Moved::kSome;
      }
    }
    moved = true;
    in.in_message = false;
    if (in.current != nullptr) {
      finish(std::exchange(in.current, nullptr), peer, done);
      continue;
    }
    const Early early = std::exchange(in.early, nullptr);
    Held receiver;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      early->is_whole = true;
      receiver = std::exchange(early->receiver, nullptr);
    }
    if (receiver != nullptr) take(receiver, *early, done);
    if (done->failure.status != 0) return Moved::kSome;
  }
  return moved ? Moved::kSome : Moved::kIdle;
}

bool Transfers::check_form(const Held& receive, int peer, const Form& sent, Done* done) {
  const TransferCall& call = receive->call;
  if (call.dtype == sent.dtype && call.bytes == sent.bytes) return true;
  note_failure(QueueStatus::kMalformed, false, peer, nullptr, receive, done);
  done->failure.sent_dtype = sent.dtype;
  done->failure.sent_bytes = static_cast<std::int64_t>(sent.bytes);
  done->failure.expected_dtype = call.dtype;
  done->failure.expected_bytes = static_cast<std::int64_t>(call.bytes);
  return false;
}

// Copies a whole message that came early.
void Transfers::take(const Held& receive, const Body& body, Done* done) {
  if (!check_form(receive, body.source, body.form, done)) return;
  if (body.form.bytes != 0) std::memcpy(receive->call.address, body.bytes.get(), body.form.bytes);
  finish(receive, body.source, done);
}

void Transfers::finish(const Held& transfer, int source, Done* done) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!transfer->is_open()) return;  // it failed with another
  transfer->source = source;
  transfer->state.store(Transfer::kEnded, std::memory_order_release);
  --left_;
  done->transfers.push_back(transfer);
}

void Transfers::announce(Done& done) {
  if (!done.transfers.empty()) settle(done.transfers, nullptr);
  if (done.failure.status != 0) fail(done.failure, done.first);
}

void Transfers::settle(const std::vector<Held>& ended, const TransferFailure* failure) {
  std::vector<const Transfer*> announced;
  for (const Held& each : ended) {
    const TransferUser& user = *each->call.user;
    if (user.settle == nullptr) continue;
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

void Transfers::note_failure(QueueStatus status, bool sends, int peer, const RingEnd* end, const Held& first,
                             Done* done) {
  TransferFailure& failure = done->failure;
  failure.status = static_cast<std::int64_t>(status);
  failure.sends = sends ? 1 : 0;
  failure.peer = peer;
  failure.suspect = status == QueueStatus::kMalformed || end == nullptr ? peer : end->suspect();
  failure.reporter = end == nullptr ? -1 : end->given_up().reporter;
  failure.reason = end == nullptr ? 0 : end->given_up().status;
  (sends ? static_cast<End&>(*outgoing_[peer]) : *incoming_[peer]).is_broken = true;
  done->first = first;
}

// Fails all that is open, `first` before the others.
void Transfers::fail(TransferFailure failure, const Held& first) {
  std::vector<Held> failed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_failed()) {
      failure = failure_;
    } else {
      Held oldest = first;  // between two messages, of those of the peer
      for (auto at = open_.begin(); at != open_.end() && oldest == nullptr; ++at) {
        if (at->second->call.peer == failure.peer) oldest = at->second;
      }
      if (oldest == nullptr && !open_.empty()) oldest = open_.begin()->second;
      if (oldest != nullptr && failure.elapsed_us == 0) failure.elapsed_us = us_since(oldest->started_ns);
      failure_ = failure;
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
    for (const auto& out : outgoing_) {
      out->count -= static_cast<int>(out->waiting.size());
      out->waiting.clear();
    }
  }
  settle(failed, &failure);
}

bool Transfers::push_all() {
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) moved |= push(peer, 0) == Moved::kSome;
  }
  return moved;
}

bool Transfers::pull_all() {
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) moved |= pull(peer, 0) == Moved::kSome;
  }
  return moved;
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

int Transfers::waiting_sends(int dst) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(outgoing_[dst]->waiting.size());
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
  Presence waiting{waiters_}, moving{movers_};
  waiting.set(true);
  std::int64_t next_look_ns = now_ns() + kLooksNs, nap_ns = kShortestNapNs;
  while (transfer->state.load(std::memory_order_acquire) != Transfer::kSettled) {
    const std::int64_t now = now_ns();
    if (now >= until_ns) {
      if (!expires) return kLateTransfer;
      expire(transfer);
      continue;
    }
    if (now >= next_look_ns) {
      find_losses();
      if (interrupted(false)) return kInterruptedTransfer;
      next_look_ns = now + kLooksNs;
    }
    if (now >= next_deadline_ns_) expire();
    const bool has_others = left_ > 1;
    moving.set(has_others);
    if (has_others) {  // the peer may wait for one of them
      push_all();
      pull_all();
    }
    Moved moved = Moved::kBusy;
    if (transfer->is_open() && call.peer != kAnySource) {
      const std::int64_t limit_ns = std::min({until_ns, next_deadline_ns_.load(), now + 1'000'000'000});
      const double left_s = static_cast<double>(limit_ns - now) / 1e9;
      const double slice_s = std::max(0.0, std::min(left_s, has_others ? kShortSliceS : kSliceS));
      moved = sends ? push(call.peer, slice_s, transfer.get()) : pull(call.peer, slice_s, transfer.get());
      if (moved == Moved::kInterrupted) return kInterruptedTransfer;
    } else if (transfer->is_open()) {
      pull_all();
    }
    if (moved != Moved::kBusy) continue;
    if (transfer->is_open() && is_inside(call.peer, sends)) return kInsideWait;
    std::unique_lock<std::mutex> lock(mutex_);
    if (transfer->state.load(std::memory_order_acquire) != Transfer::kSettled) {
      finished_.wait_for(lock, std::chrono::nanoseconds(nap_ns));
    }
    nap_ns = std::min(nap_ns + nap_ns / 16, kLongestNapNs);  // that after some 16 ms
  }
  return outcome();
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
    if (ends_all || !transfer->is_open()) {
    } else if (transfer->call.sends != 0) {
      auto& waiting = outgoing_[transfer->call.peer]->waiting;
      const auto at = std::find(waiting.begin(), waiting.end(), transfer);
      is_removed = at != waiting.end();
      if (is_removed) {
        waiting.erase(at);
        --outgoing_[transfer->call.peer]->count;
      }
    } else {
      is_removed = matcher_.cancel(transfer);
    }
    if (is_removed) {  // nothing of it has moved
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

// A ring that is only looked at doesn't tell that its other end is lost.
void Transfers::find_losses() {
  std::vector<Held> firsts;  // of each peer, and each way
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
  // Any rank may be the source; that one has left on purpose is a loss once all have.
  const bool is_any = first->call.peer == kAnySource;
  int awaited = is_any ? 0 : first->call.peer;
  const int end = is_any ? size_ : awaited + 1;
  std::shared_ptr<const Losses> losses;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    losses = losses_;
  }
  if (losses == nullptr) return;
  Loss loss;
  for (; awaited < end; ++awaited) {
    if (awaited == rank_) continue;
    loss = losses->loss(awaited);
    if (loss.rank < 0 && loss.reporter < 0) return;
    if (loss.rank != awaited || loss.reporter >= 0) break;
  }
  awaited = std::min(awaited, end - 1);
  // What was sent before the end is there; another thread may be reading it.
  const bool sends = first->call.sends != 0;
  for (int peer = is_any ? 0 : awaited; peer < end; ++peer) {
    if (peer != rank_ && (sends ? push(peer, 0) : pull(peer, 0)) == Moved::kBusy) return;
  }
  if (!first->is_open()) return;
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
  if (movers_ > 0 || waiters_ >= left_ || is_foreign()) return false;
  const bool sent = push_all(), received = pull_all();
  const std::int64_t now = now_ns();
  if (now >= next_deadline_ns_) expire();
  if (now >= next_look_ns_) {
    find_losses();
    next_look_ns_ = now + kLooksNs;
  }
  return sent || received;
}

bool Transfers::has_left() { return left_ > 0 && !is_foreign(); }

Transfers::Outcome Transfers::send_now(int dst, int dtype, std::uint64_t bytes, const std::function<void*()>& data) {
  Outgoing& out = *outgoing_[dst];
  if (is_foreign() || has_failed() || out.count.load(std::memory_order_relaxed) != 0) return Outcome::kLeft;
  const Inside inside{out};
  const bool is_free = inside && !has_failed() && !out.is_broken && out.count.load(std::memory_order_relaxed) == 0;
  if (!is_free || out.writer == nullptr) return Outcome::kLeft;
  if (!out.writer->has_room(bytes)) return Outcome::kNoRoom;
  const Piece piece{data(), bytes};
  const QueueStatus status = out.writer->send(&piece, 1, 0, fingerprint_of(0, dtype), 0);
  return status == QueueStatus::kDone ? Outcome::kDone : Outcome::kLeft;
}

Transfers::Outcome Transfers::receive_now(int src, int dtype, std::uint64_t bytes, const std::function<void()>& begins,
                                          const std::function<void*()>& data) {
  Incoming& in = *incoming_[src];
  if (is_foreign() || has_failed()) return Outcome::kLeft;
  const double timeout_s = timeout_s_.load(std::memory_order_relaxed);
  const std::int64_t started_ns = now_ns();
  Done done;
  {
    const Inside inside{in};
    if (!inside || has_failed() || in.is_broken || in.reader == nullptr || in.in_message) return Outcome::kLeft;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!matcher_.is_idle(src)) return Outcome::kLeft;
    }
    void* const to = data();  // if it throws, no message has begun
    begins();
    QueueStatus status = in.reader->next(timeout_s);
    if (status == QueueStatus::kInterrupted) return Outcome::kLeft;  // nothing is lost: the next call receives it
    if (status == QueueStatus::kDone) {
      const ChunkHeader& header = in.reader->header();
      const bool is_expected =
          header.fingerprint == fingerprint_of(0, dtype) && header.head_bytes == 0 && header.total_bytes == bytes;
      if (!is_expected) {
        begin_message(in, src, &done);
      } else {
        const Piece piece{to, bytes};
        status = in.reader->read(&piece, 1, timeout_s);
        if (status == QueueStatus::kDone) return Outcome::kDone;
      }
    }
    if (status != QueueStatus::kDone) note_failure(status, false, src, in.reader.get(), nullptr, &done);
    if (done.failure.status != 0) done.failure.elapsed_us = us_since(started_ns);
  }
  announce(done);
  return Outcome::kLeft;
}

bool Transfers::drain(double timeout_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  return finished_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return open_.empty(); });
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
  bool is_free = true;
  const std::int64_t until_ns = after(kCloseGraceS);
  const auto end = [&](End& side) {
    if (RingEnd* const ring = side.ring.load(std::memory_order_acquire)) ring->leave();
  };
  for (const auto& out : outgoing_) end(*out);
  for (const auto& in : incoming_) end(*in);
  const auto forget = [&](End& side, Held& current) {
    const double left_s = static_cast<double>(until_ns - now_ns()) / 1e9;
    const bool is_own = pthread_equal(side.holder.load(std::memory_order_relaxed), pthread_self());
    const Inside inside{side, is_own ? 0.0 : std::max(0.0, left_s)};
    if (!inside) return is_free = false, void();
    current = nullptr;
    end(side);  // one that was opened meanwhile
  };
  for (const auto& out : outgoing_) forget(*out, out->current);
  for (const auto& in : incoming_) forget(*in, in->current);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_free) losses_ = nullptr;  // it holds the group's memory
  return is_free;
}

}  // namespace parallel_state
