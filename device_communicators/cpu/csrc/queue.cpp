#include "queue.h"

#include <algorithm>
#include <cstring>

namespace parallel_state {
namespace {

constexpr std::uint64_t kMagic = 0x5053'5155'4555'4531;

// Beyond any machine's memory, without overflow of sums.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 60;

}  // namespace

RingEnd::RingEnd(void* control, void* data, RingShape shape, const int* ranks, int me, const Losses& losses,
                 WaitPolicy policy)
    : shape_(shape),
      me_(me),
      ends_(static_cast<Ends*>(control)),
      counters_(reinterpret_cast<Counter*>(static_cast<char*>(control) + sizeof(Ends))),
      data_(static_cast<char*>(data)),
      ranks_(ranks, ranks + shape.readers + 1),
      losses_(losses),
      policy_(policy) {
  counter(me).own();
}

void RingEnd::leave() {
  leaving_.store(true, std::memory_order_relaxed);
  // Release: an end that sees the bit sees all chunks published before.
  ends_->left.fetch_or(std::uint64_t{1} << me_, std::memory_order_release);
}

// Names the first end that exited: others may have left because of it.
Loss RingEnd::loss(int index) const {
  if (leaving_.load(std::memory_order_relaxed)) return Loss(ranks_[index]);
  const Loss found = losses_.loss(ranks_[index]);
  const bool there = (ends_->left.load(std::memory_order_acquire) >> index & 1) == 0;
  return found.rank >= 0 || found.reporter >= 0 || there ? found : Loss(ranks_[index]);
}

QueueStatus RingEnd::await(int index, std::uint64_t target) {
  if (counters_[index].read() >= target) return QueueStatus::kDone;
  suspect_ = ranks_[index];
  awaited_ = &counters_[index];
  awaited_target_ = target;
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
  take_in(pieces, count, heads);
  lend(heads);
  begin_message(fingerprint);
  return resume(timeout_s);
}

bool QueueWriter::fit(const Piece* pieces, int count, int heads) {
  constexpr std::uint64_t kMostAtOnce = 8 << 20;  // more loans would keep others waiting for the GIL
  if (unfinished_) return false;
  take_in(pieces, count, heads);
  const std::uint64_t tensor_bytes = header_.total_bytes - header_.head_bytes;
  if (tensor_bytes >= Lender::kLeastBytes && wants_loans()) {
    if (tensor_bytes > kMostAtOnce) return false;
    const std::uint64_t records_bytes = static_cast<std::uint64_t>(count - heads) * sizeof(LoanRecord);
    if (has_room(header_.head_bytes + records_bytes) && lend(heads)) return true;
  }
  return has_room(header_.total_bytes);
}

void QueueWriter::write(std::uint64_t fingerprint) {
  begin_message(fingerprint);
  resume(0);
}

void QueueWriter::drop() {
  if (header_.lent != 0) lender_->take_back(loans_);
}

void QueueWriter::take_in(const Piece* pieces, int count, int heads) {
  pieces_.assign(pieces, pieces + count);
  header_.head_bytes = header_.total_bytes = header_.lent = 0;
  for (int head = 0; head < heads; ++head) header_.head_bytes += pieces[head].bytes;
  for (const Piece& piece : pieces_) header_.total_bytes += piece.bytes;
}

bool QueueWriter::wants_loans() const {
  const std::uint64_t readers = ((std::uint64_t{1} << shape_.readers) - 1) << 1;
  return lender_ != nullptr && (ends_->wants_loans.load(std::memory_order_relaxed) & readers) == readers;
}

bool QueueWriter::lend(int heads) {
  const std::uint64_t readers = ((std::uint64_t{1} << shape_.readers) - 1) << 1;
  const int tensors = static_cast<int>(pieces_.size()) - heads;
  if (header_.total_bytes - header_.head_bytes < Lender::kLeastBytes || !wants_loans()) return false;
  if (!lender_->lend(pieces_.data() + heads, tensors, readers, &loans_)) return false;
  header_.lent = loans_.size();
  pieces_.resize(static_cast<std::size_t>(heads));
  pieces_.push_back({loans_.data(), loans_.size() * sizeof(LoanRecord)});
  return true;
}

void QueueWriter::begin_message(std::uint64_t fingerprint) {
  piece_ = offset_ = 0;
  header_.magic = kMagic;
  header_.message += 1;
  header_.fingerprint = fingerprint;
  unfinished_ = true;
}

QueueStatus QueueWriter::resume(double timeout_s) {
  begin(timeout_s);
  while (unfinished_) {
    const std::uint64_t chunk = written_ + 1;
    const QueueStatus status = reuse(chunk);
    if (status != QueueStatus::kDone) return status;
    fill(slot(chunk));
    written_ = chunk;
    counter(0).publish(chunk, chunk);
  }
  return QueueStatus::kDone;
}

QueueStatus QueueWriter::reuse(std::uint64_t chunk) {
  if (chunk <= shape_.chunks || reusable_ >= chunk - shape_.chunks) return QueueStatus::kDone;
  std::uint64_t least = UINT64_MAX;
  for (int reader = 1; reader <= shape_.readers; ++reader) {
    const QueueStatus status = await(reader, chunk - shape_.chunks);
    if (status != QueueStatus::kDone) return status;
    least = std::min(least, counter(reader).read());
  }
  reusable_ = least;
  return QueueStatus::kDone;
}

bool QueueWriter::has_room(std::uint64_t bytes) {
  const std::uint64_t chunks = bytes == 0 ? 1 : (bytes - 1) / room() + 1;
  if (chunks > shape_.chunks) return false;
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
    if (offset_ < piece.bytes) return;
    ++piece_;
    offset_ = 0;
  }
  unfinished_ = false;
}

void QueueReader::want_loans(bool wanted) {
  if (wanted == wants_loans_) return;
  wants_loans_ = wanted;
  const std::uint64_t bit = std::uint64_t{1} << me_;
  if (wanted) ends_->wants_loans.fetch_or(bit, std::memory_order_relaxed);
  else ends_->wants_loans.fetch_and(~bit, std::memory_order_relaxed);
}

QueueStatus QueueReader::next(double timeout_s) {
  begin(timeout_s);
  if (bytes_left() != 0) return QueueStatus::kMalformed;
  const QueueStatus status = enter();
  if (status == QueueStatus::kDone && in_ring() == 0) release();
  return status;
}

QueueStatus QueueReader::enter() {
  const std::uint64_t chunk = read_ + 1;
  const QueueStatus status = await(0, chunk);
  if (status != QueueStatus::kDone) return status;
  ChunkHeader found;
  std::memcpy(&found, slot(chunk), sizeof found);
  const bool first = bytes_left() == 0;
  if (found.magic != kMagic || found.chunk != chunk || found.message != messages_ + (first ? 1 : 0) ||
      found.head_bytes > found.total_bytes || found.total_bytes > kMostBytes || found.lent > kMostLoans ||
      (!first && (found.total_bytes != header_.total_bytes || found.lent != header_.lent))) {
    return QueueStatus::kMalformed;
  }
  if (first) {
    const std::uint64_t tensor_bytes = found.total_bytes - found.head_bytes;
    if (found.lent != 0 && (tensor_bytes == 0 || arena_ == nullptr)) return QueueStatus::kMalformed;
    header_ = found;
    left_ = found.lent == 0 ? found.total_bytes : found.head_bytes;
    records_left_ = found.lent * sizeof(LoanRecord);
    lent_left_ = found.lent == 0 ? 0 : tensor_bytes;
    loans_.clear();
    loan_ = loan_offset_ = 0;
    ++messages_;
  }
  offset_ = 0;
  end_ = std::min<std::uint64_t>(room(), in_ring());
  in_chunk_ = true;
  return QueueStatus::kDone;
}

void QueueReader::release() {
  in_chunk_ = false;
  ++read_;
  counter(me_).publish(read_, read_);
}

bool QueueReader::is_next(const char* head, std::uint64_t bytes) const {
  return in_chunk_ && offset_ == 0 && header_.head_bytes == bytes && bytes <= end_ &&
         std::memcmp(here(), head, bytes) == 0;
}

QueueStatus QueueReader::read(const Piece* pieces, int count, double timeout_s) {
  begin(timeout_s);
  std::uint64_t wanted = 0;
  for (int index = 0; index < count; ++index) wanted += pieces[index].bytes;
  if (wanted > bytes_left()) return QueueStatus::kMalformed;
  for (int index = 0; index < count; ++index) {
    char* const to = static_cast<char*>(pieces[index].address);
    const std::uint64_t sent = std::min(left_, pieces[index].bytes), lent = pieces[index].bytes - sent;
    QueueStatus status = copy_out(to, sent, &left_);
    if (status == QueueStatus::kDone && lent != 0) status = copy_lent(to == nullptr ? to : to + sent, lent);
    if (status != QueueStatus::kDone) return status;
  }
  return QueueStatus::kDone;
}

QueueStatus QueueReader::copy_out(char* to, std::uint64_t bytes, std::uint64_t* left) {
  for (std::uint64_t done = 0; done < bytes;) {
    if (!in_chunk_) {
      const QueueStatus status = enter();
      if (status != QueueStatus::kDone) return status;
    }
    const std::uint64_t part = std::min(end_ - offset_, bytes - done);
    if (to != nullptr) std::memcpy(to + done, here(), part);
    done += part;
    offset_ += part;
    *left -= part;
    if (offset_ == end_) release();
  }
  return QueueStatus::kDone;
}

QueueStatus QueueReader::copy_lent(char* to, std::uint64_t bytes) {
  want_loans(false);
  const QueueStatus status = find_loans();
  if (status != QueueStatus::kDone) return status;
  for (std::uint64_t done = 0; done < bytes;) {
    const Loan& loan = loans_[loan_];
    const std::uint64_t part = std::min(loan.bytes - loan_offset_, bytes - done);
    if (to != nullptr) std::memcpy(to + done, loan.data + loan_offset_, part);
    done += part;
    loan_offset_ += part;
    lent_left_ -= part;
    if (loan_offset_ < loan.bytes) continue;
    loan.give_back();
    ++loan_;
    loan_offset_ = 0;
  }
  return QueueStatus::kDone;
}

QueueStatus QueueReader::find_loans() {
  if (records_left_ == 0) return QueueStatus::kDone;
  std::vector<LoanRecord> records(header_.lent);
  const QueueStatus status = copy_out(reinterpret_cast<char*>(records.data()), records_left_, &records_left_);
  if (status != QueueStatus::kDone) return status;
  std::uint64_t bytes = 0;
  for (const LoanRecord& record : records) {
    char* const data = record.bytes == 0 ? nullptr : arena_->at(record.block, record.bytes);
    char* const word =
        record.word % sizeof(std::uint64_t) != 0 ? nullptr : arena_->at(record.word, sizeof(std::uint64_t));
    if (data == nullptr || word == nullptr) return QueueStatus::kMalformed;
    loans_.push_back(
        {data, record.bytes, reinterpret_cast<std::atomic<std::uint64_t>*>(word), std::uint64_t{1} << me_});
    bytes += record.bytes;
  }
  return bytes == lent_left_ ? QueueStatus::kDone : QueueStatus::kMalformed;
}

QueueStatus QueueReader::borrow(std::vector<Loan>* loans, double timeout_s) {
  begin(timeout_s);
  loans->clear();
  if (!is_lent() || left_ != 0 || loan_ != 0 || loan_offset_ != 0) return QueueStatus::kDone;
  const QueueStatus status = find_loans();
  if (status != QueueStatus::kDone) return status;
  loans->swap(loans_);
  lent_left_ = 0;
  return QueueStatus::kDone;
}

}  // namespace parallel_state
