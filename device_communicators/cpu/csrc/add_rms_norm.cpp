#include <algorithm>

#include "host_group.h"

namespace parallel_state {

void add_and_norm(const AddRmsNorm& norm, std::size_t first_row, std::size_t rows) {
  const AddRmsNormFunction function = add_rms_norm_function(norm.dtype);
  const std::size_t row_bytes = norm.hidden * size_of(norm.dtype);
  for (std::size_t row = first_row; row < first_row + rows; ++row) {
    const std::size_t at = row * row_bytes;
    char* const out = static_cast<char*>(norm.out) + at;
    function(out, static_cast<char*>(norm.residual_out) + at, out, static_cast<const char*>(norm.residual) + at,
             norm.weight, norm.hidden, norm.eps);
  }
}

Status HostGroup::all_reduce_add_rms_norm(const AddRmsNorm& norm, double timeout_s) {
  if (add_rms_norm_function(norm.dtype) == nullptr) return Status::kUnsupported;
  const std::size_t row_bytes = norm.hidden * size_of(norm.dtype);
  begin(Kind::kAllReduceAddRmsNorm, norm.rows * norm.hidden, Method::kAllReduceAddRmsNorm, timeout_s,
        mixed(norm.hidden) + static_cast<std::uint64_t>(norm.dtype));
  const std::size_t chunk = std::max<std::size_t>(1, tuning_.large_slot_bytes / std::max<std::size_t>(1, row_bytes));
  for (std::size_t start = 0; start < norm.rows; start += chunk) {
    const std::size_t length = std::min(chunk, norm.rows - start), at = start * row_bytes;
    RETURN_IF_FAILED(reduce_all(static_cast<char*>(norm.out) + at, static_cast<const char*>(norm.in) + at,
                                length * norm.hidden, norm.dtype, ReduceOp::kSum));
    add_and_norm(norm, start, length);
  }
  return Status::kDone;
}

}  // namespace parallel_state
