// Readers use tensors of a message in their sender's arena. A loan's word has a bit per reader, which the reader clears
// (release) when done. The sender takes back blocks whose words are zero (acquire). A killed reader's bits stay set
// until its group ends.
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

struct LoanRecord {
  std::uint64_t block;
  std::uint64_t bytes;
  std::uint64_t word;
};

struct Loan {
  char* data;
  std::uint64_t bytes;
  std::atomic<std::uint64_t>* word;
  std::uint64_t bit;

  void give_back() const { word->fetch_and(~bit, std::memory_order_release); }
};

constexpr std::uint64_t kMostLoans = 4096;  // per message, and per rank at once

// Thread-safe.
class Lender {
 public:
  static constexpr std::uint64_t kLeastBytes = 128 << 10;
  static constexpr std::uint64_t kMostBytes = 256 << 20;

  Lender(Arena& arena, const Windows& windows) : arena_(arena), windows_(windows) {}

  // False, with nothing lent, if the arena is full or too much is lent.
  bool lend(const Piece* tensors, int count, std::uint64_t readers, std::vector<LoanRecord>* records);
  void take_back(const std::vector<LoanRecord>& records);
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
  std::uint64_t bytes_ = 0;
  std::size_t words_ = 0;
  std::vector<Word*> free_words_;
  std::vector<Lent> lent_;
};

}  // namespace parallel_state
