#include "rings.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace parallel_state {
namespace {

// After this time a waiter moves its other transfers; without and with some.
constexpr double kSliceS = 0.02;
constexpr double kShortSliceS = 0.001;
constexpr double kCloseGraceS = 1.0;
constexpr unsigned kNapUs = 50;

std::uint64_t fingerprint_of(int tag, int dtype) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(dtype)) << 32 | static_cast<std::uint32_t>(tag);
}

}  // namespace

class Rings::Inside {
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

Rings::Rings(std::shared_ptr<const Losses> losses, int rank, int size, const TransferPlaces& places)
    : Transfers(std::move(losses), rank, size), places_(places) {
  policy_.spin_ns = places.spin_ns;
  policy_.yields = static_cast<std::int32_t>(places.yields);
  for (int peer = 0; peer < size; ++peer) {
    outgoing_.push_back(std::make_unique<Outgoing>());
    incoming_.push_back(std::make_unique<Incoming>());
  }
}

bool Rings::is_inside(int peer, bool sends) const {
  if (peer < 0 || peer >= size_) return false;
  const End& end = sends ? static_cast<const End&>(*outgoing_[peer]) : *incoming_[peer];
  return pthread_equal(end.holder.load(std::memory_order_relaxed), pthread_self());
}

char* Rings::open(int src, int dst, bool writes, char** control) {
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

template <typename Ring>
bool Rings::open_ring(std::unique_ptr<Ring>& opened, End& end, int src, int dst, Done* done) {
  if (opened != nullptr) return true;
  const bool writes = src == rank_;
  char* control = nullptr;
  char* const data = open(src, dst, writes, &control);
  const int ranks[] = {src, dst};
  if (data == nullptr) return done->failure.status = TransferFailure::kNoMemory, false;
  opened = std::make_unique<Ring>(control, data, RingShape{places_.chunk_bytes, places_.chunks, 1}, ranks,
                                  writes ? 0 : 1, *losses_, policy_);
  end.ring.store(opened.get(), std::memory_order_release);
  return true;
}

template <typename Move>
Rings::Moved Rings::in_turn(End& end, Move move) {
  Done done;
  Moved moved;
  {
    const Inside inside{end};
    if (!inside) return Moved::kBusy;
    try {
      moved = move(&done);
    } catch (const std::bad_alloc&) {
      end.is_broken = true;
      done.failure.status = TransferFailure::kNoMemory;
      moved = Moved::kSome;
    }
  }
  announce(done);
  return moved;
}

Rings::Moved Rings::push(int peer, double timeout_s, Transfer* goal) {
  Outgoing& out = *outgoing_[peer];
  if (sends_[peer]->count.load(std::memory_order_relaxed) == 0) return Moved::kIdle;
  return in_turn(out, [&](Done* done) { return push_in_turn(out, peer, timeout_s, goal, done); });
}

Rings::Moved Rings::pull(int peer, double timeout_s, Transfer* goal) {
  Incoming& in = *incoming_[peer];
  return in_turn(in, [&](Done* done) { return pull_in_turn(in, peer, timeout_s, goal, done); });
}

Rings::Moved Rings::push_in_turn(Outgoing& out, int peer, double timeout_s, Transfer* goal, Done* done) {
  bool moved = false;
  while (goal == nullptr || goal->is_open()) {
    QueueStatus status;
    const std::uint64_t before = out.writer == nullptr ? 0 : out.writer->written();
    if (out.is_broken) return Moved::kBusy;
    if (out.current != nullptr) {
      if (has_failed()) {
        out.current = nullptr;
        --sends_[peer]->count;
        break;
      }
      status = out.writer->resume(timeout_s);
    } else {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto& waiting = sends_[peer]->waiting;
        if (has_failed() || waiting.empty()) break;
        out.current = std::move(waiting.front());
        waiting.pop_front();
      }
      const TransferCall& call = out.current->call;
      if (!open_ring(out.writer, out, rank_, peer, done)) {
        done->failure.sends = 1;
        done->failure.peer = peer;
        done->first = std::exchange(out.current, nullptr);
        --sends_[peer]->count;
        return Moved::kSome;
      }
      const Piece piece{call.address, call.bytes};
      status = out.writer->send(&piece, call.bytes == 0 ? 0 : 1, 0, fingerprint_of(call.tag, call.dtype), timeout_s);
    }
    moved |= out.writer->written() != before;
    if (status == QueueStatus::kInterrupted) return Moved::kInterrupted;
    if (status == QueueStatus::kTimedOut) break;
    const Held ended = std::exchange(out.current, nullptr);
    --sends_[peer]->count;
    if (status != QueueStatus::kDone) {
      note_failure(status, true, peer, out.writer.get(), ended, done);
      return Moved::kSome;
    }
    finish(ended, -1, done);
  }
  return moved ? Moved::kSome : Moved::kIdle;
}

bool Rings::begin_message(Incoming& in, int peer, Done* done) {
  const ChunkHeader& header = in.reader->header();
  in.form = {static_cast<std::int32_t>(header.fingerprint), static_cast<std::int32_t>(header.fingerprint >> 32),
             header.total_bytes};
  if (header.head_bytes != 0) {
    note_failure(QueueStatus::kMalformed, false, peer, in.reader.get(), nullptr, done);
    return false;
  }
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
  in.is_reading.store(true, std::memory_order_relaxed);
  if (in.current == nullptr || check_form(in.current, peer, in.form, done)) return true;
  in.current = nullptr;
  return false;
}

Rings::Moved Rings::pull_in_turn(Incoming& in, int peer, double timeout_s, Transfer* goal, Done* done) {
  bool moved = false;
  while (goal == nullptr || goal->is_open()) {
    if (in.is_broken) return Moved::kBusy;
    if (has_failed()) {
      in.current = nullptr;
      break;
    }
    if (!in.is_reading.load(std::memory_order_relaxed)) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!matcher_.wants(peer)) break;
      }
      if (!open_ring(in.reader, in, peer, rank_, done)) return done->failure.peer = peer, Moved::kSome;
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
    in.is_reading.store(false, std::memory_order_relaxed);
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
    if (receiver != nullptr) take(receiver, early, done);
    if (done->failure.status != 0) return Moved::kSome;
  }
  return moved ? Moved::kSome : Moved::kIdle;
}

void Rings::note_failure(QueueStatus status, bool sends, int peer, const RingEnd* end, const Held& first, Done* done) {
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

bool Rings::push_all() {
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) moved |= push(peer, 0) == Moved::kSome;
  }
  return moved;
}

bool Rings::pull_all() {
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) moved |= pull(peer, 0) == Moved::kSome;
  }
  return moved;
}

Rings::Outcome Rings::send_now(int dst, int dtype, std::uint64_t bytes, double, const std::function<void*()>& data) {
  Outgoing& out = *outgoing_[dst];
  const std::atomic<int>& count = sends_[dst]->count;
  if (is_foreign() || has_failed() || count.load(std::memory_order_relaxed) != 0) return Outcome::kLeft;
  const Inside inside{out};
  const bool is_free = inside && !has_failed() && !out.is_broken && count.load(std::memory_order_relaxed) == 0;
  if (!is_free || out.writer == nullptr) return Outcome::kLeft;
  if (!out.writer->has_room(bytes)) return Outcome::kNoRoom;
  const Piece piece{data(), bytes};
  const QueueStatus status = out.writer->send(&piece, 1, 0, fingerprint_of(0, dtype), 0);
  return status == QueueStatus::kDone ? Outcome::kDone : Outcome::kLeft;
}

Rings::Outcome Rings::receive_now(int src, int dtype, std::uint64_t bytes, double timeout_s,
                                  const std::function<void()>& begins, const std::function<void*()>& data) {
  Incoming& in = *incoming_[src];
  if (is_foreign() || has_failed()) return Outcome::kLeft;
  const std::int64_t started_ns = now_ns();
  Done done;
  {
    const Inside inside{in};
    if (!inside || has_failed() || in.is_broken || in.reader == nullptr ||
        in.is_reading.load(std::memory_order_relaxed))
      return Outcome::kLeft;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!matcher_.is_idle(src)) return Outcome::kLeft;
    }
    void* const to = data();  // if it throws, no message has begun
    begins();
    QueueStatus status = in.reader->next(timeout_s);
    if (status == QueueStatus::kInterrupted) return Outcome::kLeft;  // the next call receives the message
    if (status == QueueStatus::kDone) {
      const ChunkHeader& header = in.reader->header();
      const bool is_expected =
          header.fingerprint == fingerprint_of(0, dtype) && header.head_bytes == 0 && header.total_bytes == bytes;
      if (!is_expected) {
        try {
          begin_message(in, src, &done);
        } catch (const std::bad_alloc&) {
          in.is_broken = true;
          done.failure.status = TransferFailure::kNoMemory;
          done.failure.peer = src;
        }
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

void Rings::begin(const Held& transfer, const Early& early) {
  const int peer = transfer->call.peer;
  if (transfer->call.sends != 0) {
    push(peer, 0);
  } else if (early != nullptr) {
    Done done;
    take(transfer, early, &done);
    announce(done);
  } else if (peer == kAnySource) {
    pull_all();
  } else {
    pull(peer, 0);
  }
}

bool Rings::move_all() {
  const bool sent = push_all(), received = pull_all();
  return sent || received;
}

Transfers::Moved Rings::move_for(Transfer* transfer, std::int64_t until_ns) {
  const TransferCall& call = transfer->call;
  const bool has_others = left_ > 1;
  const Presence moving{movers_, has_others};
  if (has_others) move_all();  // the peer may wait for them
  if (!transfer->is_open()) return Moved::kBusy;
  if (call.peer == kAnySource) {
    pull_all();
    return Moved::kBusy;
  }
  const double left_s = static_cast<double>(until_ns - now_ns()) / 1e9;
  const double slice_s = std::max(0.0, std::min(left_s, has_others ? kShortSliceS : kSliceS));
  return call.sends != 0 ? push(call.peer, slice_s, transfer) : pull(call.peer, slice_s, transfer);
}

// Earlier sends are in the ring; another thread may be reading it.
bool Rings::read_last(const Transfer& transfer, int from, int end) {
  for (int peer = from; peer < end; ++peer) {
    if (peer != rank_ && (transfer.call.sends != 0 ? push(peer, 0) : pull(peer, 0)) == Moved::kBusy) return false;
  }
  return true;
}

void Rings::sleep_on(Sleep* sleep) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    bool wants = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      wants = matcher_.wants(peer);
    }
    sleep_on(*outgoing_[peer], sends_[peer]->count.load(std::memory_order_relaxed) > 0, sleep);
    sleep_on(*incoming_[peer], wants || incoming_[peer]->is_reading.load(std::memory_order_relaxed), sleep);
  }
}

void Rings::sleep_on(End& end, bool is_wanted, Sleep* sleep) {
  if (!is_wanted) return;
  const Inside inside{end};
  const RingEnd* const ring = end.ring.load(std::memory_order_relaxed);
  std::uint64_t target = 0, seen = 0;
  Counter* const counter = inside && ring != nullptr ? ring->awaited(&target) : nullptr;
  if (counter == nullptr || !counter->begin_sleep(target, &seen)) {
    sleep->naps = true;
    return;
  }
  slept_on_.push_back(counter);
  sleep->add(counter->word(), static_cast<std::uint32_t>(seen));
}

void Rings::end_sleep() {
  for (Counter* const counter : slept_on_) counter->end_sleep();
  slept_on_.clear();
}

bool Rings::leave() {
  bool is_free = true;
  const std::int64_t until_ns = after(kCloseGraceS);
  for (wake_progress(); is_asleep(); wake_progress()) {
    if (now_ns() >= until_ns) return false;
    usleep(kNapUs);
  }
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
    end(side);
  };
  for (const auto& out : outgoing_) forget(*out, out->current);
  for (const auto& in : incoming_) forget(*in, in->current);
  return is_free;
}

}  // namespace parallel_state
