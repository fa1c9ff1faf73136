// The sizes of an all_to_all's blocks: what each rank sends to each, and what it expects from each. A rank whose blocks
// have one size puts it into its record; others publish a row of all their sizes. So every rank finds the same misfit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "call.h"

namespace parallel_state {

class BlockSizes {
 public:
  void begin(int rank, int size, const std::size_t* out_bytes, const std::size_t* in_bytes) {
    size_ = static_cast<std::size_t>(size);
    each_ = in_bytes[0];
    const auto is_each = [this](std::size_t bytes) { return bytes == each_; };
    is_even_ = std::all_of(in_bytes, in_bytes + size, is_each) && std::all_of(out_bytes, out_bytes + size, is_each);
    is_same_ = is_even_;
    starts_.assign(2 * size_, 0);
    for (std::size_t to = 1; to < size_; ++to) {
      starts_[to] = starts_[to - 1] + in_bytes[to - 1];
      starts_[size_ + to] = starts_[size_ + to - 1] + out_bytes[to - 1];
    }
    if (is_even_) return;
    rows_.resize(2 * size_ * size_);
    std::copy(out_bytes, out_bytes + size, std::copy(in_bytes, in_bytes + size, row_of(rank)));
  }

  bool is_even() const { return is_even_; }  // this rank's
  bool is_same() const { return is_same_; }  // all ranks' so far are even, and equal
  std::size_t each() const { return each_; }
  std::uint64_t even_sizes() const { return is_even_ ? each_ + 1 : 0; }  // of the record

  std::size_t in_start(int rank) const { return starts_[static_cast<std::size_t>(rank)]; }
  std::size_t out_start(int rank) const { return starts_[size_ + static_cast<std::size_t>(rank)]; }

  std::size_t row_bytes() const { return 2 * size_ * sizeof(std::uint64_t); }
  std::uint64_t* row_of(int rank) { return rows_.data() + 2 * size_ * static_cast<std::size_t>(rank); }
  // Another rank's sizes differ from this one's.
  void note_difference() {
    if (std::exchange(is_same_, false)) rows_.assign(2 * size_ * size_, each_);
  }
  void fill(int rank, std::uint64_t bytes) { std::fill_n(row_of(rank), 2 * size_, bytes); }

  // Compares the rows of ranks that `has_row`.
  template <typename HasRow>
  bool find_misfit(HasRow has_row, Misfit* found) {
    const int size = is_same_ ? 0 : static_cast<int>(size_);
    for (int from = 0; from < size; ++from) {
      for (int to = 0; to < size; ++to) {
        if (!has_row(from) || !has_row(to)) continue;
        const std::uint64_t sent = row_of(from)[to], expected = row_of(to)[size + from];
        if (sent == expected) continue;
        *found = {from, to, sent, expected};
        return true;
      }
    }
    return false;
  }

 private:
  std::size_t size_ = 0, each_ = 0;
  bool is_even_ = false, is_same_ = false;
  std::vector<std::uint64_t> rows_;
  std::vector<std::size_t> starts_;  // of the blocks in `in`, then in `out`
};

}  // namespace parallel_state
