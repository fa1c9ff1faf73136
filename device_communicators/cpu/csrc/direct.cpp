// Calls by Python without torch's dispatcher and `torch.ops`, which take two of three microseconds. Arguments are the
// op's; `twin` is its Python kernel, which repeats failed calls. Functions return NotImplemented, before anything has
// begun, if the op could behave differently.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <exception>
#include <memory>

#include "calling.h"
#include "one_sided.h"
#include "ops.h"

namespace {

using namespace parallel_state;
using c10::DispatchKey;
using c10::DispatchKeySet;

// Set by direct.py before any other function is called.
struct Facts {
  std::ptrdiff_t type_at, tensor_at;
  const void* tensor_type;
  const void* parameter_type;
  const void* int_type;
  const void* str_type;
  const void* list_type;
  const void* tuple_type;
  const void* size_type;
  void* none;
  void* not_implemented;
  void* runtime_error;
  const void* const* dtypes;
  std::ptrdiff_t dtype_count;
  void* (*wrap)(const Tensor&);
  void* (*call)(void*, void* const*, std::size_t, void*);
  long long (*integer)(void*, int*);
  const char* (*utf8)(void*, std::ptrdiff_t*);
  std::ptrdiff_t (*list_size)(void*);
  void* (*list_item)(void*, std::ptrdiff_t);  // borrowed
  std::ptrdiff_t (*tuple_size)(void*);
  void* (*tuple_item)(void*, std::ptrdiff_t);  // borrowed
  void (*hold)(void*);
  void (*let_go)(void*);
  void (*set_error)(void*, const char*);
  void (*clear_error)();
};

const Facts* facts = nullptr;

void* same(void* object) {
  facts->hold(object);
  return object;
}

void* not_mine() { return same(facts->not_implemented); }

const void* type_of(void* object) { return *reinterpret_cast<void**>(static_cast<char*>(object) + facts->type_at); }

// Null for other classes than torch's own.
c10::TensorImpl* impl_of(void* object) {
  const void* const type = type_of(object);
  if (type != facts->tensor_type && type != facts->parameter_type) return nullptr;
  return *reinterpret_cast<c10::TensorImpl**>(static_cast<char*>(object) + facts->tensor_at);
}

bool text_of(void* object, string_view* found) {
  if (type_of(object) != facts->str_type) return false;
  std::ptrdiff_t bytes = 0;
  const char* const text = facts->utf8(object, &bytes);
  if (text == nullptr) facts->clear_error();
  else *found = {text, static_cast<std::size_t>(bytes)};
  return text != nullptr;
}

bool integer_of(void* object, std::int64_t* number) {
  if (type_of(object) != facts->int_type) return false;
  int overflow = 0;
  *number = facts->integer(object, &overflow);
  return overflow == 0;
}

template <DispatchKey kDevice, DispatchKey kAutograd, DispatchKey kAutocast>
bool is_plain_on(DispatchKeySet keys) {
  constexpr DispatchKeySet dense({kDevice}),
      plain({kDevice, kAutograd, DispatchKey::ADInplaceOrView, kAutocast, DispatchKey::BackendSelect});
  return (keys.raw_repr() & dense.raw_repr()) == dense.raw_repr() && (keys.raw_repr() & ~plain.raw_repr()) == 0;
}

bool is_plain(DispatchKeySet keys) {
  return is_plain_on<DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU>(keys);
}

bool is_plain_anywhere(DispatchKeySet keys) {
  return is_plain(keys) || is_plain_on<DispatchKey::CUDA, DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA>(keys);
}

class Given {
 public:
  Given(void* twin, void* const* objects, std::ptrdiff_t count) : twin_(twin), objects_(objects), count_(count) {}

  bool are(std::ptrdiff_t count) const { return count_ == count && count <= kMost && facts != nullptr; }

  std::shared_ptr<Served> served() const {
    string_view key;
    return text_of(objects_[count_ - 1], &key) ? find_served(key) : nullptr;
  }

  bool tensor(int at, Tensor* found) {
    c10::TensorImpl* const impl = impl_of(objects_[at]);
    if (impl == nullptr || !is_plain(impl->key_set())) return false;
    keys_ = keys_ | impl->key_set();
    // Another thread may replace the object's tensor.
    using Owned = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    *found = Tensor(Owned::unsafe_reclaim_from_nonowning(impl));
    return !c10::isQIntType(found->scalar_type()) && !wants_gradient(*found);
  }

  bool token(int at) {
    const c10::TensorImpl* const impl = impl_of(objects_[at]);
    if (impl == nullptr || !is_plain(impl->key_set())) return false;
    keys_ = keys_ | impl->key_set();
    return true;
  }

  bool is_straight_with(int at) {
    c10::TensorImpl* const impl = impl_of(objects_[at]);
    if (impl == nullptr || !is_plain_anywhere(impl->key_set())) return false;
    keys_ = keys_ | impl->key_set();
    using Owned = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    const Tensor x(Owned::unsafe_reclaim_from_nonowning(impl));
    return !wants_gradient(x) && is_straight();
  }

  // As `check_out` of collectives/checks.py.
  bool out(int at, Tensor* found) {
    if (!tensor(at, found) || !found->is_contiguous()) return false;
    if (found->is_inference() && !c10::InferenceMode::is_enabled()) return false;
    const bool may_be_view = at::GradMode::is_enabled() && found->unsafeGetTensorImpl()->autograd_meta() != nullptr;
    return !may_be_view || !found->is_view() || !found->_base().requires_grad();
  }

  bool dim(int at, std::int64_t dims, std::int64_t* found) {
    if (!integer_of(objects_[at], found) || *found < -dims || *found >= dims) return false;
    if (*found < 0) *found += dims;
    resolved_at_ = at;
    resolved_ = *found;
    return true;
  }

  // None is the rank `after` this one, in a ring.
  bool peer(int at, const Served& served, int after, std::int64_t* found) {
    if (!none(at)) return integer(at, found);
    const int size = served.handle().size();
    *found = (served.handle().rank() + size + after) % size;
    resolved_at_ = at;
    resolved_ = *found;
    return true;
  }

  bool integer(int at, std::int64_t* found) const { return integer_of(objects_[at], found); }

  bool text(int at, string_view* found) const { return text_of(objects_[at], found); }
  // Python checks op="tree_sum": callers say order="tree" instead.
  bool op(int at, string_view* found) const { return text(at, found) && *found != "tree_sum"; }

  bool none(int at) const { return objects_[at] == facts->none; }

  bool sizes(int at, c10::SmallVector<std::int64_t, 8>* found) const {
    void* const object = objects_[at];
    const bool is_list = type_of(object) == facts->list_type;
    if (!is_list && type_of(object) != facts->tuple_type && type_of(object) != facts->size_type) return false;
    const std::ptrdiff_t count = is_list ? facts->list_size(object) : facts->tuple_size(object);
    for (std::ptrdiff_t index = 0; index < count; ++index) {
      std::int64_t size = 0;
      void* const item = is_list ? facts->list_item(object, index) : facts->tuple_item(object, index);
      if (item == nullptr || !integer_of(item, &size) || size < 0) return false;
      found->push_back(size);
    }
    return true;
  }

  bool dtype(int at, at::ScalarType* found) const {
    for (std::ptrdiff_t number = 0; number < facts->dtype_count; ++number) {
      *found = static_cast<at::ScalarType>(number);
      if (facts->dtypes[number] == objects_[at]) return true;
    }
    return false;
  }

  // True if torch's dispatcher would do nothing but call the op's kernel.
  bool is_straight() {
    const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
    keys_ = (keys_ | local.included_) - local.excluded_;
    return is_plain_anywhere(keys_) && !at::impl::torch_function_mode_enabled() &&
           !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
  }

  void written(const Tensor& x) const {
    if (keys_.has(DispatchKey::AutogradCPU) && !x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
  }

  void* in_python() const {
    const Repetition repetition{began_s_};
    std::array<void*, kMost> objects{};
    std::copy(objects_, objects_ + count_, objects.begin());
    void* const resolved = resolved_at_ < 0 ? nullptr : calling.make_integer(resolved_);
    if (resolved_at_ >= 0 && resolved == nullptr) return nullptr;
    if (resolved != nullptr) objects[resolved_at_] = resolved;
    void* const result = facts->call(twin_, objects.data(), count_, nullptr);
    if (resolved != nullptr) facts->let_go(resolved);
    return result;
  }

  void* in_python(void* object) const {
    void* const result = in_python();
    if (result == nullptr) return nullptr;
    facts->let_go(result);
    return same(object);
  }

  void leave_to_op() const { parallel_state::leave_to_op(began_s_); }

  void* object(int at) const { return objects_[at]; }
  void* none() const { return facts->none; }

 private:
  static constexpr std::ptrdiff_t kMost = 8;

  const double began_s_ = coarse_now_s();
  void* const twin_;
  void* const* const objects_;
  const std::ptrdiff_t count_;
  DispatchKeySet keys_;
  int resolved_at_ = -1;
  std::int64_t resolved_ = 0;
};

// Not in a handler or destructor: if the interpreter exits, taking its lock ends the thread.
template <typename Body>
Carried unlocked(Body body) {
  Carried carried = Carried::kFailed;
  std::exception_ptr thrown;
  void* const thread = calling.save_thread();
  try {
    carried = body();
  } catch (const std::exception&) {
    thrown = std::current_exception();
  }
  calling.restore_thread(thread);
  if (thrown != nullptr) std::rethrow_exception(thrown);
  return carried;
}

template <typename Call>
void* guarded(Call call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    facts->set_error(facts->runtime_error, error.what_without_backtrace());
  } catch (const std::exception& error) {
    facts->set_error(facts->runtime_error, error.what());
  }
  return nullptr;
}

template <typename Body>
void* made(const Given& given, Tensor* out, Body body) {
  const Carried carried = unlocked(body);
  if (carried == Carried::kNo) return not_mine();
  return carried == Carried::kYes ? facts->wrap(*out) : given.in_python();
}

template <typename Body>
void* filled(const Given& given, int at, const Tensor& x, Body body) {
  const Carried carried = unlocked(body);
  if (carried == Carried::kNo) return not_mine();
  if (carried == Carried::kFailed) return given.in_python(given.object(at));
  given.written(x);
  return same(given.object(at));
}

// An op with `out` has it after the token.
template <bool kInto, typename Body>
void* made_or_filled(const Given& given, Tensor* out, Body body) {
  return kInto ? filled(given, 2, *out, body) : made(given, out, body);
}

template <typename Call>
void* served_by(void* twin, void* const* objects, std::ptrdiff_t count, std::ptrdiff_t wanted, Call call) {
  return guarded([&]() -> void* {
    Given given{twin, objects, count};
    const auto served = given.are(wanted) ? given.served() : nullptr;
    return served == nullptr ? not_mine() : call(given, *served);
  });
}

std::int64_t dims_of(const Tensor& x) { return x.dim() == 0 ? 1 : x.dim(); }

template <bool kInPlace>
void* reducing(void* twin, void* const* objects, std::ptrdiff_t count) {
  return served_by(twin, objects, count, 4, [](Given& given, Served& served) {
    Tensor x, out;
    string_view op;
    if (!given.tensor(0, &x) || !given.op(2, &op) || !given.is_straight()) return not_mine();
    if (kInPlace) return filled(given, 0, x, [&] { return all_reduce_in_place(served, x, op); });
    return made(given, &out, [&] { return all_reduce(served, x, op, &out); });
  });
}

template <bool kInPlace>
void* broadcasting(void* twin, void* const* objects, std::ptrdiff_t count) {
  return served_by(twin, objects, count, 4, [](Given& given, Served& served) {
    Tensor x, out;
    std::int64_t src = 0;
    if (!given.tensor(0, &x) || !given.integer(2, &src) || !given.is_straight()) return not_mine();
    if (kInPlace) return filled(given, 0, x, [&] { return broadcast_in_place(served, x, src); });
    return made(given, &out, [&] { return broadcast(served, x, src, &out); });
  });
}

template <bool kInto>
void* gathering(void* twin, void* const* objects, std::ptrdiff_t count) {
  return served_by(twin, objects, count, 4 + kInto, [](Given& given, Served& served) {
    Tensor x, out;
    std::int64_t dim = 0;
    const bool is_mine = given.tensor(0, &x) && (!kInto || given.out(2, &out)) &&
                         given.dim(2 + kInto, dims_of(x), &dim) && given.is_straight();
    if (!is_mine) return not_mine();
    return made_or_filled<kInto>(given, &out, [&] { return all_gather(served, x, dim, &out); });
  });
}

template <bool kInto>
void* scattering(void* twin, void* const* objects, std::ptrdiff_t count) {
  return served_by(twin, objects, count, 5 + kInto, [](Given& given, Served& served) {
    Tensor x, out;
    std::int64_t dim = 0;
    string_view op;
    const bool is_mine = given.tensor(0, &x) && (!kInto || given.out(2, &out)) &&
                         given.dim(2 + kInto, dims_of(x), &dim) && given.op(3 + kInto, &op) && given.is_straight();
    if (!is_mine) return not_mine();
    return made_or_filled<kInto>(given, &out, [&] { return reduce_scatter(served, x, dim, op, &out); });
  });
}

template <bool kInto>
void* exchanging(void* twin, void* const* objects, std::ptrdiff_t count) {
  return served_by(twin, objects, count, 5 + kInto, [](Given& given, Served& served) {
    Tensor x, out;
    const bool is_mine = given.none(2 + kInto) && given.none(3 + kInto) && given.tensor(0, &x) &&
                         (!kInto || given.out(2, &out)) && given.is_straight();
    if (!is_mine) return not_mine();
    return made_or_filled<kInto>(given, &out, [&] { return all_to_all(served, x, {}, {}, &out); });
  });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void ps_set_direct(const void* told) { facts = static_cast<const Facts*>(told); }

void* ps_direct_all_reduce(void* twin, void* const* objects, std::ptrdiff_t count) {
  return reducing<false>(twin, objects, count);
}
void* ps_direct_all_reduce_(void* twin, void* const* objects, std::ptrdiff_t count) {
  return reducing<true>(twin, objects, count);
}
void* ps_direct_all_gather(void* twin, void* const* objects, std::ptrdiff_t count) {
  return gathering<false>(twin, objects, count);
}
void* ps_direct_all_gather_into(void* twin, void* const* objects, std::ptrdiff_t count) {
  return gathering<true>(twin, objects, count);
}
void* ps_direct_reduce_scatter(void* twin, void* const* objects, std::ptrdiff_t count) {
  return scattering<false>(twin, objects, count);
}
void* ps_direct_reduce_scatter_into(void* twin, void* const* objects, std::ptrdiff_t count) {
  return scattering<true>(twin, objects, count);
}
void* ps_direct_all_to_all(void* twin, void* const* objects, std::ptrdiff_t count) {
  return exchanging<false>(twin, objects, count);
}
void* ps_direct_all_to_all_into(void* twin, void* const* objects, std::ptrdiff_t count) {
  return exchanging<true>(twin, objects, count);
}
void* ps_direct_broadcast(void* twin, void* const* objects, std::ptrdiff_t count) {
  return broadcasting<false>(twin, objects, count);
}
void* ps_direct_broadcast_(void* twin, void* const* objects, std::ptrdiff_t count) {
  return broadcasting<true>(twin, objects, count);
}

void* ps_direct_gather(void* twin, void* const* objects, std::ptrdiff_t count) {
  return served_by(twin, objects, count, 5, [](Given& given, Served& served) {
    Tensor x, out;
    std::int64_t dim = 0, dst = 0;
    const bool is_mine =
        given.tensor(0, &x) && given.dim(2, dims_of(x), &dim) && given.integer(3, &dst) && given.is_straight();
    if (!is_mine) return not_mine();
    const Carried carried = unlocked([&] { return gather(served, x, dim, dst, &out); });
    if (carried == Carried::kNo) return not_mine();
    const bool gets = served.handle().rank() == dst;
    if (carried == Carried::kFailed) return gets ? given.in_python() : given.in_python(facts->none);
    return gets ? facts->wrap(out) : same(facts->none);
  });
}

void* ps_direct_scatter(void* twin, void* const* objects, std::ptrdiff_t count) {
  return served_by(twin, objects, count, 8, [](Given& given, Served& served) {
    Tensor x, out;
    c10::SmallVector<std::int64_t, 8> sizes;
    at::ScalarType dtype{};
    std::int64_t dim = 0, src = 0;
    bool is_mine = given.sizes(2, &sizes) && given.dtype(3, &dtype) && !sizes.empty() &&
                   given.dim(5, static_cast<std::int64_t>(sizes.size()), &dim) && given.integer(6, &src) &&
                   given.token(1);
    const bool gives = is_mine && served.handle().rank() == src;
    if (is_mine && gives) {
      auto whole = sizes;
      whole[dim] *= served.handle().size();
      is_mine = given.tensor(0, &x) && x.sizes() == at::IntArrayRef(whole) && x.scalar_type() == dtype;
    }
    if (!is_mine || !given.is_straight() || (!gives && !given.none(0))) return not_mine();
    return made(given, &out, [&] { return scatter(served, x, sizes, dtype, dim, src, &out); });
  });
}

void* ps_direct_barrier(void* twin, void* const* objects, std::ptrdiff_t count) {
  return served_by(twin, objects, count, 2, [](Given& given, Served& served) {
    if (!given.token(0) || !given.is_straight()) return not_mine();
    const Carried carried = unlocked([&] { return barrier(served); });
    return carried == Carried::kYes ? same(facts->none) : given.in_python();
  });
}

void* ps_direct_send(void* twin, void* const* objects, std::ptrdiff_t count) {
  return served_by(twin, objects, count, 4, [](Given& given, Served& served) {
    Tensor x;
    std::int64_t dst = 0;
    if (!given.tensor(0, &x) || !given.peer(2, served, 1, &dst) || !given.is_straight()) return not_mine();
    // Within a host `send` waits for no rank, so it keeps the interpreter lock.
    const auto sent = [&] { return send(served, x, dst); };
    const Carried carried = served.handle().hosts() == nullptr ? sent() : unlocked(sent);
    if (carried == Carried::kNo) return not_mine();
    return carried == Carried::kYes ? same(facts->none) : given.in_python();
  });
}

void* ps_direct_put(void*, void* const* objects, std::ptrdiff_t count) {
  if (facts == nullptr) return calling.make_integer(-1);
  return guarded([&]() -> void* {
    Given given{nullptr, objects, count};
    Tensor x;
    std::int64_t dst = 0, first = 0, signals = 0;
    const bool is_mine = given.are(5) && given.tensor(1, &x) && x.is_contiguous() && given.integer(2, &dst) &&
                         dst == static_cast<int>(dst) && given.integer(3, &first) && given.integer(4, &signals) &&
                         given.is_straight();
    if (!is_mine) return calling.make_integer(-1);
    return put_from_python(pointer_of(given.object(0)), static_cast<int>(dst), first, x.numel(),
                           static_cast<int>(x.scalar_type()), x.const_data_ptr(), signals != 0);
  });
}

void* ps_direct_recv(void* twin, void* const* objects, std::ptrdiff_t count) {
  return served_by(twin, objects, count, 6, [](Given& given, Served& served) {
    Tensor out;
    c10::SmallVector<std::int64_t, 8> sizes;
    at::ScalarType dtype{};
    std::int64_t src = 0;
    const bool is_mine = given.none(3) && given.token(0) && given.sizes(1, &sizes) && given.dtype(2, &dtype) &&
                         given.peer(4, served, -1, &src) && given.is_straight();
    if (!is_mine) return not_mine();
    const Carried carried = unlocked([&] { return receive(served, sizes, dtype, src, &out); });
    if (carried == Carried::kFailed) given.leave_to_op();
    return carried == Carried::kYes ? facts->wrap(out) : not_mine();
  });
}

// Returns x if the dispatch of an op on it has no effect, on any device.
void* ps_direct_straight(void*, void* const* objects, std::ptrdiff_t count) {
  return guarded([&]() -> void* {
    Given given{nullptr, objects, count};
    return given.are(1) && given.is_straight_with(0) ? same(objects[0]) : not_mine();
  });
}

}  // extern "C"
#pragma GCC visibility pop
