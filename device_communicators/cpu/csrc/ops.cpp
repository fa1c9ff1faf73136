#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "messages.h"

namespace parallel_state {
namespace {

struct Reduction {
  Dtype dtype;
  ReduceOp op;
  int told;  // numbered by REDUCE_OPS of native_group.py
};

// For bools sum and max are "or", the others "and".
bool reduction_of(at::ScalarType dtype, string_view name, Reduction* found) {
  ReduceOp op;
  if (name == "sum") op = ReduceOp::kSum;
  else if (name == "max") op = ReduceOp::kMax;
  else if (name == "min") op = ReduceOp::kMin;
  else if (name == "product") op = ReduceOp::kProduct;
  else if (name == "avg" && dtype != at::kBool) op = ReduceOp::kAverage;
  else if (name == "tree_sum") op = ReduceOp::kTreeSum;
  else return false;
  const int told = static_cast<int>(op);
  switch (dtype) {
    case at::kFloat: *found = {Dtype::kFloat32, op, told}; return true;
    case at::kDouble: *found = {Dtype::kFloat64, op, told}; return true;
    case at::kHalf: *found = {Dtype::kFloat16, op, told}; return true;
    case at::kBFloat16: *found = {Dtype::kBfloat16, op, told}; return true;
    case at::kChar: *found = {Dtype::kInt8, op, told}; return true;
    case at::kShort: *found = {Dtype::kInt16, op, told}; return true;
    case at::kInt: *found = {Dtype::kInt32, op, told}; return true;
    case at::kLong: *found = {Dtype::kInt64, op, told}; return true;
    case at::kByte: *found = {Dtype::kUint8, op, told}; return true;
    case at::kBool:
      op = op == ReduceOp::kMin || op == ReduceOp::kProduct ? ReduceOp::kMin : ReduceOp::kMax;
      *found = {Dtype::kUint8, op, told};
      return true;
    default: return false;
  }
}

template <typename T>
using Many = c10::SmallVector<T, kMaxRanks>;

// Page faults of fresh memory would cost more than the collective.
constexpr std::size_t kPooledBytes = 128 << 10;

Tensor ordinary(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_cpu(sizes, dtype, /*pin_memory=*/false, std::nullopt);
}

Tensor empty(Served& served, at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  return bytes < kPooledBytes ? ordinary(sizes, dtype) : symmetric(served.share(), sizes, dtype);
}

Tensor empty(Served& served, at::IntArrayRef sizes, const Tensor& like) {
  return empty(served, sizes, like.scalar_type());
}

// As numbered by native_group.py.
int number_of(at::ScalarType dtype) {
  const int number = static_cast<int>(dtype);
  constexpr int kUint64 = 27 + 2, kUnknown = 254;
  return number <= kUint64 ? number : kUnknown;
}

Told tell(Method method, const Tensor& x, int reduction = -1, std::int64_t dim = -1, std::int64_t root = -1) {
  return as_called(
      told_of(method, x.sizes(), number_of(x.scalar_type()), reduction, static_cast<int>(dim), static_cast<int>(root)));
}

template <typename Call>
Carried carry(Served& served, Counted operation, const Tensor& x, Told told, Call call) {
  const at::IntArrayRef sizes = x.sizes();
  const Status status =
      served.carry(operation, told, static_cast<int>(x.scalar_type()), sizes.data(), sizes.size(), x.nbytes(), call);
  if (status == Status::kBusy) note_overlap(&served.handle());
  return status == Status::kDone ? Carried::kYes : Carried::kFailed;
}

const Tensor& nothing() {
  static const Tensor none = at::detail::empty_cpu({0}, at::kByte, /*pin_memory=*/false, std::nullopt);
  return none;
}

c10::SmallVector<std::int64_t, 8> resized(const Tensor& x, std::int64_t dim, std::int64_t length) {
  c10::SmallVector<std::int64_t, 8> sizes(x.sizes().begin(), x.sizes().end());
  sizes[dim] = length;
  return sizes;
}

Tensor rows_of(const Tensor& x, std::int64_t dim) { return (dim == 0 ? x : x.movedim(dim, 0)).contiguous(); }
Tensor with_rows(const Tensor& rows, std::int64_t dim) { return dim == 0 ? rows : rows.movedim(0, dim).contiguous(); }

bool fit(c10::SymIntArrayRef sizes, const Served& served) {
  return sizes.size() == static_cast<std::size_t>(served.handle().size()) &&
         std::all_of(sizes.begin(), sizes.end(), [](const c10::SymInt& size) { return size.expect_int() >= 0; });
}

Told tell_sized(Method method, const Tensor& x, at::IntArrayRef shape, c10::SymIntArrayRef sizes, int reduction,
                std::int64_t dim) {
  c10::SmallVector<std::int64_t, 16> compared(shape.begin(), shape.end());
  for (const c10::SymInt& size : sizes) compared.push_back(size.expect_int());
  Told told = told_of(method, compared, number_of(x.scalar_type()), reduction, static_cast<int>(dim));
  told.shape = packed_shape(shape);
  return told;
}

bool provide(Tensor* out, Served& served, at::IntArrayRef sizes, const Tensor& like) {
  if (!out->defined()) {
    *out = empty(served, sizes, like);
    return true;
  }
  return out->is_contiguous() && out->sizes() == sizes && out->scalar_type() == like.scalar_type();
}

// A copy if `out` shares its memory: peers read it while this rank writes.
Tensor apart(const Tensor& x, const Tensor& out) {
  return x.storage().data() == out.storage().data() ? x.clone(at::MemoryFormat::Contiguous) : x.contiguous();
}

bool is_other(const Served& served, std::int64_t rank) {
  return rank >= 0 && rank < served.handle().size() && rank != served.handle().rank();
}

std::size_t rows_before(const Tensor& x, std::int64_t dim) { return c10::multiply_integers(x.sizes().slice(0, dim)); }

}  // namespace

Tensor symmetric(const std::shared_ptr<Handle>& group, at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  Arena* const arena = group == nullptr ? nullptr : group->arena();
  void* const block = arena == nullptr || bytes == 0 ? nullptr : arena->allocate(bytes);
  if (block == nullptr) return ordinary(sizes, dtype);
  const auto release = [keep = group](void* freed) { keep->arena()->release(freed); };
  return at::for_blob(block, sizes).deleter(release).options(at::TensorOptions(dtype)).make_tensor();
}

Tensor empty(const std::shared_ptr<Handle>& group, at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  return bytes < kPooledBytes ? ordinary(sizes, dtype) : symmetric(group, sizes, dtype);
}

Carried all_reduce(Served& served, const Tensor& x, string_view op, Tensor* out) {
  Reduction how;
  if (x.numel() == 0 || !reduction_of(x.scalar_type(), op, &how)) return Carried::kNo;
  const auto in = x.expect_contiguous();
  *out = empty(served, x.sizes(), x);
  const Told told = tell(Method::kAllReduce, x, how.told);
  return carry(served, Counted::kAllReduce, x, told, [&](Group& self, double timeout_s) {
    return self.all_reduce(out->mutable_data_ptr(), in->const_data_ptr(), in->numel(), how.dtype, how.op, timeout_s);
  });
}

Carried all_reduce_in_place(Served& served, const Tensor& x, string_view op) {
  Reduction how;
  if (x.numel() == 0 || !x.is_contiguous() || !reduction_of(x.scalar_type(), op, &how)) return Carried::kNo;
  void* const data = x.mutable_data_ptr();
  const Told told = tell(Method::kAllReduceInPlace, x, how.told);
  return carry(served, Counted::kAllReduceInPlace, x, told, [&](Group& self, double timeout_s) {
    return self.all_reduce(data, data, x.numel(), how.dtype, how.op, timeout_s);
  });
}

Carried all_reduce_add_rms_norm(Served& served, const Tensor& x, const Tensor& residual, const Tensor& weight,
                                double eps, Tensor* out, Tensor* after) {
  Reduction how;
  const at::ScalarType dtype = x.scalar_type();
  const bool fits = (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16) && x.numel() != 0 &&
                    residual.sizes() == x.sizes() && residual.scalar_type() == dtype && weight.scalar_type() == dtype &&
                    weight.dim() == 1 && weight.size(0) == x.size(-1);
  if (!fits || !reduction_of(dtype, "sum", &how)) return Carried::kNo;
  const auto in = x.expect_contiguous(), before = residual.expect_contiguous(), scale = weight.expect_contiguous();
  *out = empty(served, x.sizes(), x);
  *after = empty(served, x.sizes(), x);
  const auto hidden = static_cast<std::size_t>(x.size(-1));
  const AddRmsNorm norm{out->mutable_data_ptr(),
                        after->mutable_data_ptr(),
                        in->const_data_ptr(),
                        before->const_data_ptr(),
                        scale->const_data_ptr(),
                        x.numel() / hidden,
                        hidden,
                        static_cast<float>(eps),
                        how.dtype};
  const Told told = tell(Method::kAllReduceAddRmsNorm, x, how.told);
  return carry(served, Counted::kFused, x, told,
               [&](Group& self, double timeout_s) { return self.all_reduce_add_rms_norm(norm, timeout_s); });
}

Carried all_gather(Served& served, const Tensor& x, std::int64_t dim, Tensor* out) {
  if (x.numel() == 0 || dim < 0 || dim >= x.dim()) return Carried::kNo;
  if (!provide(out, served, resized(x, dim, x.size(dim) * served.handle().size()), x)) return Carried::kNo;
  const Tensor in = apart(x, *out);
  const std::size_t outer = rows_before(x, dim);
  const Told told = tell(Method::kAllGather, x, -1, dim);
  return carry(served, Counted::kAllGather, x, told, [&](Group& self, double timeout_s) {
    return self.all_gather(out->mutable_data_ptr(), in.const_data_ptr(), outer, in.nbytes() / outer, timeout_s);
  });
}

Carried all_gatherv(Served& served, const Tensor& x, std::int64_t dim, c10::SymIntArrayRef sizes, Tensor* out) {
  if (dim < 0 || dim >= x.dim() || !fit(sizes, served)) return Carried::kNo;
  const int rank = served.handle().rank();
  const Tensor in = rows_of(x, dim);
  const std::size_t row_bytes = c10::multiply_integers(in.sizes().slice(1)) * in.element_size();
  std::int64_t rows = 0;
  for (const c10::SymInt& size : sizes) rows += size.expect_int();
  const Tensor gathered = empty(served, resized(in, 0, rows), x);
  auto* at = static_cast<char*>(gathered.mutable_data_ptr());
  Many<void*> outs(sizes.size());
  Many<std::size_t> bytes(sizes.size());
  for (std::size_t part = 0; part < sizes.size(); at += bytes[part++]) {
    outs[part] = at;
    bytes[part] = sizes[part].expect_int() * row_bytes;
  }
  if (rows * row_bytes == 0 || bytes[rank] != in.nbytes()) return Carried::kNo;
  auto shape = resized(x, dim, 0);
  shape.erase(shape.begin() + dim);
  const Told told = tell_sized(Method::kAllGatherv, x, shape, sizes, -1, dim);
  const Carried carried = carry(served, Counted::kAllGatherv, x, told, [&](Group& self, double timeout_s) {
    return self.gatherv(outs.data(), bytes.data(), in.const_data_ptr(), -1, timeout_s);
  });
  if (carried != Carried::kYes) return carried;
  if (bytes[rank] != 0) std::memcpy(outs[rank], in.const_data_ptr(), bytes[rank]);
  *out = with_rows(gathered, dim);
  return carried;
}

Carried reduce_scatter(Served& served, const Tensor& x, std::int64_t dim, string_view op, Tensor* out) {
  Reduction how;
  const int size = served.handle().size();
  const bool fits = x.numel() != 0 && dim >= 0 && dim < x.dim() && x.size(dim) % size == 0;
  if (!fits || !reduction_of(x.scalar_type(), op, &how)) return Carried::kNo;
  if (!provide(out, served, resized(x, dim, x.size(dim) / size), x)) return Carried::kNo;
  const Tensor in = apart(x, *out);
  const std::size_t outer = rows_before(x, dim);
  const Told told = tell(Method::kReduceScatter, x, how.told, dim);
  return carry(served, Counted::kReduceScatter, x, told, [&](Group& self, double timeout_s) {
    return self.reduce_scatter(out->mutable_data_ptr(), in.const_data_ptr(), outer, out->numel() / outer, how.dtype,
                               how.op, timeout_s);
  });
}

Carried reduce_scatterv(Served& served, const Tensor& x, std::int64_t dim, c10::SymIntArrayRef sizes, string_view op,
                        Tensor* out) {
  Reduction how;
  const bool fits = x.numel() != 0 && dim >= 0 && dim < x.dim() && fit(sizes, served);
  if (!fits || !reduction_of(x.scalar_type(), op, &how)) return Carried::kNo;
  const std::size_t size = sizes.size();
  const Tensor in = rows_of(x, dim);
  const std::size_t row_bytes = in.nbytes() / in.size(0);
  const std::int64_t mine = sizes[served.handle().rank()].expect_int();
  const Tensor slices = empty(served, resized(in, 0, mine * static_cast<std::int64_t>(size)), x);
  Many<std::size_t> out_bytes(size), in_bytes(size);
  Many<const void*> sources(size);
  for (std::size_t rank = 0; rank < size; ++rank) {
    out_bytes[rank] = mine * row_bytes;
    in_bytes[rank] = sizes[rank].expect_int() * row_bytes;
    sources[rank] = static_cast<const char*>(slices.const_data_ptr()) + rank * out_bytes[rank];
  }
  if (std::accumulate(in_bytes.begin(), in_bytes.end(), std::size_t{0}) != in.nbytes()) return Carried::kNo;
  const Tensor reduced = empty(served, resized(in, 0, mine), x);
  const Told told = tell_sized(Method::kReduceScatterv, x, x.sizes(), sizes, how.told, dim);
  const Carried carried = carry(served, Counted::kReduceScatterv, x, told, [&](Group& self, double timeout_s) {
    return self.all_to_all(slices.mutable_data_ptr(), in.const_data_ptr(), out_bytes.data(), in_bytes.data(),
                           timeout_s);
  });
  if (carried != Carried::kYes) return carried;
  void* const to = reduced.mutable_data_ptr();
  reduce_function(how.dtype, how.op)(&to, 1, sources.data(), static_cast<int>(size), reduced.numel());
  *out = with_rows(reduced, dim);
  return carried;
}

Carried all_to_all(Served& served, const Tensor& x, Splits output_splits, Splits input_splits, Tensor* out) {
  const auto size = static_cast<std::size_t>(served.handle().size());
  const auto fit = [&](Splits splits) {
    return splits.has_value() ? splits->size() == size : x.size(0) % static_cast<std::int64_t>(size) == 0;
  };
  if (x.dim() == 0 || output_splits.has_value() != input_splits.has_value()) return Carried::kNo;
  if (!fit(output_splits) || !fit(input_splits)) return Carried::kNo;
  const std::size_t row_bytes = c10::multiply_integers(x.sizes().slice(1)) * x.element_size();
  Many<std::size_t> out_bytes(size), in_bytes(size);
  std::int64_t rows = 0, rows_in = 0;
  const std::int64_t equal = x.size(0) / static_cast<std::int64_t>(size);
  for (std::size_t rank = 0; rank < size; ++rank) {
    const std::int64_t to_come = output_splits.has_value() ? (*output_splits)[rank].expect_int() : equal;
    const std::int64_t to_go = input_splits.has_value() ? (*input_splits)[rank].expect_int() : equal;
    TORCH_CHECK_VALUE(to_come >= 0 && to_go >= 0, "splits of all_to_all must not be negative");
    out_bytes[rank] = to_come * row_bytes;
    in_bytes[rank] = to_go * row_bytes;
    rows += to_come;
    rows_in += to_go;
  }
  TORCH_CHECK_VALUE(rows_in == x.size(0), "input_splits of all_to_all must add up to the ", x.size(0),
                    " rows of x, but add up to ", rows_in);
  if (!provide(out, served, resized(x, 0, rows), x)) return Carried::kNo;
  const Tensor in = apart(x, *out);
  const Told told = as_called(told_of(Method::kAllToAll, x.sizes().slice(1), number_of(x.scalar_type())));
  return carry(served, Counted::kAllToAll, x, told, [&](Group& self, double timeout_s) {
    return self.all_to_all(out->mutable_data_ptr(), in.const_data_ptr(), out_bytes.data(), in_bytes.data(), timeout_s);
  });
}

Carried gather(Served& served, const Tensor& x, std::int64_t dim, std::int64_t dst, Tensor* out) {
  const int size = served.handle().size(), rank = served.handle().rank();
  if (x.numel() == 0 || dim < 0 || dim >= x.dim() || dst < 0 || dst >= size) return Carried::kNo;
  const auto in = x.expect_contiguous();
  c10::SmallVector<std::int64_t, 8> sizes(x.sizes().begin(), x.sizes().end());
  if (dim == 0) sizes[0] *= size;
  else sizes.insert(sizes.begin(), size);
  Tensor blocks;
  if (rank == dst) blocks = empty(served, sizes, x);
  Many<void*> outs(size, nullptr);
  Many<std::size_t> bytes(size);
  for (int part = 0; part < size; ++part) {
    bytes[part] = in->nbytes();
    if (rank == dst) outs[part] = static_cast<char*>(blocks.mutable_data_ptr()) + part * in->nbytes();
  }
  const Told told = tell(Method::kGather, x, -1, dim, dst);
  const Carried carried = carry(served, Counted::kGather, x, told, [&](Group& self, double timeout_s) {
    return self.gatherv(outs.data(), bytes.data(), in->const_data_ptr(), static_cast<int>(dst), timeout_s);
  });
  if (carried != Carried::kYes || rank != dst) return carried;
  std::memcpy(outs[rank], in->const_data_ptr(), bytes[rank]);
  // For dims of length 1 flatten returns a view with other strides.
  *out = dim == 0 ? blocks : blocks.movedim(0, dim).flatten(dim, dim + 1).contiguous();
  return carried;
}

Carried scatter(Served& served, const Tensor& x, at::IntArrayRef sizes, at::ScalarType dtype, std::int64_t dim,
                std::int64_t src, Tensor* out) {
  const auto dims = static_cast<std::int64_t>(sizes.size());
  const std::int64_t ranks = served.handle().size();
  const auto numel = static_cast<std::int64_t>(c10::multiply_integers(sizes));
  if (numel == 0 || dim < 0 || dim >= dims || src < 0 || src >= ranks) return Carried::kNo;
  Tensor blocks;
  if (served.handle().rank() == src) {
    const bool fits = x.defined() && x.device().is_cpu() && x.scalar_type() == dtype && x.dim() == dims &&
                      x.size(dim) == ranks * sizes[dim] && x.numel() == ranks * numel;
    if (!fits) return Carried::kNo;
    blocks = dim == 0 ? x.contiguous() : x.unflatten(dim, {ranks, sizes[dim]}).movedim(dim, 0).contiguous();
  }
  *out = empty(served, sizes, dtype);
  const Told told = tell(Method::kScatter, *out, -1, dim, src);
  return carry(served, Counted::kScatter, *out, told, [&](Group& self, double timeout_s) {
    const void* const in = blocks.defined() ? blocks.const_data_ptr() : nullptr;
    return self.scatter(out->mutable_data_ptr(), in, out->nbytes(), static_cast<int>(src), timeout_s);
  });
}

Carried broadcast(Served& served, const Tensor& x, std::int64_t src, Tensor* out) {
  if (x.numel() == 0 || src < 0 || src >= served.handle().size()) return Carried::kNo;
  *out = empty(served, x.sizes(), x);
  const bool sends = served.handle().rank() == src;
  const Tensor given = sends ? x.resolve_conj().resolve_neg().contiguous() : x;
  void* const data = sends ? const_cast<void*>(given.const_data_ptr()) : out->mutable_data_ptr();
  const Told told = tell(Method::kBroadcast, x, -1, -1, src);
  const Carried carried = carry(served, Counted::kBroadcast, x, told, [&](Group& self, double timeout_s) {
    return self.broadcast(data, out->nbytes(), static_cast<int>(src), timeout_s);
  });
  if (carried != Carried::kYes || !sends) return carried;
  if (given.nbytes() < kPooledBytes) std::memcpy(out->mutable_data_ptr(), data, given.nbytes());
  else out->copy_(given);
  return carried;
}

Carried broadcast_in_place(Served& served, const Tensor& x, std::int64_t src) {
  if (x.numel() == 0 || !x.is_contiguous() || src < 0 || src >= served.handle().size()) return Carried::kNo;
  const Told told = tell(Method::kBroadcastInPlace, x, -1, -1, src);
  return carry(served, Counted::kBroadcastInPlace, x, told, [&](Group& self, double timeout_s) {
    return self.broadcast(x.mutable_data_ptr(), x.nbytes(), static_cast<int>(src), timeout_s);
  });
}

Carried barrier(Served& served) {
  const auto call = [](Group& self, double timeout_s) { return self.barrier(timeout_s); };
  return carry(served, Counted::kBarrier, nothing(), told_of(Method::kBarrier, at::IntArrayRef{}, 0), call);
}

Carried send(Served& served, const Tensor& x, std::int64_t dst) {
  if (x.numel() == 0 || !is_other(served, dst)) return Carried::kNo;
  c10::MaybeOwned<Tensor> in;
  const auto data = [&] {
    in = x.expect_contiguous();
    return const_cast<void*>(in->const_data_ptr());
  };
  const PlainTensor sent{static_cast<int>(x.scalar_type()), x.sizes().data(), x.sizes().size(), x.nbytes(), data};
  return send_tensor(served, static_cast<int>(dst), sent) == Outcome::kDone ? Carried::kYes : Carried::kFailed;
}

Carried receive(Served& served, at::IntArrayRef sizes, at::ScalarType dtype, std::int64_t src, Tensor* out) {
  const bool is_empty = std::any_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size <= 0; });
  if (is_empty || !is_other(served, src)) return Carried::kNo;
  const auto data = [&] {
    *out = empty(served, sizes, dtype);
    return out->mutable_data_ptr();
  };
  const std::size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  const PlainTensor expected{static_cast<int>(dtype), sizes.data(), sizes.size(), bytes, data};
  return receive_tensor(served, static_cast<int>(src), expected) == Outcome::kDone ? Carried::kYes : Carried::kFailed;
}

}  // namespace parallel_state
