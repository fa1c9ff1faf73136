// The registered ops' CPU kernels: from torch's dispatcher to a group by its name. The only file that knows torch.
//
// What shared memory doesn't carry (a group that nobody serves, an unusual dtype, a failure to report) goes on to the
// op's twin in `parallel_state_python`, which is the whole op written in Python; `parallel_state.ops` defines both.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/COW.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "handle.h"
#include "messages.h"
#include "pack.h"

#pragma GCC visibility push(default)
extern "C" int ps_describe_tensor(const void* impl, parallel_state::TensorForm* form);
#pragma GCC visibility pop

namespace parallel_state {
namespace {

using at::Tensor;
using std::string_view;

struct Reduction {
  Dtype dtype;
  ReduceOp op;
  int told;  // the reduction as the caller called it, by its place in REDUCE_OPS of native_group.py
};

// Whether the kernels reduce `dtype` by `name`, and how. Bytes that are 0 or 1: or is max, and is min.
bool reduction_of(at::ScalarType dtype, string_view name, Reduction* found) {
  ReduceOp op;
  if (name == "sum") op = ReduceOp::kSum;
  else if (name == "max") op = ReduceOp::kMax;
  else if (name == "min") op = ReduceOp::kMin;
  else if (name == "product") op = ReduceOp::kProduct;
  else if (name == "avg" && at::isFloatingType(dtype)) op = ReduceOp::kAverage;
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
      *found = {Dtype::kUint8, op == ReduceOp::kSum || op == ReduceOp::kMax ? ReduceOp::kMax : ReduceOp::kMin, told};
      return true;
    default: return false;
  }
}

// Results from this size on come from memory that all ranks map: what malloc gives back to the system between two calls
// costs more in page faults than the collective itself.
constexpr std::size_t kPooledBytes = 128 << 10;

Tensor ordinary(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_cpu(sizes, dtype, /*pin_memory=*/false, std::nullopt);
}

// A tensor in memory that all ranks map, which goes back there with it; an ordinary one where there is no room.
Tensor symmetric(Served& served, at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  Arena* const arena = served.handle().arena();
  void* const block = arena == nullptr || bytes == 0 ? nullptr : arena->allocate(bytes);
  if (block == nullptr) return ordinary(sizes, dtype);
  const auto release = [keep = served.share()](void* freed) { keep->arena()->release(freed); };
  return at::for_blob(block, sizes).deleter(release).options(at::TensorOptions(dtype)).make_tensor();
}

Tensor empty(Served& served, at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  return bytes < kPooledBytes ? ordinary(sizes, dtype) : symmetric(served, sizes, dtype);
}

Tensor empty(Served& served, at::IntArrayRef sizes, const Tensor& like) {
  return empty(served, sizes, like.scalar_type());
}

// As native_group.py numbers those dtypes that both know.
int number_of(at::ScalarType dtype) {
  const int number = static_cast<int>(dtype);
  constexpr int kUint64 = 27 + 2, kUnknown = 254;
  return number <= kUint64 ? number : kUnknown;
}

Told tell(Method method, const Tensor& x, int reduction = -1, std::int64_t dim = -1, std::int64_t root = -1) {
  return as_called(
      told_of(method, x.sizes(), number_of(x.scalar_type()), reduction, static_cast<int>(dim), static_cast<int>(root)));
}

// As Served::carry, of `x`. False where it failed.
template <typename Call>
bool carry(Served& served, Counted operation, const Tensor& x, Told told, Call call) {
  const at::IntArrayRef sizes = x.sizes();
  const Status status = served.carry(operation, static_cast<int>(x.scalar_type()), sizes.data(), sizes.size(),
                                     x.nbytes(), [&](Group& self, double timeout_s) {
                                       self.tell(told);
                                       return call(self, timeout_s);
                                     });
  if (status == Status::kBusy) note_overlap(&served.handle());
  return status == Status::kDone;
}

const Tensor& nothing() {
  static const Tensor none = at::detail::empty_cpu({0}, at::kByte, /*pin_memory=*/false, std::nullopt);
  return none;
}

// The sizes of `x` with another length of `dim`.
c10::SmallVector<std::int64_t, 8> resized(const Tensor& x, std::int64_t dim, std::int64_t length) {
  c10::SmallVector<std::int64_t, 8> sizes(x.sizes().begin(), x.sizes().end());
  sizes[dim] = length;
  return sizes;
}

// `x` with `dim` in front, contiguous, and the reverse.
Tensor rows_of(const Tensor& x, std::int64_t dim) { return (dim == 0 ? x : x.movedim(dim, 0)).contiguous(); }
Tensor with_rows(const Tensor& rows, std::int64_t dim) { return dim == 0 ? rows : rows.movedim(0, dim).contiguous(); }

// Whether `sizes` has one for each rank.
bool fit(c10::SymIntArrayRef sizes, const Served& served) {
  return sizes.size() == static_cast<std::size_t>(served.handle().size()) &&
         std::all_of(sizes.begin(), sizes.end(), [](const c10::SymInt& size) { return size.expect_int() >= 0; });
}

// As `tell`, of a call with `sizes` of the ranks' parts.
Told tell_sized(Method method, const Tensor& x, at::IntArrayRef shape, c10::SymIntArrayRef sizes, int reduction,
                std::int64_t dim) {
  c10::SmallVector<std::int64_t, 16> compared(shape.begin(), shape.end());
  for (const c10::SymInt& size : sizes) compared.push_back(size.expect_int());
  Told told = told_of(method, compared, number_of(x.scalar_type()), reduction, static_cast<int>(dim));
  told.shape = packed_shape(shape);
  return told;
}

// Allocates a result, unless the caller has given one; false where that isn't of this form.
bool provide(Tensor& out, Served& served, at::IntArrayRef sizes, const Tensor& like) {
  if (!out.defined()) {
    out = empty(served, sizes, like);
    return true;
  }
  return out.is_contiguous() && out.sizes() == sizes && out.scalar_type() == like.scalar_type();
}

// `x`, contiguous; a copy where `out` shares its memory: others read it while this rank writes.
Tensor apart(const Tensor& x, const Tensor& out) {
  return x.storage().data() == out.storage().data() ? x.clone(at::MemoryFormat::Contiguous) : x.contiguous();
}

std::size_t rows_before(const Tensor& x, std::int64_t dim) { return c10::multiply_integers(x.sizes().slice(0, dim)); }

// An op by name, looked up once.
template <typename Op>
const auto& find_op(const char* space) {
  static const auto found = c10::Dispatcher::singleton()
                                .findSchemaOrThrow((std::string(space) + "::" + Op::kName).c_str(), "")
                                .template typed<typename Op::Signature>();
  return found;
}

// The op's Python twin.
template <typename Op, typename... Arguments>
decltype(auto) in_python(Arguments&&... arguments) {
  struct Twin : Op {};
  const struct Forget {  // an overlap that this call has met is not the next one's
    ~Forget() { note_overlap(nullptr); }
  } forget;
  return find_op<Twin>("parallel_state_python").call(std::forward<Arguments>(arguments)...);
}

struct AllReduce {
  static constexpr const char* kName = "all_reduce";
  using Signature = Tensor(const Tensor&, Tensor&, string_view, string_view);

  static Tensor run(const Tensor& x, Tensor& token, string_view op, string_view group) {
    Reduction how;
    const std::shared_ptr<Served> served = find_served(group);
    if (served != nullptr && x.numel() != 0 && reduction_of(x.scalar_type(), op, &how)) {
      const auto in = x.expect_contiguous();
      Tensor out = empty(*served, x.sizes(), x);
      const Told told = tell(Method::kAllReduce, x, how.told);
      const bool done = carry(*served, Counted::kAllReduce, x, told, [&](Group& self, double timeout_s) {
        return self.all_reduce(out.mutable_data_ptr(), in->const_data_ptr(), in->numel(), how.dtype, how.op, timeout_s);
      });
      if (done) return out;
    }
    return in_python<AllReduce>(x, token, op, group);
  }
};

struct AllReduceInPlace {
  static constexpr const char* kName = "all_reduce_";
  using Signature = void(Tensor&, Tensor&, string_view, string_view);

  static void run(Tensor& x, Tensor& token, string_view op, string_view group) {
    Reduction how;
    const std::shared_ptr<Served> served = find_served(group);
    if (served != nullptr && x.numel() != 0 && x.is_contiguous() && reduction_of(x.scalar_type(), op, &how)) {
      void* const data = x.mutable_data_ptr();
      const Told told = tell(Method::kAllReduceInPlace, x, how.told);
      const bool done = carry(*served, Counted::kAllReduceInPlace, x, told, [&](Group& self, double timeout_s) {
        return self.all_reduce(data, data, x.numel(), how.dtype, how.op, timeout_s);
      });
      if (done) return;
    }
    in_python<AllReduceInPlace>(x, token, op, group);
  }
};

struct AllReduceAddRmsNorm {
  static constexpr const char* kName = "all_reduce_add_rms_norm";
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, Tensor&, const Tensor&, const Tensor&, double,
                                               string_view);

  static std::tuple<Tensor, Tensor> run(const Tensor& x, Tensor& token, const Tensor& residual, const Tensor& weight,
                                        double eps, string_view group) {
    Reduction how;
    const std::shared_ptr<Served> served = find_served(group);
    const at::ScalarType dtype = x.scalar_type();
    const bool fits = (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16) && x.numel() != 0 &&
                      residual.sizes() == x.sizes() && residual.scalar_type() == dtype &&
                      weight.scalar_type() == dtype && weight.dim() == 1 && weight.size(0) == x.size(-1);
    if (served != nullptr && fits && reduction_of(dtype, "sum", &how)) {
      const auto in = x.expect_contiguous(), before = residual.expect_contiguous(), scale = weight.expect_contiguous();
      Tensor out = empty(*served, x.sizes(), x), after = empty(*served, x.sizes(), x);
      const auto hidden = static_cast<std::size_t>(x.size(-1));
      const AddRmsNorm norm{out.mutable_data_ptr(),
                            after.mutable_data_ptr(),
                            in->const_data_ptr(),
                            before->const_data_ptr(),
                            scale->const_data_ptr(),
                            x.numel() / hidden,
                            hidden,
                            static_cast<float>(eps),
                            how.dtype};
      const Told told = tell(Method::kAllReduceAddRmsNorm, x, how.told);
      const bool done = carry(*served, Counted::kFused, x, told, [&](Group& self, double timeout_s) {
        return self.all_reduce_add_rms_norm(norm, timeout_s);
      });
      if (done) return {out, after};
    }
    return in_python<AllReduceAddRmsNorm>(x, token, residual, weight, eps, group);
  }

  // As Autograd<Op>, which looks at one input only.
  static std::tuple<Tensor, Tensor> differentiable(c10::DispatchKeySet keys, const Tensor& x, Tensor& token,
                                                   const Tensor& residual, const Tensor& weight, double eps,
                                                   string_view group);
};

struct AllGather {
  static constexpr const char* kName = "all_gather";
  using Signature = Tensor(const Tensor&, Tensor&, std::int64_t, string_view);

  static bool into(Tensor& out, const Tensor& x, std::int64_t dim, string_view group) {
    const std::shared_ptr<Served> served = find_served(group);
    if (served == nullptr || x.numel() == 0 || dim < 0 || dim >= x.dim()) return false;
    if (!provide(out, *served, resized(x, dim, x.size(dim) * served->handle().size()), x)) return false;
    const Tensor in = apart(x, out);
    const std::size_t outer = rows_before(x, dim);
    const Told told = tell(Method::kAllGather, x, -1, dim);
    return carry(*served, Counted::kAllGather, x, told, [&](Group& self, double timeout_s) {
      return self.all_gather(out.mutable_data_ptr(), in.const_data_ptr(), outer, in.nbytes() / outer, timeout_s);
    });
  }

  static Tensor run(const Tensor& x, Tensor& token, std::int64_t dim, string_view group) {
    Tensor out;
    return into(out, x, dim, group) ? out : in_python<AllGather>(x, token, dim, group);
  }
};

struct AllGatherInto {
  static constexpr const char* kName = "all_gather_into";
  using Signature = void(const Tensor&, Tensor&, Tensor&, std::int64_t, string_view);

  static void run(const Tensor& x, Tensor& token, Tensor& out, std::int64_t dim, string_view group) {
    if (!AllGather::into(out, x, dim, group)) in_python<AllGatherInto>(x, token, out, dim, group);
  }
};

struct ReduceScatter {
  static constexpr const char* kName = "reduce_scatter";
  using Signature = Tensor(const Tensor&, Tensor&, std::int64_t, string_view, string_view);

  static bool into(Tensor& out, const Tensor& x, std::int64_t dim, string_view op, string_view group) {
    Reduction how;
    const std::shared_ptr<Served> served = find_served(group);
    if (served == nullptr || x.numel() == 0 || dim < 0 || dim >= x.dim() ||
        x.size(dim) % served->handle().size() != 0 || !reduction_of(x.scalar_type(), op, &how)) {
      return false;
    }
    if (!provide(out, *served, resized(x, dim, x.size(dim) / served->handle().size()), x)) return false;
    const Tensor in = apart(x, out);
    const std::size_t outer = rows_before(x, dim);
    const Told told = tell(Method::kReduceScatter, x, how.told, dim);
    return carry(*served, Counted::kReduceScatter, x, told, [&](Group& self, double timeout_s) {
      return self.reduce_scatter(out.mutable_data_ptr(), in.const_data_ptr(), outer, out.numel() / outer, how.dtype,
                                 how.op, timeout_s);
    });
  }

  static Tensor run(const Tensor& x, Tensor& token, std::int64_t dim, string_view op, string_view group) {
    Tensor out;
    return into(out, x, dim, op, group) ? out : in_python<ReduceScatter>(x, token, dim, op, group);
  }
};

struct ReduceScatterInto {
  static constexpr const char* kName = "reduce_scatter_into";
  using Signature = void(const Tensor&, Tensor&, Tensor&, std::int64_t, string_view, string_view);

  static void run(const Tensor& x, Tensor& token, Tensor& out, std::int64_t dim, string_view op, string_view group) {
    if (!ReduceScatter::into(out, x, dim, op, group)) in_python<ReduceScatterInto>(x, token, out, dim, op, group);
  }
};

using Splits = at::OptionalSymIntArrayRef;  // none: all are equal

struct AllToAll {
  static constexpr const char* kName = "all_to_all";
  using Signature = Tensor(const Tensor&, Tensor&, Splits, Splits, string_view);

  static bool into(Tensor& out, const Tensor& x, Splits output_splits, Splits input_splits, string_view group) {
    const std::shared_ptr<Served> served = find_served(group);
    const auto size = served == nullptr ? 0u : static_cast<std::size_t>(served->handle().size());
    const auto fit = [&](Splits splits) {
      return splits.has_value() ? splits->size() == size : x.size(0) % static_cast<std::int64_t>(size) == 0;
    };
    if (served == nullptr || x.dim() == 0 || output_splits.has_value() != input_splits.has_value()) return false;
    if (!fit(output_splits) || !fit(input_splits)) return false;
    const std::size_t row_bytes = c10::multiply_integers(x.sizes().slice(1)) * x.element_size();
    std::size_t out_bytes[kMaxRanks], in_bytes[kMaxRanks];
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
    if (!provide(out, *served, resized(x, 0, rows), x)) return false;
    const Tensor in = apart(x, out);
    const Told told = as_called(told_of(Method::kAllToAll, x.sizes().slice(1), number_of(x.scalar_type())));
    return carry(*served, Counted::kAllToAll, x, told, [&](Group& self, double timeout_s) {
      return self.all_to_all(out.mutable_data_ptr(), in.const_data_ptr(), out_bytes, in_bytes, timeout_s);
    });
  }

  static Tensor run(const Tensor& x, Tensor& token, Splits output_splits, Splits input_splits, string_view group) {
    Tensor out;
    if (into(out, x, output_splits, input_splits, group)) return out;
    return in_python<AllToAll>(x, token, output_splits, input_splits, group);
  }
};

struct AllToAllInto {
  static constexpr const char* kName = "all_to_all_into";
  using Signature = void(const Tensor&, Tensor&, Tensor&, Splits, Splits, string_view);

  static void run(const Tensor& x, Tensor& token, Tensor& out, Splits output_splits, Splits input_splits,
                  string_view group) {
    if (AllToAll::into(out, x, output_splits, input_splits, group)) return;
    in_python<AllToAllInto>(x, token, out, output_splits, input_splits, group);
  }
};

struct AllGatherv {
  static constexpr const char* kName = "all_gatherv";
  using Signature = Tensor(const Tensor&, Tensor&, std::int64_t, c10::SymIntArrayRef, string_view);

  static Tensor run(const Tensor& x, Tensor& token, std::int64_t dim, c10::SymIntArrayRef sizes, string_view group) {
    const std::shared_ptr<Served> served = find_served(group);
    if (served != nullptr && dim >= 0 && dim < x.dim() && fit(sizes, *served)) {
      const int rank = served->handle().rank();
      const Tensor in = rows_of(x, dim);
      const std::size_t row_bytes = c10::multiply_integers(in.sizes().slice(1)) * in.element_size();
      std::int64_t rows = 0;
      for (const c10::SymInt& size : sizes) rows += size.expect_int();
      Tensor out = empty(*served, resized(in, 0, rows), x);
      auto* at = static_cast<char*>(out.mutable_data_ptr());
      void* outs[kMaxRanks];
      std::size_t bytes[kMaxRanks];
      for (std::size_t part = 0; part < sizes.size(); at += bytes[part++]) {
        outs[part] = at;
        bytes[part] = sizes[part].expect_int() * row_bytes;
      }
      auto shape = resized(x, dim, 0);
      shape.erase(shape.begin() + dim);
      const Told told = tell_sized(Method::kAllGatherv, x, shape, sizes, -1, dim);
      const bool fits = rows * row_bytes != 0 && bytes[rank] == in.nbytes();
      const bool done = fits && carry(*served, Counted::kAllGatherv, x, told, [&](Group& self, double timeout_s) {
                          return self.gatherv(outs, bytes, in.const_data_ptr(), timeout_s);
                        });
      if (done && bytes[rank] != 0) std::memcpy(outs[rank], in.const_data_ptr(), bytes[rank]);
      if (done) return with_rows(out, dim);
    }
    return in_python<AllGatherv>(x, token, dim, sizes, group);
  }
};

struct ReduceScatterv {
  static constexpr const char* kName = "reduce_scatterv";
  using Signature = Tensor(const Tensor&, Tensor&, std::int64_t, c10::SymIntArrayRef, string_view, string_view);

  // Exchanges the slices, and reduces one's own.
  static Tensor run(const Tensor& x, Tensor& token, std::int64_t dim, c10::SymIntArrayRef sizes, string_view op,
                    string_view group) {
    Reduction how;
    const std::shared_ptr<Served> served = find_served(group);
    if (served != nullptr && x.numel() != 0 && dim >= 0 && dim < x.dim() && fit(sizes, *served) &&
        reduction_of(x.scalar_type(), op, &how)) {
      const std::size_t size = sizes.size();
      const Tensor in = rows_of(x, dim);
      const std::size_t row_bytes = in.nbytes() / in.size(0);
      const std::int64_t mine = sizes[served->handle().rank()].expect_int();
      const Tensor slices = empty(*served, resized(in, 0, mine * static_cast<std::int64_t>(size)), x);
      std::size_t out_bytes[kMaxRanks], in_bytes[kMaxRanks];
      const void* sources[kMaxRanks];
      for (std::size_t rank = 0; rank < size; ++rank) {
        out_bytes[rank] = mine * row_bytes;
        in_bytes[rank] = sizes[rank].expect_int() * row_bytes;
        sources[rank] = static_cast<const char*>(slices.const_data_ptr()) + rank * out_bytes[rank];
      }
      Tensor out = empty(*served, resized(in, 0, mine), x);
      const Told told = tell_sized(Method::kReduceScatterv, x, x.sizes(), sizes, how.told, dim);
      const bool fits = std::accumulate(in_bytes, in_bytes + size, std::size_t{0}) == in.nbytes();
      const bool done =
          fits && carry(*served, Counted::kReduceScatterv, x, told, [&](Group& self, double timeout_s) {
            return self.all_to_all(slices.mutable_data_ptr(), in.const_data_ptr(), out_bytes, in_bytes, timeout_s);
          });
      if (done) {
        void* const to = out.mutable_data_ptr();
        reduce_function(how.dtype, how.op)(&to, 1, sources, static_cast<int>(size), out.numel());
        return with_rows(out, dim);
      }
    }
    return in_python<ReduceScatterv>(x, token, dim, sizes, op, group);
  }
};

struct Gather {
  static constexpr const char* kName = "gather";
  using Signature = Tensor(const Tensor&, Tensor&, std::int64_t, std::int64_t, string_view);

  static Tensor run(const Tensor& x, Tensor& token, std::int64_t dim, std::int64_t dst, string_view group) {
    const std::shared_ptr<Served> served = find_served(group);
    if (served != nullptr && x.numel() != 0 && dim >= 0 && dim < x.dim() && dst >= 0 && dst < served->handle().size()) {
      const int size = served->handle().size(), rank = served->handle().rank();
      const auto in = x.expect_contiguous();
      c10::SmallVector<std::int64_t, 8> sizes(x.sizes().begin(), x.sizes().end());
      sizes.insert(sizes.begin(), size);
      const Tensor blocks = rank == dst ? empty(*served, sizes, x) : ordinary({0}, x.scalar_type());
      void* outs[kMaxRanks] = {};
      std::size_t bytes[kMaxRanks];
      for (int part = 0; part < size; ++part) {
        bytes[part] = in->nbytes();
        if (rank == dst) outs[part] = static_cast<char*>(blocks.mutable_data_ptr()) + part * in->nbytes();
      }
      const Told told = tell(Method::kGather, x, -1, dim, dst);
      const bool done = carry(*served, Counted::kGather, x, told, [&](Group& self, double timeout_s) {
        return self.gatherv(outs, bytes, in->const_data_ptr(), timeout_s);
      });
      if (done && rank != dst) return blocks;
      if (done) std::memcpy(outs[rank], in->const_data_ptr(), bytes[rank]);
      if (done && dim == 0) return blocks.flatten(0, 1);
      // Where the dims are 1 long, flatten gives a view of other strides.
      if (done) return blocks.movedim(0, dim).flatten(dim, dim + 1).contiguous();
    }
    return in_python<Gather>(x, token, dim, dst, group);
  }
};

struct Scatter {
  static constexpr const char* kName = "scatter";
  using Signature = Tensor(const std::optional<Tensor>&, Tensor&, c10::SymIntArrayRef, at::ScalarType, at::Device,
                           std::int64_t, std::int64_t, string_view);

  static Tensor run(const std::optional<Tensor>& x, Tensor& token, c10::SymIntArrayRef size, at::ScalarType dtype,
                    at::Device device, std::int64_t dim, std::int64_t src, string_view group) {
    const at::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(size);
    const std::shared_ptr<Served> served = device.is_cpu() ? find_served(group) : nullptr;
    const auto dims = static_cast<std::int64_t>(sizes.size());
    if (served != nullptr && c10::multiply_integers(sizes) != 0 && dim >= 0 && dim < dims && src >= 0 &&
        src < served->handle().size()) {
      const int ranks = served->handle().size();
      const bool gives = served->handle().rank() == src;
      const bool fits = !gives || (x.has_value() && x->device().is_cpu() && x->scalar_type() == dtype &&
                                   x->dim() == dims && x->size(dim) == ranks * sizes[dim] &&
                                   x->numel() == ranks * static_cast<std::int64_t>(c10::multiply_integers(sizes)));
      Tensor out = empty(*served, sizes, dtype);
      Tensor blocks;  // slices one after the other
      if (gives && fits) {
        blocks = dim == 0 ? x->contiguous() : x->unflatten(dim, {ranks, sizes[dim]}).movedim(dim, 0).contiguous();
      }
      const Told told = tell(Method::kScatter, out, -1, dim, src);
      const bool done =
          fits && carry(*served, Counted::kScatter, out, told, [&](Group& self, double timeout_s) {
            const void* const in = gives ? blocks.const_data_ptr() : nullptr;
            return self.scatter(out.mutable_data_ptr(), in, out.nbytes(), static_cast<int>(src), timeout_s);
          });
      if (done) return out;
    }
    return in_python<Scatter>(x, token, size, dtype, device, dim, src, group);
  }
};

struct Broadcast {
  static constexpr const char* kName = "broadcast";
  using Signature = Tensor(const Tensor&, Tensor&, std::int64_t, string_view);

  static Tensor run(const Tensor& x, Tensor& token, std::int64_t src, string_view group) {
    const std::shared_ptr<Served> served = find_served(group);
    if (served != nullptr && x.numel() != 0 && src >= 0 && src < served->handle().size()) {
      Tensor out = empty(*served, x.sizes(), x);
      const bool sends = served->handle().rank() == src;
      const Tensor given = sends ? x.resolve_conj().resolve_neg().contiguous() : x;
      // The source copies to its own result while the others read: they need not wait for that.
      void* const data = sends ? const_cast<void*>(given.const_data_ptr()) : out.mutable_data_ptr();
      const Told told = tell(Method::kBroadcast, x, -1, -1, src);
      const bool done = carry(*served, Counted::kBroadcast, x, told, [&](Group& self, double timeout_s) {
        return self.broadcast(data, out.nbytes(), static_cast<int>(src), timeout_s);
      });
      if (done && sends) out.copy_(given);
      if (done) return out;
    }
    return in_python<Broadcast>(x, token, src, group);
  }
};

struct BroadcastInPlace {
  static constexpr const char* kName = "broadcast_";
  using Signature = void(Tensor&, Tensor&, std::int64_t, string_view);

  static void run(Tensor& x, Tensor& token, std::int64_t src, string_view group) {
    const std::shared_ptr<Served> served = find_served(group);
    if (served != nullptr && x.numel() != 0 && x.is_contiguous() && src >= 0 && src < served->handle().size()) {
      const Told told = tell(Method::kBroadcastInPlace, x, -1, -1, src);
      const bool done = carry(*served, Counted::kBroadcastInPlace, x, told, [&](Group& self, double timeout_s) {
        return self.broadcast(x.mutable_data_ptr(), x.nbytes(), static_cast<int>(src), timeout_s);
      });
      if (done) return;
    }
    in_python<BroadcastInPlace>(x, token, src, group);
  }
};

struct Empty {
  static constexpr const char* kName = "empty";
  using Signature = Tensor(const Tensor&, c10::SymIntArrayRef, at::ScalarType, at::Device, string_view);

  static Tensor run(const Tensor& token, c10::SymIntArrayRef size, at::ScalarType dtype, at::Device device,
                    string_view group) {
    if (const std::shared_ptr<Served> served = device.is_cpu() ? find_served(group) : nullptr) {
      return symmetric(*served, C10_AS_INTARRAYREF_SLOW(size), dtype);
    }
    return in_python<Empty>(token, size, dtype, device, group);
  }
};

struct Barrier {
  static constexpr const char* kName = "barrier";
  using Signature = void(Tensor&, string_view);

  static void run(Tensor& token, string_view group) {
    if (const std::shared_ptr<Served> served = find_served(group)) {
      const auto call = [](Group& self, double timeout_s) { return self.barrier(timeout_s); };
      const Told told = told_of(Method::kBarrier, at::IntArrayRef{}, 0);
      if (carry(*served, Counted::kBarrier, nothing(), told, call)) return;
    }
    in_python<Barrier>(token, group);
  }
};

Outcome send_list(Served& served, int dst, const std::vector<Piece>& pieces) {
  return send_message(served, {dst, 0}, pieces, 1);
}

Outcome receive_list(Served& served, int src, const std::vector<Piece>& pieces) {
  return receive_message(served, {src, 1}, pieces);
}

Outcome broadcast_list(Served& served, int src, const std::vector<Piece>& pieces) {
  const Told told = told_of(Method::kBroadcastTensorDictWithSpec, at::IntArrayRef{}, 0, -1, -1, src);
  return src == served.handle().rank() ? broadcast_message(served, told, pieces, 1)
                                       : receive_broadcast(served, told, src, pieces);
}

// On the source alone, which the twin sees to.
Outcome broadcast_own_list(Served& served, int src, const std::vector<Piece>& pieces) {
  return src == served.handle().rank() ? broadcast_list(served, src, pieces) : Outcome::kLeft;
}

// Lists of tensors: one message each, which is carried by `kCarry`. Whatever isn't plain goes to the twin.
template <Outcome (*kCarry)(Served&, int, const std::vector<Piece>&)>
struct OfList {
  using Signature = void(at::TensorList, Tensor&, string_view, std::int64_t, string_view);

  static bool carried(at::TensorList x, string_view form, std::int64_t peer, string_view group) {
    const std::shared_ptr<Served> served = find_served(group);
    if (served == nullptr || peer < 0 || peer >= served->handle().size()) return false;
    std::vector<char> head;
    std::vector<std::uint64_t> sizes;
    std::vector<Piece> pieces(1);
    for (const Tensor& each : x) {
      TensorForm told{};
      if (ps_describe_tensor(each.unsafeGetTensorImpl(), &told) == 0) return false;
      sizes.push_back(told.bytes);
      if (told.bytes != 0) pieces.push_back({told.data, told.bytes});
    }
    if (!write_list_head(form, sizes, &head)) return false;
    pieces[0] = {head.data(), head.size()};
    return kCarry(*served, static_cast<int>(peer), pieces) == Outcome::kDone;
  }
};

struct SendList : OfList<send_list> {
  static constexpr const char* kName = "send_list";
  static void run(at::TensorList x, Tensor& token, string_view form, std::int64_t dst, string_view group) {
    if (!carried(x, form, dst, group)) in_python<SendList>(x, token, form, dst, group);
  }
};

struct ReceiveListInPlace : OfList<receive_list> {
  static constexpr const char* kName = "recv_list_";
  static void run(at::TensorList x, Tensor& token, string_view form, std::int64_t src, string_view group) {
    if (!carried(x, form, src, group)) in_python<ReceiveListInPlace>(x, token, form, src, group);
  }
};

struct BroadcastList : OfList<broadcast_own_list> {
  static constexpr const char* kName = "broadcast_list";
  static void run(at::TensorList x, Tensor& token, string_view form, std::int64_t src, string_view group) {
    if (!carried(x, form, src, group)) in_python<BroadcastList>(x, token, form, src, group);
  }
};

struct BroadcastListInPlace : OfList<broadcast_list> {
  static constexpr const char* kName = "broadcast_list_";
  static void run(at::TensorList x, Tensor& token, string_view form, std::int64_t src, string_view group) {
    if (!carried(x, form, src, group)) in_python<BroadcastListInPlace>(x, token, form, src, group);
  }
};

bool wants_gradient(const Tensor& x) {
  return (x.requires_grad() && at::GradMode::is_enabled()) || x._fw_grad(/*level=*/0).defined();
}

bool wants_gradient(const std::optional<Tensor>& x) { return x.has_value() && wants_gradient(*x); }
bool wants_gradient(at::TensorList x) {
  return std::any_of(x.begin(), x.end(), [](const Tensor& each) { return wants_gradient(each); });
}

// Straight down where no gradient is wanted; else the formula, or the refusal, of the Python twin.
template <typename Op, typename Signature = typename Op::Signature>
struct Autograd;

template <typename Op, typename Result, typename X, typename... Arguments>
struct Autograd<Op, Result(X, Arguments...)> {
  static Result run(c10::DispatchKeySet keys, X x, Arguments... arguments) {
    if (wants_gradient(x)) return in_python<Op>(x, arguments...);
    const auto& op = find_op<Op>("parallel_state");
    if constexpr (std::is_void_v<Result>) {
      op.redispatch(keys & c10::after_autograd_keyset, x, arguments...);
      // Written past torch: a formula that saved `x` must notice.
      if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
    } else {
      return op.redispatch(keys & c10::after_autograd_keyset, x, arguments...);
    }
  }
};

// Of an op that writes to a tensor of the caller's, which has no gradient.
template <typename Op, typename Signature = typename Op::Signature>
struct AutogradInto;

template <typename Op, typename... Arguments>
struct AutogradInto<Op, void(const Tensor&, Tensor&, Tensor&, Arguments...)> {
  static void run(c10::DispatchKeySet keys, const Tensor& x, Tensor& token, Tensor& out, Arguments... arguments) {
    if (wants_gradient(x) || wants_gradient(out)) return in_python<Op>(x, token, out, arguments...);
    find_op<Op>("parallel_state").redispatch(keys & c10::after_autograd_keyset, x, token, out, arguments...);
    if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
  }
};

std::tuple<Tensor, Tensor> AllReduceAddRmsNorm::differentiable(c10::DispatchKeySet keys, const Tensor& x, Tensor& token,
                                                               const Tensor& residual, const Tensor& weight, double eps,
                                                               string_view group) {
  if (wants_gradient(x) || wants_gradient(residual) || wants_gradient(weight)) {
    return in_python<AllReduceAddRmsNorm>(x, token, residual, weight, eps, group);
  }
  return find_op<AllReduceAddRmsNorm>("parallel_state")
      .redispatch(keys & c10::after_autograd_keyset, x, token, residual, weight, eps, group);
}

template <typename Op>
void list_on_autograd(c10::DispatchKeySet keys, at::TensorList x, Tensor& token, string_view form, std::int64_t peer,
                      string_view group) {
  if (wants_gradient(x)) return in_python<Op>(x, token, form, peer, group);
  find_op<Op>("parallel_state").redispatch(keys & c10::after_autograd_keyset, x, token, form, peer, group);
  if (string_view(Op::kName).back() != '_') return;
  for (const Tensor& each : x) {
    if (!each.is_inference()) each.unsafeGetTensorImpl()->bump_version();
  }
}

template <typename Op>
void on_cpu(torch::Library& library) {
  library.impl(Op::kName, TORCH_FN(Op::run));
}

template <typename Op>
void on_autograd(torch::Library& library) {
  library.impl(Op::kName, TORCH_FN(Autograd<Op>::run));
}

template <typename... Ops>
void all_on_autograd(torch::Library& library) {
  (on_autograd<Ops>(library), ...);
}

template <typename... Ops>
void all_into_on_autograd(torch::Library& library) {
  (library.impl(Ops::kName, TORCH_FN(AutogradInto<Ops>::run)), ...);
}

void autograd(torch::Library& library) {
  library.impl(AllReduceAddRmsNorm::kName, TORCH_FN(AllReduceAddRmsNorm::differentiable));
  all_on_autograd<AllReduce, AllReduceInPlace, AllGather, AllGatherv, ReduceScatter, ReduceScatterv, Gather, Scatter,
                  AllToAll, Broadcast, BroadcastInPlace>(library);
  all_into_on_autograd<AllGatherInto, ReduceScatterInto, AllToAllInto>(library);
}

}  // namespace

TORCH_LIBRARY_IMPL(parallel_state, CPU, library) {
  on_cpu<AllReduce>(library);
  on_cpu<AllReduceInPlace>(library);
  on_cpu<AllReduceAddRmsNorm>(library);
  on_cpu<AllGather>(library);
  on_cpu<AllGatherInto>(library);
  on_cpu<AllGatherv>(library);
  on_cpu<ReduceScatter>(library);
  on_cpu<ReduceScatterInto>(library);
  on_cpu<ReduceScatterv>(library);
  on_cpu<Gather>(library);
  on_cpu<Scatter>(library);
  on_cpu<AllToAll>(library);
  on_cpu<AllToAllInto>(library);
  on_cpu<Broadcast>(library);
  on_cpu<BroadcastInPlace>(library);
  on_cpu<Empty>(library);
  on_cpu<Barrier>(library);
  on_cpu<SendList>(library);
  on_cpu<ReceiveListInPlace>(library);
  on_cpu<BroadcastList>(library);
  on_cpu<BroadcastListInPlace>(library);
}

TORCH_LIBRARY_IMPL(parallel_state, AutogradCPU, library) {
  autograd(library);
  library.impl(SendList::kName, TORCH_FN(list_on_autograd<SendList>));
  library.impl(ReceiveListInPlace::kName, TORCH_FN(list_on_autograd<ReceiveListInPlace>));
  library.impl(BroadcastList::kName, TORCH_FN(list_on_autograd<BroadcastList>));
  library.impl(BroadcastListInPlace::kName, TORCH_FN(list_on_autograd<BroadcastListInPlace>));
}
TORCH_LIBRARY_IMPL(parallel_state, AutogradCUDA, library) { autograd(library); }

}  // namespace parallel_state

#pragma GCC visibility push(default)
extern "C" {

// Fills in what a message tells of a tensor. 0 where that isn't plain: dense, contiguous, on the CPU, of no wrapper,
// with memory of its own, and without lazy bits, each of which is a dispatch key of its own.
int ps_describe_tensor(const void* impl, parallel_state::TensorForm* form) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet dense({DispatchKey::CPU}),
      plain({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::ADInplaceOrView, DispatchKey::AutocastCPU});
  const auto& x = *static_cast<const c10::TensorImpl*>(impl);
  const std::uint64_t keys = x.key_set().raw_repr();
  if ((keys & dense.raw_repr()) != dense.raw_repr() || (keys & ~plain.raw_repr()) != 0) return 0;
  try {
    if (!x.has_storage() || x.has_symbolic_sizes_strides() || !x.is_contiguous()) return 0;
    if (c10::impl::cow::is_cow_data_ptr(x.storage().data_ptr())) return 0;
    form->bytes = static_cast<std::uint64_t>(x.numel()) * x.itemsize();
    form->data = form->bytes == 0 ? nullptr : const_cast<void*>(x.data());
    form->dtype = static_cast<std::int64_t>(c10::typeMetaToScalarType(x.dtype()));
    form->dims = x.dim();
    form->sizes = x.sizes().data();
  } catch (const std::exception&) {  // torch says why when Python asks
    return 0;
  }
  return form->bytes == 0 || form->data != nullptr ? 1 : 0;
}

}  // extern "C"
#pragma GCC visibility pop
