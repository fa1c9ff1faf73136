// Messages from one rank to one or more others on the same host, through a ring of chunks that all of them have mapped.
//
// A message is a head (what tells the readers how to take in the rest) and a body; it may be of any size and lies in as
// many chunks as it takes, one after the other. Chunks are counted from 1, and chunk n lies in slot (n - 1) % chunks.
// The writer publishes the number of the last chunk that it wrote; each reader publishes the number of the last one
// that it has read. Nothing else is shared, and both numbers only grow:
//
//   the writer writes chunk n   once every reader has published n - chunks   (it has read what lay in that slot)
//   a reader reads chunk n      once the writer has published n
//
// So no flag is ever reset, the writer fills chunk n + 1 while readers empty chunk n, nothing is dropped, and a reader
// that finds another number in a chunk than the one it is at knows of the damage. Readers don't know of each other.
// tests/internals/queue_model.py explores the steps of this protocol one by one, under the names given here.
//
// Not thread-safe: one call at a time on a writer, and on a reader. The caller owns the memory.
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

// The form of a ring, equal on all sides. Zero bytes are an empty ring.
struct RingShape {
  std::uint64_t chunk_bytes;  // a multiple of 64
  std::uint64_t chunks;
  int readers;  // 1 … 63

  // Control: who has left and who wants loans, the writer's counter, and one for each reader.
  std::size_t control_bytes() const { return (2 + static_cast<std::size_t>(readers)) * sizeof(Counter); }
  std::size_t data_bytes() const { return chunk_bytes * chunks; }
};

// What lies before a chunk's part of its message. The same for all chunks of one, but for `chunk`.
struct alignas(64) ChunkHeader {
  std::uint64_t magic;
  std::uint64_t chunk;
  std::uint64_t message;  // counted from 1
  std::uint64_t total_bytes;
  std::uint64_t head_bytes;
  std::uint64_t fingerprint;  // what the message is, as far as the queue's users must agree on it
  std::uint64_t lent;         // tensors of which the records of their loans are in the ring, after the head; else 0
};
static_assert(sizeof(ChunkHeader) == 64, "one cache line");

// What an end of a queue that was opened by the C interface fills in at each call: the words of native.QueueReport.
struct QueueReport {
  std::int64_t suspect = -1;     // rank, after a failure
  std::int64_t total_bytes = 0;  // of the message that `ps_queue_take` found
  std::int64_t head_bytes = 0;
  std::int64_t fingerprint = 0;
  std::int64_t left_bytes = 0;  // how many of its bytes weren't read yet
  std::int64_t reporter = -1;   // who gave up, after kGivenUp, and with which status of group.h
  std::int64_t reason = 0;
  // Of calls that come past Python, see open_queue.h:
  std::atomic<std::int64_t> reserved{0};  // not 0: Python is to have the next message; written for Python
  std::int64_t found = 0;                 // 1: the next message has been looked at, and left to Python
  std::int64_t broken = 0;                // the status of a call that failed; each later one has it
  std::int64_t elapsed_us = 0;            // how long that call took
  std::atomic<std::int64_t> holder{0};    // the thread whose turn it is, by pthread_self; 0 for none
};

// One side of a ring: its counters, and whether the others are still there.
class RingEnd : public Losses {
 public:
  // `ranks[0]` is the writer's, the others are the readers'; `losses` tells which of the group's live. `me` is an
  // index.
  RingEnd(void* control, void* data, RingShape shape, const int* ranks, int me, const Losses& losses,
          WaitPolicy policy);

  // Tells the other ends that this one writes or reads no more, and a call that another thread is in to return.
  void leave();
  int writer() const { return ranks_[0]; }        // a rank
  int suspect() const { return suspect_; }        // whose death or absence the last call failed with: a rank
  const Loss& given_up() const { return lost_; }  // who gave up, after kGivenUp, and why
  // What the last call, which timed out, waited for; null before.
  Counter* awaited(std::uint64_t* target) const { return *target = awaited_target_, awaited_; }

 protected:
  struct alignas(128) Ends {  // a bit each, by index
    std::atomic<std::uint64_t> left{0};
    std::atomic<std::uint64_t> wants_loans{0};  // no more than a hint: it orders nothing
  };

  Counter& counter(int index) { return counters_[index]; }
  char* slot(std::uint64_t chunk) const { return data_ + (chunk - 1) % shape_.chunks * shape_.chunk_bytes; }
  std::size_t room() const { return shape_.chunk_bytes - sizeof(ChunkHeader); }
  // By when the call that begins must be done; without a timeout it waits for nobody.
  void begin(double timeout_s) {
    deadline_.set(timeout_s);
    waits_ = timeout_s > 0;
  }
  QueueStatus await(int index, std::uint64_t target);

  const RingShape shape_;
  const int me_;
  Ends* const ends_;

 private:
  // Of the end with this index, the writer being 0.
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

  // Lends large tensors to readers that all want it, from now on.
  void set_lender(Lender* lender) { lender_ = lender; }

  // Takes in the message of these pieces, the first `heads` of which are its head and the others its tensors; writes
  // what fits within the timeout. After kTimedOut `resume` writes on: the pieces must stay as they are until kDone.
  QueueStatus send(const Piece* pieces, int count, int heads, std::uint64_t fingerprint, double timeout_s);
  QueueStatus resume(double timeout_s);
  // Takes in such a message if it can be written at once; false, and nothing was done, where it can't. Then either
  // `write`, which waits for nobody and can't fail, or `drop` it.
  bool fit(const Piece* pieces, int count, int heads);
  void write(std::uint64_t fingerprint);
  void drop();
  // Whether so many bytes can be written at once, if no message is half written.
  bool has_room(std::uint64_t bytes);
  std::uint64_t written() const { return written_; }  // chunks so far

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
  std::size_t piece_ = 0;  // where in the message the next chunk begins
  std::uint64_t offset_ = 0;
  ChunkHeader header_{};
  bool unfinished_ = false;
  std::uint64_t written_ = 0;   // the last chunk that was published
  std::uint64_t reusable_ = 0;  // a chunk that all readers are known to have read
};

class QueueReader : public RingEnd {
 public:
  using RingEnd::RingEnd;

  // Where the writer lends from; without it its loans are malformed.
  void set_lender(Windows* arena) { arena_ = arena; }
  // Whether the writer may lend tensors. One that is read instead ends that.
  void want_loans(bool wanted);

  // Waits for the next message and tells its form; the one before must have been read to its end.
  QueueStatus next(double timeout_s);
  // Copies the message's next bytes, and waits for those that are still to come. A null address passes over them.
  // What was lent is copied as what was sent, and given back.
  QueueStatus read(const Piece* pieces, int count, double timeout_s);

  // The tensors of the message, whose head has been read, where they are; the caller gives them back. Empty where they
  // weren't lent, or some have been read.
  QueueStatus borrow(std::vector<Loan>* loans, double timeout_s);
  bool is_lent() const { return lent_left_ != 0; }

  // Whether the message that `next` has found begins with this head, all of which lies in its first chunk.
  bool is_next(const char* head, std::uint64_t bytes) const;

  // Whether what is left of the message lies in the chunk that is being read.
  bool is_at_hand() const { return bytes_left() == 0 || (in_chunk_ && end_ - offset_ == bytes_left()); }

  const ChunkHeader& header() const { return header_; }
  // The bytes of the chunk that is being read; they stay until `read` has gone past them.
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
  std::vector<Loan> loans_;  // of the message, once their records were read; given back one by one
  std::size_t loan_ = 0;     // the next, and where in it
  std::uint64_t loan_offset_ = 0;
  ChunkHeader header_{};            // of the message that is being read
  std::uint64_t left_ = 0;          // bytes of it in the ring that weren't read yet,
  std::uint64_t records_left_ = 0;  // of the records of its loans, which follow those,
  std::uint64_t lent_left_ = 0;     // and of what is lent
  std::uint64_t offset_ = 0;        // in the chunk
  std::uint64_t end_ = 0;
  bool in_chunk_ = false;
  std::uint64_t read_ = 0;  // the last chunk that was given back
  std::uint64_t messages_ = 0;
};

}  // namespace parallel_state
