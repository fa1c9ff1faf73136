#include "pairs.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace parallel_state {
namespace {

constexpr auto kShortestNap = std::chrono::microseconds(50);
constexpr auto kLongestNap = std::chrono::milliseconds(1);
constexpr auto kBetweenLooks = std::chrono::milliseconds(50);  // for ranks that are lost
// For how long a waiter reads or writes one ring before it looks after the others.
constexpr double kSliceS = 0.02;
constexpr auto kCloseGrace = std::chrono::milliseconds(200);
constexpr double kShortSliceS = 0.001;  // where this rank has something to do for its peer, too

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

QueueStatus status_of(int status) { return static_cast<QueueStatus>(status); }

const char* name_of(bool sends) { return sends ? "send" : "recv"; }

Message head_of(const Pairs::Transfer& transfer) {
  const at::Tensor& tensor = transfer.tensor;
  return {transfer.tag, static_cast<std::int32_t>(tensor.scalar_type()), static_cast<std::int64_t>(tensor.nbytes())};
}

bool same_form(const Message& one, const Message& other) {
  return one.dtype == other.dtype && one.bytes == other.bytes;
}

std::string in_words(const Message& message) {
  return c10::str(message.bytes, " bytes of ", static_cast<at::ScalarType>(message.dtype));
}

}  // namespace

Pairs::Pairs(std::shared_ptr<const Library> library, std::uint64_t group, int rank, int size, QueuePlaces places,
             Raise raise, Interruption interruption)
    : library_(std::move(library)),
      group_(group),
      rank_(rank),
      size_(size),
      places_(places),
      raise_(std::move(raise)),
      interruption_(std::move(interruption)),
      liveness_(library_->liveness_of(group)) {
  TORCH_CHECK(liveness_ != nullptr, "the group is gone");
  for (int peer = 0; peer < size; ++peer) {
    outgoing_.push_back(std::make_unique<Outgoing>());
    incoming_.push_back(std::make_unique<Incoming>());
  }
}

Pairs::~Pairs() {
  close(nullptr);
  for (auto& out : outgoing_) {
    if (out->end != nullptr) library_->queue_writer_delete(out->end);
  }
  for (auto& in : incoming_) {
    if (in->end != nullptr) library_->queue_reader_delete(in->end);
  }
  library_->liveness_delete(liveness_);
}

void* Pairs::open(int src, int dst, QueueReport* report) {
  const bool writes = src == rank_;
  const std::size_t index = (static_cast<std::size_t>(src) * size_ + dst) * places_.kinds;
  const std::size_t bytes = places_.chunk_bytes * places_.chunks, offset = index * bytes;
  constexpr std::size_t kControlBytes = 3 * sizeof(Counter);  // who has left, and both ends' counters
  void* const data = places_.control == nullptr ? nullptr : library_->windows_at(places_.windows, offset, bytes);
  const bool backed = data != nullptr &&
                      (!writes || library_->back(data, bytes, places_.descriptor, places_.data_offset + offset) != 0);
  TORCH_CHECK(backed, "there are no ", bytes >> 10, " KiB of shared memory for messages between ranks ", src, " and ",
              dst, ": make /dev/shm larger, or allow more address space (ulimit -v)");
  char* const control = places_.control + index * kControlBytes;
  const int ranks[] = {src, dst};
  return writes ? library_->queue_writer_new(control, data, places_.chunk_bytes, places_.chunks, 1, ranks, liveness_,
                                             places_.spin_ns, places_.yields, report)
                : library_->queue_reader_new(control, data, places_.chunk_bytes, places_.chunks, 1, ranks, 1, liveness_,
                                             places_.spin_ns, places_.yields, report);
}

void Pairs::start(Held transfer) {
  const int peer = transfer->peer;
  const bool sends = transfer->is_send;
  transfer->pairs = this;
  Ended ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    TORCH_CHECK_WITH(DistBackendError, !closed_, "the group was destroyed or aborted: it takes no more transfers");
    transfer->order = ++order_;
    open_.push_back(transfer);
    if (sends) outgoing_[peer]->waiting.push_back(transfer);
  }
  if (sends) {
    push(peer, 0);
  } else if (take_unexpected(transfer, &ended)) {
    announce(ended);
  } else {
    peer == kAnySource ? pull_all() : static_cast<void>(pull(peer, 0));
  }
  if (transfer->isCompleted()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->serve(); });
  if (sleeps_) wake_.notify_one();
}

bool Pairs::push(int peer, double timeout_s, Transfer* goal) {
  Outgoing& out = *outgoing_[peer];
  Ended ended;
  {
    const std::unique_lock<std::mutex> turn(out.turn, std::try_to_lock);
    if (!turn) return false;
    try {
      push_in_turn(out, peer, timeout_s, goal, &ended);
    } catch (...) {  // no memory, for one
      ended.error = std::current_exception();
    }
  }
  announce(ended);
  return true;
}

bool Pairs::pull(int peer, double timeout_s, Transfer* goal) {
  Incoming& in = *incoming_[peer];
  Ended ended;
  {
    const std::unique_lock<std::mutex> turn(in.turn, std::try_to_lock);
    if (!turn) return false;
    try {
      pull_in_turn(in, peer, timeout_s, goal, &ended);
    } catch (...) {
      ended.error = std::current_exception();
    }
  }
  if (ended.failure.status == QueueStatus::kInterrupted && goal != nullptr) ended.first = Held::reclaim_copy(goal);
  announce(ended);
  return true;
}

void Pairs::announce(const Ended& ended) {
  for (const Held& transfer : ended.done) transfer->announce();
  if (ended.error != nullptr) {
    fail_all(ended.error);
  } else if (ended.operation != nullptr) {
    fail(ended.operation, ended.failure, ended.first);
  }
}

bool Pairs::has_failed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_ != nullptr;
}

void Pairs::push_in_turn(Outgoing& out, int peer, double timeout_s, Transfer* goal, Ended* ended) {
  while (goal == nullptr || !goal->isCompleted()) {
    int status;
    if (out.current) {
      if (has_failed()) {
        out.current = nullptr;
        return;
      }
      status = library_->queue_resume(out.end, timeout_s);
    } else {
      Held next;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (failure_ != nullptr || out.waiting.empty()) return;
        next = std::move(out.waiting.front());
        out.waiting.pop_front();
      }
      if (out.end == nullptr) out.end = open(rank_, peer, &out.report);
      out.current = std::move(next);
      const at::Tensor& tensor = out.current->tensor;
      const Piece piece{tensor.data_ptr(), tensor.nbytes()};
      out.head = head_of(*out.current);
      status = library_->queue_send(out.end, reinterpret_cast<const char*>(&out.head), sizeof out.head, &piece,
                                    piece.bytes == 0 ? 0 : 1, 0, 0, timeout_s);
    }
    if (status_of(status) == QueueStatus::kTimedOut) return;
    const Held done = std::exchange(out.current, nullptr);
    if (status_of(status) != QueueStatus::kDone) {
      note_failure(status_of(status), true, peer, out.report, done, ended);
      return;
    }
    finish(done, ended);
  }
}

// Finds the receive of a message that begins: the first that was started for its tag, from its source or from any.
Pairs::Held Pairs::match(Incoming& in, int tag) {
  const auto fits = [tag](const Held& transfer) { return transfer->tag == tag; };
  const auto own = std::find_if(in.posted.begin(), in.posted.end(), fits);
  const auto any = std::find_if(any_source_.begin(), any_source_.end(), fits);
  const bool has_own = own != in.posted.end(), has_any = any != any_source_.end();
  if (!has_own && !has_any) return {};
  const bool is_own = has_own && (!has_any || (*own)->order < (*any)->order);
  Held found = is_own ? *own : *any;
  is_own ? in.posted.erase(own) : any_source_.erase(any);
  return found;
}

bool Pairs::begin_message(Incoming& in, int peer, double timeout_s, Ended* ended) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_ != nullptr || (in.posted.empty() && any_source_.empty())) return false;
  }
  if (in.end == nullptr) in.end = open(peer, rank_, &in.report);
  const int status = library_->queue_take(in.end, reinterpret_cast<char*>(&in.head), sizeof in.head, nullptr, 0,
                                          nullptr, 0, timeout_s);
  if (status_of(status) == QueueStatus::kTimedOut) return false;
  const bool sound = status_of(status) == QueueStatus::kDone && in.report.head_bytes == sizeof in.head &&
                     in.report.left_bytes == in.head.bytes;
  if (!sound) {
    note_failure(status_of(status) == QueueStatus::kDone ? QueueStatus::kMalformed : status_of(status), false, peer,
                 in.report, nullptr, ended);
    return false;
  }
  in.done_bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    in.current = match(in, in.head.tag);
  }
  if (in.current && !same_form(head_of(*in.current), in.head)) {
    deliver(std::exchange(in.current, nullptr), peer, in.head, nullptr, ended);  // which fails
    return false;
  }
  if (!in.current) in.spare = {in.head, std::vector<char>(in.head.bytes)};
  in.in_message = true;
  return true;
}

void Pairs::pull_in_turn(Incoming& in, int peer, double timeout_s, Transfer* goal, Ended* ended) {
  while (goal == nullptr || !goal->isCompleted()) {
    if (!in.in_message && !begin_message(in, peer, timeout_s, ended)) return;
    if (has_failed()) {
      in.current = nullptr;
      return;
    }
    if (in.done_bytes < in.head.bytes) {
      char* const to = in.current ? static_cast<char*>(in.current->tensor.data_ptr()) : in.spare.bytes.data();
      const Piece piece{to + in.done_bytes, static_cast<std::uint64_t>(in.head.bytes - in.done_bytes)};
      const int status = library_->queue_read(in.end, &piece, 1, timeout_s);
      in.done_bytes = in.head.bytes - in.report.left_bytes;
      if (status_of(status) == QueueStatus::kTimedOut) return;
      if (status_of(status) != QueueStatus::kDone) {
        note_failure(status_of(status), false, peer, in.report, std::exchange(in.current, nullptr), ended);
        return;
      }
    }
    in.in_message = false;
    Held receiver = std::exchange(in.current, nullptr);
    if (!receiver) {
      const std::lock_guard<std::mutex> lock(mutex_);
      receiver = match(in, in.spare.head.tag);  // it may have been started meanwhile
      if (!receiver) {
        in.unexpected.push_back(std::move(in.spare));
        continue;
      }
    }
    deliver(receiver, peer, in.head, in.spare.bytes.empty() ? nullptr : in.spare.bytes.data(), ended);
    in.spare.bytes = {};
  }
}

bool Pairs::take_unexpected(const Held& transfer, Ended* ended) {
  const auto take = [&](Incoming& in, Unexpected* found) {
    const auto at = std::find_if(in.unexpected.begin(), in.unexpected.end(),
                                 [&](const Unexpected& message) { return message.head.tag == transfer->tag; });
    if (at == in.unexpected.end()) return false;
    *found = std::move(*at);
    in.unexpected.erase(at);
    return true;
  };
  Unexpected found;
  int source = -1;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int peer = transfer->peer;
    for (int src = peer == kAnySource ? 0 : peer; source < 0 && src < (peer == kAnySource ? size_ : peer + 1); ++src) {
      if (take(*incoming_[src], &found)) source = src;
    }
    if (source < 0) {
      (peer == kAnySource ? any_source_ : incoming_[peer]->posted).push_back(transfer);
      return false;
    }
  }
  deliver(transfer, source, found.head, found.bytes.data(), ended);
  return true;
}

void Pairs::deliver(const Held& transfer, int peer, const Message& head, const char* bytes, Ended* ended) {
  const Message expected = head_of(*transfer);
  if (!same_form(expected, head)) {
    note_failure(QueueStatus::kMalformed, false, peer, QueueReport{}, transfer, ended);
    ended->failure.sent = in_words(head);
    ended->failure.expected = in_words(expected);
    return;
  }
  if (bytes != nullptr && head.bytes != 0) std::memcpy(transfer->tensor.data_ptr(), bytes, head.bytes);
  if (transfer->target.defined()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    transfer->target.copy_(transfer->tensor);
  }
  transfer->set_source_rank(peer);
  finish(transfer, ended);
}

void Pairs::finish(const Held& transfer, Ended* ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = std::find(open_.begin(), open_.end(), transfer);
  if (at == open_.end()) return;  // it failed with another
  ended->done.push_back(transfer);
  open_.erase(at);
  transfer->tensor.reset();
  transfer->target.reset();
  transfer->settle(nullptr);
  finished_.notify_all();
}

void Pairs::note_failure(QueueStatus status, bool sends, int peer, const QueueReport& report, const Held& first,
                         Ended* ended) {
  ended->operation = name_of(sends);
  ended->first = first;
  ended->failure.status = status;
  ended->failure.peer = peer;
  ended->failure.suspect = status == QueueStatus::kMalformed ? peer : report.suspect;
  ended->failure.reporter = report.reporter;
  ended->failure.reason = report.reason;
}

void Pairs::fail(const char* operation, PairFailure failure, const Held& first) {
  if (first) {
    failure.elapsed_s = seconds(Clock::now() - first->started);
  } else {  // between two messages: the error is that of the peer's oldest transfer, and of all others that it ends
    const std::lock_guard<std::mutex> lock(mutex_);
    auto at = std::find_if(open_.begin(), open_.end(), [&](const Held& held) { return held->peer == failure.peer; });
    if (at == open_.end()) at = open_.begin();
    if (at != open_.end()) failure.elapsed_s = seconds(Clock::now() - (*at)->started);
  }
  const std::exception_ptr error = raise_(operation, failure);
  if (failure.status != QueueStatus::kInterrupted) return fail_all(error);
  // What the handler of a signal has raised is for the call that it interrupted.
  fail_all(raise_(operation, failure), first, error);
  std::rethrow_exception(error);  // the handler may have closed the group, and ended the transfer, before it raised
}

void Pairs::fail_all(const std::exception_ptr& error, const Held& first, const std::exception_ptr& error_of_first) {
  std::list<Held> failed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_ == nullptr) failure_ = error;
    failed.swap(open_);
    any_source_.clear();
    for (auto& out : outgoing_) out->waiting.clear();
    for (auto& in : incoming_) in->posted.clear();
    for (const Held& transfer : failed) {
      transfer->settle(transfer == first && error_of_first != nullptr ? error_of_first : failure_);
    }
    finished_.notify_all();
  }
  for (const Held& transfer : failed) transfer->announce();
}

void Pairs::push_all() {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) push(peer, 0);
  }
}

void Pairs::pull_all() {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) pull(peer, 0);
  }
}

bool Pairs::await(Transfer& transfer, std::optional<Clock::time_point> until) {
  auto next_look = Clock::now() + kBetweenLooks;
  auto nap = std::chrono::duration_cast<std::chrono::microseconds>(kShortestNap);
  while (!transfer.isCompleted()) {
    const auto now = Clock::now();
    if (until && now >= *until) return false;
    if (now >= next_look) {
      look_for_losses();
      interrupt(transfer);
      next_look = now + kBetweenLooks;
    }
    expire();
    bool others;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      others = open_.size() > 1;
    }
    if (others) {  // the peer may wait for one of them
      push_all();
      pull_all();
    }
    const auto limit = std::min(transfer.deadline, until.value_or(transfer.deadline));
    const double slice_s = std::clamp(seconds(limit - now), 0.0, others ? kShortSliceS : kSliceS);
    bool moved = false;
    if (!transfer.isCompleted() && transfer.peer != kAnySource) {
      moved = transfer.is_send ? push(transfer.peer, slice_s, &transfer) : pull(transfer.peer, slice_s, &transfer);
    } else if (!transfer.isCompleted()) {
      pull_all();
    }
    if (moved) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!transfer.isCompleted()) finished_.wait_for(lock, nap);
    nap = std::min<std::chrono::microseconds>(nap + nap / 16, kLongestNap);  // that after some 16 ms
  }
  return true;
}

// What a handler of signals raised, where the thread reads or writes in the caller's place.
void Pairs::interrupt(Transfer& transfer) {
  const std::exception_ptr raised = interruption_();
  if (raised == nullptr) return;
  PairFailure failure{};
  failure.status = QueueStatus::kInterrupted;
  failure.peer = transfer.peer;
  failure.suspect = failure.reporter = -1;
  failure.elapsed_s = seconds(Clock::now() - transfer.started);
  fail_all(raise_(name_of(transfer.is_send), failure), Held::reclaim_copy(&transfer), raised);
  std::rethrow_exception(raised);
}

void Pairs::expire() {
  const auto now = Clock::now();
  Held late;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = std::find_if(open_.begin(), open_.end(), [&](const Held& held) { return held->deadline <= now; });
    if (at == open_.end()) return;
    late = *at;
  }
  PairFailure failure{};
  failure.status = QueueStatus::kTimedOut;
  failure.peer = late->peer;
  failure.suspect = late->peer;
  failure.reporter = -1;
  fail(name_of(late->is_send), failure, late);
}

// A ring that is only looked at doesn't tell that its other end is gone.
void Pairs::look_for_losses() {
  Held first;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_.empty()) return;
    first = open_.front();
  }
  // Any rank may be the source; that one has gone on purpose is a loss once all have.
  const bool is_any = first->peer == kAnySource;
  int awaited = is_any ? 0 : first->peer;
  const int end = is_any ? size_ : awaited + 1;
  QueueReport report;
  for (; awaited < end; ++awaited) {
    if (awaited == rank_) continue;
    report.suspect = library_->group_loss(group_, awaited, &report.reporter, &report.reason);
    if (report.suspect < 0 && report.reporter < 0) return;
    if (report.suspect != awaited || report.reporter >= 0) break;
  }
  awaited = std::min(awaited, end - 1);
  // What was sent before the end is there; another thread may be reading it.
  for (int peer = is_any ? 0 : awaited; peer < end; ++peer) {
    if (peer != rank_ && !(first->is_send ? push(peer, 0) : pull(peer, 0))) return;
  }
  if (first->isCompleted()) return;
  Ended ended;
  note_failure(report.reporter < 0 ? QueueStatus::kPeerDied : QueueStatus::kGivenUp, first->is_send, awaited, report,
               first, &ended);
  announce(ended);
}

void Pairs::serve() {
  pthread_setname_np(pthread_self(), "ps-transfers");  // at most 15 bytes
  library_->wait_gently(1);
  auto nap = std::chrono::duration_cast<std::chrono::microseconds>(kShortestNap);
  auto next_look = Clock::now() + kBetweenLooks;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closed_) {
    if (open_.empty()) {
      sleeps_ = true;
      wake_.wait(lock);
      sleeps_ = false;
      nap = kShortestNap;
      continue;
    }
    const std::size_t before = open_.size();
    lock.unlock();
    push_all();
    pull_all();
    expire();
    if (const auto now = Clock::now(); now >= next_look) {
      look_for_losses();
      next_look = now + kBetweenLooks;
    }
    lock.lock();
    nap = open_.size() < before ? kShortestNap : std::min<std::chrono::microseconds>(2 * nap, kLongestNap);
    if (!closed_ && !open_.empty()) wake_.wait_for(lock, nap);
  }
}

bool Pairs::drain(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return finished_.wait_until(lock, deadline, [this] { return open_.empty(); });
}

void Pairs::close(const std::exception_ptr& error) {
  std::thread thread;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    thread.swap(thread_);
    wake_.notify_all();
  }
  if (error != nullptr) fail_all(error);
  // A turn ends within a slice, but for that of this thread where a signal's handler closes what it has interrupted.
  const auto turn_of = [](std::mutex& mutex) {
    std::unique_lock<std::mutex> turn(mutex, std::try_to_lock);
    for (const auto until = Clock::now() + kCloseGrace; !turn && Clock::now() < until; turn.try_lock()) {
      std::this_thread::sleep_for(kShortestNap);
    }
    return turn;
  };
  for (auto& out : outgoing_) {
    if (const std::unique_lock<std::mutex> turn = turn_of(out->turn)) out->current = nullptr;
    if (out->end != nullptr) library_->queue_writer_leave(out->end);
  }
  for (auto& in : incoming_) {
    if (const std::unique_lock<std::mutex> turn = turn_of(in->turn)) in->current = nullptr;
    if (in->end != nullptr) library_->queue_reader_leave(in->end);
  }
  if (thread.joinable()) thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
}

}  // namespace parallel_state
