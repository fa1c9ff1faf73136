// Messages from one rank to others on the same host, through a ring of chunks in shared memory. Chunk n (from 1) is in
// slot (n - 1) % chunks. The writer publishes the last chunk that it wrote, each reader the last that it read:
//
// the writer writes chunk n   once every reader has published n - chunks
// a reader reads chunk n      once the writer has published n
//
// tests/native/queue_explorer.cpp explores this protocol. Not thread-safe: one call at a time per end. The caller owns
// the memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "liveness.h"
#include "loans.h"
#include "wait.h"

namespace parallel_state {

enum class QueueStatus : int {
  kDone = 0,
  kTimedOut = 1,
  kPeerDied = 2,
  kMalformed = 3,
  kInterrupted = 4,
  kGivenUp = 5
};

// Equal on all sides. Zero bytes are an empty ring.
struct RingShape {
  std::uint64_t chunk_bytes;  // a multiple of 64
  std::uint64_t chunks;
  int readers;  // 1 … 63

  std::size_t control_bytes() const { return (2 + static_cast<std::size_t>(readers)) * sizeof(Counter); }
  std::size_t data_bytes() const { return chunk_bytes * chunks; }
};

// Only `chunk` differs between a message's chunks.
struct alignas(64) ChunkHeader {
  std::uint64_t magic;
  std::uint64_t chunk;
  std::uint64_t message;
  std::uint64_t total_bytes;
  std::uint64_t head_bytes;
  std::uint64_t fingerprint;  // must be equal on all sides
  std::uint64_t lent;         // lent tensors, whose records follow the head
};
static_assert(sizeof(ChunkHeader) == 64, "one cache line");

// The words of native.QueueReport.
struct QueueReport {
  std::int64_t suspect = -1;
  std::int64_t total_bytes = 0;  // these four: set by `ps_queue_take`
  std::int64_t head_bytes = 0;
  std::int64_t fingerprint = 0;
  std::int64_t left_bytes = 0;
  std::int64_t reporter = -1;  // after kGivenUp, with its status of group.h
  std::int64_t reason = 0;
  std::atomic<std::int64_t> reserved{0};  // nonzero: the next message is Python's
  std::int64_t found = 0;
  std::int64_t broken = 0;  // status of a failed call
  std::int64_t elapsed_us = 0;
  std::atomic<std::int64_t> holder{0};  // pthread_self in the turn; 0: none
};

class RingEnd : public Losses {
 public:
  // `ranks[0]` is the writer. `me`: an index in `ranks`.
  RingEnd(void* control, void* data, RingShape shape, const int* ranks, int me, const Losses& losses,
          WaitPolicy policy);

  // Also makes a call of another thread return.
  void leave();
  int writer() const { return ranks_[0]; }
  int suspect() const { return suspect_; }
  const Loss& given_up() const { return lost_; }
  Counter* awaited(std::uint64_t* target) const { return *target = awaited_target_, awaited_; }

 protected:
  struct alignas(128) Ends {  // one bit per index
    std::atomic<std::uint64_t> left{0};
    std::atomic<std::uint64_t> wants_loans{0};  // a hint; orders nothing
  };

  Counter& counter(int index) { return counters_[index]; }
  char* slot(std::uint64_t chunk) const { return data_ + (chunk - 1) % shape_.chunks * shape_.chunk_bytes; }
  std::size_t room() const { return shape_.chunk_bytes - sizeof(ChunkHeader); }
  void begin(double timeout_s) {
    deadline_.set(timeout_s);
    waits_ = timeout_s > 0;
  }
  QueueStatus await(int index, std::uint64_t target);

  const RingShape shape_;
  const int me_;
  Ends* const ends_;

 private:
  Loss loss(int index) const override;

  Counter* counters_;
  char* data_;
  std::vector<int> ranks_;
  const Losses& losses_;
  WaitPolicy policy_;
  std::atomic<bool> leaving_{false};
  Deadline deadline_;
  bool waits_ = true;
  Counter* awaited_ = nullptr;
  std::uint64_t awaited_target_ = 0;
  int suspect_ = -1;
  Loss lost_;
};

class QueueWriter : public RingEnd {
 public:
  using RingEnd::RingEnd;

  void set_lender(Lender* lender) { lender_ = lender; }

  // After kTimedOut call `resume`; the pieces must stay unchanged until kDone.
  QueueStatus send(const Piece* pieces, int count, int heads, std::uint64_t fingerprint, double timeout_s);
  QueueStatus resume(double timeout_s);
  // False if the message can't be written at once. Else call either `write`, which doesn't wait or fail, or `drop`.
  bool fit(const Piece* pieces, int count, int heads);
  void write(std::uint64_t fingerprint);
  void drop();
  bool has_room(std::uint64_t bytes);
  std::uint64_t written() const { return written_; }

 private:
  void take_in(const Piece* pieces, int count, int heads);
  bool wants_loans() const;
  bool lend(int heads);
  void begin_message(std::uint64_t fingerprint);
  QueueStatus reuse(std::uint64_t chunk);
  void fill(char* slot);

  Lender* lender_ = nullptr;
  std::vector<LoanRecord> loans_;
  std::vector<Piece> pieces_;
  std::size_t piece_ = 0;
  std::uint64_t offset_ = 0;
  ChunkHeader header_{};
  bool unfinished_ = false;
  std::uint64_t written_ = 0;
  std::uint64_t reusable_ = 0;
};

class QueueReader : public RingEnd {
 public:
  using RingEnd::RingEnd;

  void set_lender(Windows* arena) { arena_ = arena; }
  // Lets the writer lend tensors, until one is read instead of borrowed.
  void want_loans(bool wanted);

  QueueStatus next(double timeout_s);
  // A null address skips bytes. Lent tensors are copied and given back.
  QueueStatus read(const Piece* pieces, int count, double timeout_s);

  // After the head was read; the caller gives the loans back. Empty if none were lent or some have been read.
  QueueStatus borrow(std::vector<Loan>* loans, double timeout_s);
  bool is_lent() const { return lent_left_ != 0; }

  bool is_next(const char* head, std::uint64_t bytes) const;

  bool is_at_hand() const { return bytes_left() == 0 || (in_chunk_ && end_ - offset_ == bytes_left()); }

  const ChunkHeader& header() const { return header_; }
  const char* here() const { return slot(read_ + 1) + sizeof(ChunkHeader) + offset_; }
  std::uint64_t bytes_left() const { return left_ + lent_left_; }

 private:
  std::uint64_t in_ring() const { return left_ + records_left_; }
  QueueStatus enter();
  void release();
  QueueStatus copy_out(char* to, std::uint64_t bytes, std::uint64_t* left);
  QueueStatus copy_lent(char* to, std::uint64_t bytes);
  QueueStatus find_loans();

  Windows* arena_ = nullptr;
  bool wants_loans_ = false;
  std::vector<Loan> loans_;
  std::size_t loan_ = 0;
  std::uint64_t loan_offset_ = 0;
  ChunkHeader header_{};
  std::uint64_t left_ = 0;          // unread bytes of the message in the ring,
  std::uint64_t records_left_ = 0;  // of the records of its loans, which follow,
  std::uint64_t lent_left_ = 0;     // and of the lent tensors
  std::uint64_t offset_ = 0;
  std::uint64_t end_ = 0;
  bool in_chunk_ = false;
  std::uint64_t read_ = 0;
  std::uint64_t messages_ = 0;
};

}  // namespace parallel_state
