#pragma once

#include <algorithm>
#include <cstddef>

#include "copy.h"

namespace parallel_state {

// `start` counts the rows' bytes without gaps.
inline void copy_rows(char* out, std::size_t row_bytes, std::size_t stride_bytes, const char* in, std::size_t start,
                      std::size_t length) {
  while (length != 0) {
    const std::size_t row = start / row_bytes, column = start % row_bytes;
    const std::size_t piece = std::min(length, row_bytes - column);
    copy(out + row * stride_bytes + column, in, piece);
    in += piece;
    start += piece;
    length -= piece;
  }
}

inline void collect_rows(char* out, const char* in, std::size_t row_bytes, std::size_t stride_bytes, std::size_t start,
                         std::size_t length) {
  while (length != 0) {
    const std::size_t row = start / row_bytes, column = start % row_bytes;
    const std::size_t piece = std::min(length, row_bytes - column);
    copy(out, in + row * stride_bytes + column, piece);
    out += piece;
    start += piece;
    length -= piece;
  }
}

}  // namespace parallel_state
