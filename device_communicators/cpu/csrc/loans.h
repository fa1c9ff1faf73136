// Tensors of messages that readers use where their sender has put them: loans.
//
// The sender copies a tensor into a block of its own arena, which all ranks map, and tells in the message where that
// is. A word of shared memory beside it has a bit for each reader that has the block, which that one clears when it
// needs it no more. The sender looks at the words when it lends again, and takes back the blocks whose words are zero.
// So nobody waits for a reader; while many blocks are lent, or the arena is full, tensors go through the ring.
//
//   the sender copies, sets the word, publishes the chunk    a reader that has seen the chunk finds both
//   a reader clears its bit, release                         the sender that finds zero, acquire, may write again
//
// The words of a reader that was killed stay: its group fails with it, and gives all its memory back at its end.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "arena.h"
#include "windows.h"

namespace parallel_state {

struct Piece {
  void* address;
  std::uint64_t bytes;
};

// What a message tells of a tensor that is lent: offsets in the sender's arena.
struct LoanRecord {
  std::uint64_t block;
  std::uint64_t bytes;
  std::uint64_t word;
};

// A tensor that a reader has.
struct Loan {
  char* data;
  std::uint64_t bytes;
  std::atomic<std::uint64_t>* word;
  std::uint64_t bit;

  void give_back() const { word->fetch_and(~bit, std::memory_order_release); }
};

constexpr std::uint64_t kMostLoans = 4096;  // of a message, and of a rank at once

// The loans of one rank. Thread-safe.
class Lender {
 public:
  // Of messages with less, what a loan takes beside the copy is more than a copy out of the ring does.
  static constexpr std::uint64_t kLeastBytes = 128 << 10;
  // What readers may hold of one sender.
  static constexpr std::uint64_t kMostBytes = 256 << 20;

  // Both outlive it.
  Lender(Arena& arena, const Windows& windows) : arena_(arena), windows_(windows) {}

  // Copies tensors into blocks that those readers have from then on whose bits are set. False, and nothing is lent,
  // where the arena has no room, or readers have too much.
  bool lend(const Piece* tensors, int count, std::uint64_t readers, std::vector<LoanRecord>* records);
  // Of a message that isn't sent.
  void take_back(const std::vector<LoanRecord>& records);
  // Takes back what readers have given back.
  void collect();

 private:
  using Word = std::atomic<std::uint64_t>;
  struct Lent {
    void* block;
    std::uint64_t bytes;
    Word* word;
  };

  bool reserve(const Piece* tensors, int count, std::uint64_t readers, std::vector<Lent>* made);
  Word* take_word();
  void collect_locked();

  Arena& arena_;
  const Windows& windows_;
  std::mutex mutex_;
  std::uint64_t bytes_ = 0;  // lent
  std::size_t words_ = 0;    // made so far
  std::vector<Word*> free_words_;
  std::vector<Lent> lent_;
};

}  // namespace parallel_state
