// Collectives and transfers of CPU tensors on a group that shared memory serves: from tensors to pointers, and results.
// Who calls them, through torch's dispatcher or past it, is the business of bindings.cpp and direct.cpp.
//
// They need no lock of Python's, and all but `send` wait: on any thread. `out` is an undefined tensor, which becomes
// the result, or the caller's own, contiguous and of the result's sizes and dtype, which is filled. C++ exceptions are
// torch's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>

#include "handle.h"

namespace parallel_state {

using at::Tensor;
using std::string_view;
using Splits = at::OptionalSymIntArrayRef;  // none: all are equal

enum class Carried : int {
  kNo,      // shared memory doesn't: an unusual dtype or shape. Nothing has begun
  kFailed,  // it has begun, or was refused, and the op's Python twin finds out why
  kYes
};

Carried all_reduce(Served& served, const Tensor& x, string_view op, Tensor* out);
Carried all_reduce_in_place(Served& served, const Tensor& x, string_view op);
Carried all_reduce_add_rms_norm(Served& served, const Tensor& x, const Tensor& residual, const Tensor& weight,
                                double eps, Tensor* out, Tensor* after);
Carried all_gather(Served& served, const Tensor& x, std::int64_t dim, Tensor* out);
Carried all_gatherv(Served& served, const Tensor& x, std::int64_t dim, c10::SymIntArrayRef sizes, Tensor* out);
Carried reduce_scatter(Served& served, const Tensor& x, std::int64_t dim, string_view op, Tensor* out);
Carried reduce_scatterv(Served& served, const Tensor& x, std::int64_t dim, c10::SymIntArrayRef sizes, string_view op,
                        Tensor* out);
Carried all_to_all(Served& served, const Tensor& x, Splits output_splits, Splits input_splits, Tensor* out);
// `out` stays undefined on the ranks that get nothing.
Carried gather(Served& served, const Tensor& x, std::int64_t dim, std::int64_t dst, Tensor* out);
// `x` is undefined on the ranks that give nothing.
Carried scatter(Served& served, const Tensor& x, at::IntArrayRef sizes, at::ScalarType dtype, std::int64_t dim,
                std::int64_t src, Tensor* out);
Carried broadcast(Served& served, const Tensor& x, std::int64_t src, Tensor* out);
Carried broadcast_in_place(Served& served, const Tensor& x, std::int64_t src);
Carried barrier(Served& served);
// To and from one rank, in the order of the calls. A tensor that doesn't fit into the queue at once is left to the
// twin.
Carried send(Served& served, const Tensor& x, std::int64_t dst);
Carried receive(Served& served, at::IntArrayRef sizes, at::ScalarType dtype, std::int64_t src, Tensor* out);

// A tensor in memory that all ranks map, which goes back there with it; an ordinary one where there is no room.
Tensor symmetric(const std::shared_ptr<Handle>& group, at::IntArrayRef sizes, at::ScalarType dtype);
// The same for a large one, an ordinary one for another, or without a group.
Tensor empty(const std::shared_ptr<Handle>& group, at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace parallel_state
