#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/COW.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "forks.h"
#include "messages.h"
#include "ops.h"
#include "pack.h"

#pragma GCC visibility push(default)
extern "C" {
int ps_describe_tensor(const void* impl, parallel_state::TensorForm* form);
void* ps_make_tensor(const void* group, parallel_state::TensorForm* form, void* (*wrap)(const void*));
void* ps_view_tensor(const void* group, const parallel_state::TensorForm* form, const parallel_state::Loan* loan,
                     void* (*wrap)(const void*));
}
#pragma GCC visibility pop

namespace parallel_state {
namespace {

template <typename Op>
const auto& find_op() {
  static const auto found = c10::Dispatcher::singleton()
                                .findSchemaOrThrow((std::string("parallel_state::") + Op::kName).c_str(), "")
                                .template typed<typename Op::Signature>();
  return found;
}

thread_local double began_s = 0;

template <typename Signature>
struct PythonOp;

template <typename Result, typename... Arguments>
struct PythonOp<Result(Arguments...)> {
  // Boxed, as Python's kernels need it: a call with types has several times the code.
  [[gnu::cold, gnu::noinline]] static Result call(const char* name, Arguments... arguments) {
    const Repetition repetition{std::exchange(began_s, 0)};
    torch::jit::Stack stack = c10::impl::boxArgs<Arguments...>(std::forward<Arguments>(arguments)...);
    const std::string full = std::string("parallel_state_python::") + name;
    c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), "").callBoxed(&stack);
    if constexpr (!std::is_void_v<Result>) return c10::impl::PopResult<Result>::call(stack);
  }
};

template <typename Op, typename... Arguments>
decltype(auto) in_python(Arguments&&... arguments) {
  return PythonOp<typename Op::Signature>::call(Op::kName, std::forward<Arguments>(arguments)...);
}

template <typename Call>
bool carried(string_view group, Call call) {
  const double left_s = take_left_to_op(), called_s = left_s == 0 ? coarse_now_s() : left_s;
  const std::shared_ptr<Served> served = find_served(group);
  if (served != nullptr && call(*served) == Carried::kYes) return true;
  began_s = called_s;
  return false;
}

// The op is `kFunction` of ops.h, its options between token and group.
template <typename Op, auto kFunction, typename... Options>
struct Made {
  using Signature = Tensor(const Tensor&, Tensor&, Options..., string_view);

  static Tensor run(const Tensor& x, Tensor& token, Options... options, string_view group) {
    Tensor out;
    if (carried(group, [&](Served& served) { return kFunction(served, x, options..., &out); })) return out;
    return in_python<Op>(x, token, options..., group);
  }
};

template <typename Op, auto kFunction, typename... Options>
struct Filled {
  using Signature = void(const Tensor&, Tensor&, Tensor&, Options..., string_view);

  static void run(const Tensor& x, Tensor& token, Tensor& out, Options... options, string_view group) {
    if (carried(group, [&](Served& served) { return kFunction(served, x, options..., &out); })) return;
    in_python<Op>(x, token, out, options..., group);
  }
};

template <typename Op, auto kFunction, typename X, typename... Options>
struct WithoutResult {
  using Signature = void(X, Tensor&, Options..., string_view);

  static void run(X x, Tensor& token, Options... options, string_view group) {
    if (carried(group, [&](Served& served) { return kFunction(served, x, options...); })) return;
    in_python<Op>(x, token, options..., group);
  }
};

struct AllReduce : Made<AllReduce, all_reduce, string_view> {
  static constexpr const char* kName = "all_reduce";
};
struct AllReduceInPlace : WithoutResult<AllReduceInPlace, all_reduce_in_place, Tensor&, string_view> {
  static constexpr const char* kName = "all_reduce_";
};
struct AllGather : Made<AllGather, all_gather, std::int64_t> {
  static constexpr const char* kName = "all_gather";
};
struct AllGatherInto : Filled<AllGatherInto, all_gather, std::int64_t> {
  static constexpr const char* kName = "all_gather_into";
};
struct AllGatherv : Made<AllGatherv, all_gatherv, std::int64_t, c10::SymIntArrayRef> {
  static constexpr const char* kName = "all_gatherv";
};
struct ReduceScatter : Made<ReduceScatter, reduce_scatter, std::int64_t, string_view> {
  static constexpr const char* kName = "reduce_scatter";
};
struct ReduceScatterInto : Filled<ReduceScatterInto, reduce_scatter, std::int64_t, string_view> {
  static constexpr const char* kName = "reduce_scatter_into";
};
struct ReduceScatterv : Made<ReduceScatterv, reduce_scatterv, std::int64_t, c10::SymIntArrayRef, string_view> {
  static constexpr const char* kName = "reduce_scatterv";
};
struct AllToAll : Made<AllToAll, all_to_all, Splits, Splits> {
  static constexpr const char* kName = "all_to_all";
};
struct AllToAllInto : Filled<AllToAllInto, all_to_all, Splits, Splits> {
  static constexpr const char* kName = "all_to_all_into";
};
struct Broadcast : Made<Broadcast, broadcast, std::int64_t> {
  static constexpr const char* kName = "broadcast";
};
struct BroadcastInPlace : WithoutResult<BroadcastInPlace, broadcast_in_place, Tensor&, std::int64_t> {
  static constexpr const char* kName = "broadcast_";
};
struct Send : WithoutResult<Send, send, const Tensor&, std::int64_t> {
  static constexpr const char* kName = "send";
};

struct AllReduceAddRmsNorm {
  static constexpr const char* kName = "all_reduce_add_rms_norm";
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, Tensor&, const Tensor&, const Tensor&, double,
                                               string_view);

  static std::tuple<Tensor, Tensor> run(const Tensor& x, Tensor& token, const Tensor& residual, const Tensor& weight,
                                        double eps, string_view group) {
    Tensor out, after;
    const auto call = [&](Served& served) {
      return all_reduce_add_rms_norm(served, x, residual, weight, eps, &out, &after);
    };
    if (carried(group, call)) return {out, after};
    return in_python<AllReduceAddRmsNorm>(x, token, residual, weight, eps, group);
  }
};

struct Gather {
  static constexpr const char* kName = "gather";
  using Signature = Tensor(const Tensor&, Tensor&, std::int64_t, std::int64_t, string_view);

  static Tensor run(const Tensor& x, Tensor& token, std::int64_t dim, std::int64_t dst, string_view group) {
    Tensor out;
    if (carried(group, [&](Served& served) { return gather(served, x, dim, dst, &out); })) {
      return out.defined() ? out : at::detail::empty_cpu({0}, x.scalar_type(), /*pin_memory=*/false, std::nullopt);
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
    Tensor out;
    const auto call = [&](Served& served) {
      return scatter(served, x.value_or(Tensor()), C10_AS_INTARRAYREF_SLOW(size), dtype, dim, src, &out);
    };
    if (device.is_cpu() && carried(group, call)) return out;
    return in_python<Scatter>(x, token, size, dtype, device, dim, src, group);
  }
};

struct Empty {
  static constexpr const char* kName = "empty";
  using Signature = Tensor(const Tensor&, c10::SymIntArrayRef, at::ScalarType, at::Device, string_view);

  static Tensor run(const Tensor& token, c10::SymIntArrayRef size, at::ScalarType dtype, at::Device device,
                    string_view group) {
    if (const std::shared_ptr<Served> served = device.is_cpu() ? find_served(group) : nullptr) {
      return symmetric(served->share(), C10_AS_INTARRAYREF_SLOW(size), dtype);
    }
    return in_python<Empty>(token, size, dtype, device, group);
  }
};

struct Borrowed {
  Borrowed(std::shared_ptr<Handle> keep, const Loan& loan) : keep(std::move(keep)), loan(loan) {}
  ~Borrowed() {
    if (generation == fork_generation()) loan.give_back();
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  const std::shared_ptr<Handle> keep;
  const Loan loan;
  const int generation = fork_generation();
};

struct Barrier {
  static constexpr const char* kName = "barrier";
  using Signature = void(Tensor&, string_view);

  static void run(Tensor& token, string_view group) {
    if (!carried(group, [](Served& served) { return barrier(served); })) in_python<Barrier>(token, group);
  }
};

struct Receive {
  static constexpr const char* kName = "recv";
  using Signature = Tensor(Tensor&, c10::SymIntArrayRef, at::ScalarType, at::Device, std::int64_t, string_view);

  static Tensor run(Tensor& token, c10::SymIntArrayRef size, at::ScalarType dtype, at::Device device, std::int64_t src,
                    string_view group) {
    Tensor out;
    const auto call = [&](Served& served) { return receive(served, C10_AS_INTARRAYREF_SLOW(size), dtype, src, &out); };
    if (device.is_cpu() && carried(group, call)) return out;
    return in_python<Receive>(token, size, dtype, device, src, group);
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

Outcome broadcast_own_list(Served& served, int src, const std::vector<Piece>& pieces) {
  return src == served.handle().rank() ? broadcast_list(served, src, pieces) : Outcome::kLeft;
}

template <typename Op, Outcome (*kCarry)(Served&, int, const std::vector<Piece>&)>
struct OfList {
  using Signature = void(at::TensorList, Tensor&, string_view, std::int64_t, string_view);

  static void run(at::TensorList x, Tensor& token, string_view form, std::int64_t peer, string_view group) {
    if (!carried(x, form, peer, group)) in_python<Op>(x, token, form, peer, group);
  }

  static bool carried(at::TensorList x, string_view form, std::int64_t peer, string_view group) {
    const double called_s = coarse_now_s();
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
    if (kCarry(*served, static_cast<int>(peer), pieces) == Outcome::kDone) return true;
    began_s = called_s;
    return false;
  }
};

struct SendList : OfList<SendList, send_list> {
  static constexpr const char* kName = "send_list";
};
struct ReceiveListInPlace : OfList<ReceiveListInPlace, receive_list> {
  static constexpr const char* kName = "recv_list_";
};
struct BroadcastList : OfList<BroadcastList, broadcast_own_list> {
  static constexpr const char* kName = "broadcast_list";
};
struct BroadcastListInPlace : OfList<BroadcastListInPlace, broadcast_list> {
  static constexpr const char* kName = "broadcast_list_";
};

bool any_wants_gradient(const Tensor& x) { return wants_gradient(x); }
bool any_wants_gradient(const std::optional<Tensor>& x) { return x.has_value() && wants_gradient(*x); }
bool any_wants_gradient(at::TensorList x) { return std::any_of(x.begin(), x.end(), wants_gradient); }
template <typename Other>
bool any_wants_gradient(const Other&) {
  return false;
}

void note_written(const Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}
void note_written(at::TensorList x) {
  for (const Tensor& each : x) note_written(each);
}

constexpr bool ends_with(string_view name, string_view end) {
  return name.size() >= end.size() && name.substr(name.size() - end.size()) == end;
}

template <typename Op, typename Signature = typename Op::Signature>
struct Autograd;

template <typename Op, typename Result, typename... Arguments>
struct Autograd<Op, Result(Arguments...)> {
  static Result run(c10::DispatchKeySet keys, Arguments... arguments) {
    if ((any_wants_gradient(arguments) || ...)) return in_python<Op>(arguments...);
    const auto& op = find_op<Op>();
    if constexpr (std::is_void_v<Result>) {
      op.redispatch(keys & c10::after_autograd_keyset, arguments...);
      const auto all = std::tie(arguments...);
      if constexpr (ends_with(Op::kName, "_into")) note_written(std::get<2>(all));
      else if constexpr (ends_with(Op::kName, "_")) note_written(std::get<0>(all));
    } else {
      return op.redispatch(keys & c10::after_autograd_keyset, arguments...);
    }
  }
};

template <typename... Ops>
void on_cpu(torch::Library& library) {
  (library.impl(Ops::kName, TORCH_FN(Ops::run)), ...);
}

template <typename... Ops>
void on_autograd(torch::Library& library) {
  (library.impl(Ops::kName, TORCH_FN(Autograd<Ops>::run)), ...);
}

void autograd(torch::Library& library) {
  on_autograd<AllReduce, AllReduceInPlace, AllReduceAddRmsNorm, AllGather, AllGatherInto, AllGatherv, ReduceScatter,
              ReduceScatterInto, ReduceScatterv, Gather, Scatter, AllToAll, AllToAllInto, Broadcast, BroadcastInPlace,
              Send>(library);
}

}  // namespace

TORCH_LIBRARY_IMPL(parallel_state, CPU, library) {
  on_cpu<AllReduce, AllReduceInPlace, AllReduceAddRmsNorm, AllGather, AllGatherInto, AllGatherv, ReduceScatter,
         ReduceScatterInto, ReduceScatterv, Gather, Scatter, AllToAll, AllToAllInto, Broadcast, BroadcastInPlace, Empty,
         Barrier, Send, Receive, SendList, ReceiveListInPlace, BroadcastList, BroadcastListInPlace>(library);
}

TORCH_LIBRARY_IMPL(parallel_state, AutogradCPU, library) {
  autograd(library);
  on_autograd<SendList, ReceiveListInPlace, BroadcastList, BroadcastListInPlace>(library);
}
TORCH_LIBRARY_IMPL(parallel_state, AutogradCUDA, library) { autograd(library); }

}  // namespace parallel_state

#pragma GCC visibility push(default)
extern "C" {

// Returns 0 unless the tensor is dense, contiguous, on the CPU, without wrappers or lazy bits.
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
    const at::ScalarType dtype = c10::typeMetaToScalarType(x.dtype());
    if (c10::isQIntType(dtype)) return 0;
    form->dtype = static_cast<std::int64_t>(dtype);
    form->dims = x.dim();
    form->sizes = x.sizes().data();
  } catch (const std::exception&) {
    return 0;
  }
  return form->bytes == 0 || form->data != nullptr ? 1 : 0;
}

void* ps_make_tensor(const void* group, parallel_state::TensorForm* form, void* (*wrap)(const void*)) {
  const auto& handle = *static_cast<const std::shared_ptr<parallel_state::Handle>*>(group);
  try {
    const at::IntArrayRef sizes(form->sizes, static_cast<std::size_t>(form->dims));
    const at::Tensor made = parallel_state::empty(handle, sizes, static_cast<at::ScalarType>(form->dtype));
    form->data = form->bytes == 0 ? nullptr : made.mutable_data_ptr();
    return wrap(&made);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void* ps_view_tensor(const void* group, const parallel_state::TensorForm* form, const parallel_state::Loan* loan,
                     void* (*wrap)(const void*)) {
  const auto& handle = *static_cast<const std::shared_ptr<parallel_state::Handle>*>(group);
  try {
    const auto release = [held = std::make_shared<parallel_state::Borrowed>(handle, *loan)](void*) {};
    const at::Tensor made = at::for_blob(loan->data, at::IntArrayRef(form->sizes, static_cast<std::size_t>(form->dims)))
                                .deleter(release)
                                .options(at::TensorOptions(static_cast<at::ScalarType>(form->dtype)))
                                .make_tensor();
    return wrap(&made);
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // extern "C"
#pragma GCC visibility pop
