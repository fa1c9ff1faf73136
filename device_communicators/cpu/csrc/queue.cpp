#include "queue.h"

#include <algorithm>
#include <cstring>

namespace parallel_state {
namespace {

constexpr std::uint64_t kMagic = 0x5053'5155'4555'4531;

// Beyond any machine's memory, and far from an overflow of what is added to it.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 60;

}  // namespace

RingEnd::RingEnd(void* control, void* data, RingShape shape, const int* ranks, int me, const ProcessLiveness& processes,
                 WaitPolicy policy)
    : shape_(shape),
      me_(me),
      left_(static_cast<Left*>(control)),
      counters_(reinterpret_cast<Counter*>(static_cast<char*>(control) + sizeof(Left))),
      data_(static_cast<char*>(data)),
      ranks_(ranks, ranks + shape.readers + 1),
      processes_(processes),
      policy_(policy) {
  counter(me).own();
}

void RingEnd::leave() {
  leaving_.store(true, std::memory_order_relaxed);  // carries no data; a waiter looks at it every few milliseconds
  // Release: who sees the bit sees all chunks that were published before it.
  left_->bits.fetch_or(std::uint64_t{1} << me_, std::memory_order_release);
}

// Who ended first: an end may have left because another rank died.
Loss RingEnd::loss(int index) const {
  if (leaving_.load(std::memory_order_relaxed)) return {ranks_[index], -1, 0};
  const Loss found = processes_.loss(ranks_[index]);
  const bool there = (left_->bits.load(std::memory_order_acquire) >> index & 1) == 0;
  return found.rank >= 0 || found.reporter >= 0 || there ? found : Loss{ranks_[index], -1, 0};
}

QueueStatus RingEnd::await(int index, std::uint64_t target) {
  if (counters_[index].read() >= target) return QueueStatus::kDone;
  suspect_ = ranks_[index];
  if (!waits_) return QueueStatus::kTimedOut;
  switch (wait_for(counters_[index], target, policy_, deadline_, *this, index)) {
    case WaitResult::kReached: return QueueStatus::kDone;
    case WaitResult::kTimedOut: return QueueStatus::kTimedOut;
    case WaitResult::kInterrupted: return QueueStatus::kInterrupted;
    default:
      lost_ = loss(index);
      if (lost_.rank >= 0) suspect_ = lost_.rank;
      return lost_.reporter < 0 ? QueueStatus::kPeerDied : QueueStatus::kGivenUp;
  }
}

QueueStatus QueueWriter::send(const Piece* pieces, int count, int heads, std::uint64_t fingerprint, double timeout_s) {
  if (unfinished_) return QueueStatus::kMalformed;
  pieces_.assign(pieces, pieces + count);
  piece_ = offset_ = 0;
  header_.magic = kMagic;
  header_.message += 1;
  header_.head_bytes = 0;
  for (int head = 0; head < heads; ++head) header_.head_bytes += pieces[head].bytes;
  header_.fingerprint = fingerprint;
  header_.total_bytes = 0;
  for (const Piece& piece : pieces_) header_.total_bytes += piece.bytes;
  unfinished_ = true;
  return resume(timeout_s);
}

QueueStatus QueueWriter::resume(double timeout_s) {
  begin(timeout_s);
  while (unfinished_) {
    const std::uint64_t chunk = written_ + 1;
    const QueueStatus status = reuse(chunk);
    if (status != QueueStatus::kDone) return status;
    fill(slot(chunk));  // model: write
    written_ = chunk;
    counter(0).publish(chunk, chunk);  // model: publish, look, wake
  }
  return QueueStatus::kDone;
}

// Waits until all readers are past what lies in the slot of `chunk`.
QueueStatus QueueWriter::reuse(std::uint64_t chunk) {
  if (chunk <= shape_.chunks || reusable_ >= chunk - shape_.chunks) return QueueStatus::kDone;
  std::uint64_t least = UINT64_MAX;
  for (int reader = 1; reader <= shape_.readers; ++reader) {
    const QueueStatus status = await(reader, chunk - shape_.chunks);  // model: await_slot
    if (status != QueueStatus::kDone) return status;
    least = std::min(least, counter(reader).read());
  }
  reusable_ = least;
  return QueueStatus::kDone;
}

bool QueueWriter::has_room(std::uint64_t bytes) {
  const std::uint64_t chunks = bytes == 0 ? 1 : (bytes - 1) / room() + 1;
  if (unfinished_ || chunks > shape_.chunks) return false;
  const std::uint64_t last = written_ + chunks;
  if (last <= shape_.chunks || reusable_ >= last - shape_.chunks) return true;
  std::uint64_t least = UINT64_MAX;
  for (int reader = 1; reader <= shape_.readers; ++reader) least = std::min(least, counter(reader).read());
  reusable_ = least;
  return least >= last - shape_.chunks;
}

void QueueWriter::fill(char* slot) {
  header_.chunk = written_ + 1;
  std::memcpy(slot, &header_, sizeof header_);
  char* to = slot + sizeof header_;
  std::uint64_t left = room();
  while (piece_ < pieces_.size()) {
    const Piece& piece = pieces_[piece_];
    const std::uint64_t bytes = std::min(left, piece.bytes - offset_);
    if (bytes != 0) std::memcpy(to, static_cast<const char*>(piece.address) + offset_, bytes);
    to += bytes;
    left -= bytes;
    offset_ += bytes;
    if (offset_ < piece.bytes) return;  // the chunk is full
    ++piece_;
    offset_ = 0;
  }
  unfinished_ = false;
}

QueueStatus QueueReader::next(double timeout_s) {
  begin(timeout_s);
  if (left_ != 0) return QueueStatus::kMalformed;
  const QueueStatus status = enter();
  if (status == QueueStatus::kDone && left_ == 0) release();  // a message without bytes
  return status;
}

// Waits for the next chunk, of a new message where nothing is left of the last one, and checks that it is the one.
QueueStatus QueueReader::enter() {
  const std::uint64_t chunk = read_ + 1;
  const QueueStatus status = await(0, chunk);  // model: await_chunk
  if (status != QueueStatus::kDone) return status;
  ChunkHeader found;
  std::memcpy(&found, slot(chunk), sizeof found);  // model: read
  const bool first = left_ == 0;
  if (found.magic != kMagic || found.chunk != chunk || found.message != messages_ + (first ? 1 : 0) ||
      found.head_bytes > found.total_bytes || found.total_bytes > kMostBytes ||
      (!first && found.total_bytes != header_.total_bytes)) {
    return QueueStatus::kMalformed;
  }
  if (first) {
    header_ = found;
    left_ = found.total_bytes;
    ++messages_;
  }
  offset_ = 0;
  end_ = std::min<std::uint64_t>(room(), left_);
  in_chunk_ = true;
  return QueueStatus::kDone;
}

void QueueReader::release() {
  in_chunk_ = false;
  ++read_;
  counter(me_).publish(read_, read_);  // model: release, look, wake
}

bool QueueReader::is_next(const char* head, std::uint64_t bytes) const {
  return in_chunk_ && offset_ == 0 && header_.head_bytes == bytes && bytes <= end_ &&
         std::memcmp(here(), head, bytes) == 0;
}

QueueStatus QueueReader::read(const Piece* pieces, int count, double timeout_s) {
  begin(timeout_s);
  std::uint64_t wanted = 0;
  for (int index = 0; index < count; ++index) wanted += pieces[index].bytes;
  if (wanted > left_) return QueueStatus::kMalformed;
  for (int index = 0; index < count; ++index) {
    char* to = static_cast<char*>(pieces[index].address);
    for (std::uint64_t done = 0; done < pieces[index].bytes;) {
      if (!in_chunk_) {
        const QueueStatus status = enter();
        if (status != QueueStatus::kDone) return status;
      }
      const std::uint64_t bytes = std::min(end_ - offset_, pieces[index].bytes - done);
      if (to != nullptr) std::memcpy(to + done, here(), bytes);
      done += bytes;
      offset_ += bytes;
      left_ -= bytes;
      if (offset_ == end_) release();
    }
  }
  return QueueStatus::kDone;
}

}  // namespace parallel_state
