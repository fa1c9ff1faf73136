// all_reduce, and what follows it in a transformer's layer, while the sum is still in cache.
#include <algorithm>

#include "group.h"

namespace parallel_state {
namespace {

struct Rows {
  const AddRmsNorm& norm;
  AddRmsNormFunction function;
  std::size_t row_bytes;

  // From the sum in `out`.
  void finish(std::size_t row) const {
    const std::size_t at = row * row_bytes;
    char* const out = static_cast<char*>(norm.out) + at;
    function(out, static_cast<char*>(norm.residual_out) + at, out, static_cast<const char*>(norm.residual) + at,
             norm.weight, norm.hidden, norm.eps);
  }
};

}  // namespace

// By chunks of rows that stay in the second-level cache. That each rank does its rows only, and the others copy them,
// would move two tensors between the cores instead of one sum, and moving is what costs.
Status Group::all_reduce_add_rms_norm(const AddRmsNorm& norm, double timeout_s) {
  const Rows rows{norm, add_rms_norm_function(norm.dtype), norm.hidden * size_of(norm.dtype)};
  if (rows.function == nullptr) return Status::kUnsupported;
  begin(timeout_s);
  const std::uint64_t call = call_of(Kind::kAllReduceAddRmsNorm, norm.rows * norm.hidden, Method::kAllReduceAddRmsNorm,
                                     mixed(norm.hidden) + static_cast<std::uint64_t>(norm.dtype));
  const std::size_t chunk =
      std::max<std::size_t>(1, tuning_.large_slot_bytes / std::max<std::size_t>(1, rows.row_bytes));
  for (std::size_t start = 0; start < norm.rows; start += chunk) {
    const std::size_t length = std::min(chunk, norm.rows - start), at = start * rows.row_bytes;
    RETURN_IF_FAILED(reduce_all(static_cast<char*>(norm.out) + at, static_cast<const char*>(norm.in) + at,
                                length * norm.hidden, norm.dtype, ReduceOp::kSum, call));
    for (std::size_t row = start; row < start + length; ++row) rows.finish(row);
  }
  return Status::kDone;
}

}  // namespace parallel_state
