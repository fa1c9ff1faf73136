#include "loans.h"

#include <new>

#include "copy.h"

namespace parallel_state {

bool Lender::lend(const Piece* tensors, int count, std::uint64_t readers, std::vector<LoanRecord>* records) {
  std::vector<Lent> made;
  if (!reserve(tensors, count, readers, &made)) return false;
  records->clear();
  for (int index = 0; index < count; ++index) {
    const Lent& each = made[static_cast<std::size_t>(index)];
    copy(each.block, tensors[index].address, each.bytes);
    records->push_back(
        {windows_.offset_of(each.block, each.bytes), each.bytes, windows_.offset_of(each.word, sizeof(Word))});
  }
  return true;
}

bool Lender::reserve(const Piece* tensors, int count, std::uint64_t readers, std::vector<Lent>* made) {
  const std::lock_guard<std::mutex> lock(mutex_);
  collect_locked();
  std::uint64_t bytes = 0;
  for (int index = 0; index < count; ++index) bytes += tensors[index].bytes;
  if (bytes > kMostBytes - bytes_ || lent_.size() + static_cast<std::size_t>(count) > kMostLoans) return false;
  for (int index = 0; index < count; ++index) {
    Word* const word = take_word();
    void* const block = word == nullptr ? nullptr : arena_.allocate(tensors[index].bytes);
    if (block == nullptr) {
      if (word != nullptr) free_words_.push_back(word);
      for (const Lent& each : *made) {
        arena_.release(each.block);
        free_words_.push_back(each.word);
      }
      return false;
    }
    word->store(readers, std::memory_order_relaxed);  // published with the chunk
    made->push_back({block, tensors[index].bytes, word});
  }
  lent_.insert(lent_.end(), made->begin(), made->end());
  bytes_ += bytes;
  return true;
}

// For the arena's lifetime.
Lender::Word* Lender::take_word() {
  if (free_words_.empty()) {
    auto* const page = static_cast<char*>(words_ < kMostLoans ? arena_.allocate(kPage) : nullptr);
    if (page == nullptr) return nullptr;
    for (std::size_t at = 0; at < kPage; at += sizeof(Word)) free_words_.push_back(new (page + at) Word(0));
    words_ += kPage / sizeof(Word);
  }
  Word* const word = free_words_.back();
  free_words_.pop_back();
  return word;
}

void Lender::take_back(const std::vector<LoanRecord>& records) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const LoanRecord& record : records) {
    for (const Lent& each : lent_) {
      if (windows_.offset_of(each.word, sizeof(Word)) == record.word) each.word->store(0, std::memory_order_relaxed);
    }
  }
  collect_locked();
}

void Lender::collect() {
  const std::lock_guard<std::mutex> lock(mutex_);
  collect_locked();
}

void Lender::collect_locked() {
  for (std::size_t index = 0; index < lent_.size();) {
    const Lent each = lent_[index];
    if (each.word->load(std::memory_order_acquire) != 0) {
      ++index;
      continue;
    }
    arena_.release(each.block);
    bytes_ -= each.bytes;
    free_words_.push_back(each.word);
    lent_[index] = lent_.back();
    lent_.pop_back();
  }
}

}  // namespace parallel_state
