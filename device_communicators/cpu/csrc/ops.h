// Collectives and transfers on a compiled group, without the interpreter lock. An undefined `out` becomes the result;
// another has the result's form. C++ exceptions are torch's own.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <string_view>

#include "handle.h"

namespace parallel_state {

using at::Tensor;
using std::string_view;
using Splits = at::OptionalSymIntArrayRef;  // none: equal splits

inline bool wants_gradient(const Tensor& x) {
  if (x.unsafeGetTensorImpl()->autograd_meta() == nullptr) return false;
  return (at::GradMode::is_enabled() && x.requires_grad()) || x._fw_grad(/*level=*/0).defined();
}

enum class Carried : int {
  kNo,      // nothing has begun
  kFailed,  // the op's Python kernel finds the cause
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
Carried gather(Served& served, const Tensor& x, std::int64_t dim, std::int64_t dst, Tensor* out);
Carried scatter(Served& served, const Tensor& x, at::IntArrayRef sizes, at::ScalarType dtype, std::int64_t dim,
                std::int64_t src, Tensor* out);
Carried broadcast(Served& served, const Tensor& x, std::int64_t src, Tensor* out);
Carried broadcast_in_place(Served& served, const Tensor& x, std::int64_t src);
Carried barrier(Served& served);
// Doesn't wait: a tensor that doesn't fit into the queue is left to the Python kernel.
Carried send(Served& served, const Tensor& x, std::int64_t dst);
Carried receive(Served& served, at::IntArrayRef sizes, at::ScalarType dtype, std::int64_t src, Tensor* out);

// In this rank's arena, or in ordinary memory if it is full.
Tensor symmetric(const std::shared_ptr<Handle>& group, at::IntArrayRef sizes, at::ScalarType dtype);
Tensor empty(const std::shared_ptr<Handle>& group, at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace parallel_state
