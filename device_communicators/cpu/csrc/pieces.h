#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "loans.h"

namespace parallel_state {

class Pieces {
 public:
  void clear() {
    pieces_.clear();
    at_ = 0;
    bytes_left_ = 0;
  }
  void add(void* address, std::uint64_t bytes) {
    if (bytes == 0) return;
    pieces_.push_back({address, bytes});
    bytes_left_ += bytes;
  }

  std::uint64_t bytes_left() const { return bytes_left_; }
  int next(iovec* places, int most) const {
    int count = 0;
    for (std::size_t at = at_; at < pieces_.size() && count < most; ++at) {
      places[count++] = {pieces_[at].address, pieces_[at].bytes};
    }
    return count;
  }
  void pass(std::uint64_t bytes) {
    bytes_left_ -= bytes;
    while (bytes > 0) {
      Piece& piece = pieces_[at_];
      const std::uint64_t part = std::min(bytes, piece.bytes);
      piece.address = static_cast<char*>(piece.address) + part;
      piece.bytes -= part;
      bytes -= part;
      if (piece.bytes == 0) ++at_;
    }
  }
  std::uint64_t fill(const char* from, std::uint64_t bytes) {
    const std::uint64_t size = std::min(bytes, bytes_left_);
    for (std::uint64_t done = 0; done < size;) {
      const Piece& piece = pieces_[at_];
      const std::uint64_t part = std::min(size - done, piece.bytes);
      std::memcpy(piece.address, from + done, part);
      done += part;
      pass(part);
    }
    return size;
  }

 private:
  std::vector<Piece> pieces_;
  std::size_t at_ = 0;
  std::uint64_t bytes_left_ = 0;
};

template <typename Use>
void for_range(const std::vector<Piece>& pieces, std::uint64_t begin, std::uint64_t end, Use use) {
  std::uint64_t start = 0;
  for (const Piece& piece : pieces) {
    const std::uint64_t from = std::max(begin, start), to = std::min(end, start + piece.bytes);
    if (from < to) use(static_cast<char*>(piece.address) + (from - start), to - from);
    start += piece.bytes;
  }
}

}  // namespace parallel_state
