#include "deferred.h"

#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend.h"

namespace parallel_state {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

bool is_deferred(const Tensor& x) {
  constexpr DispatchKeySet deferred({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor});
  return x.defined() && x.key_set().has_any(deferred);
}

Tensor with_values(const Tensor& x) { return is_deferred(x) ? x.clone(at::MemoryFormat::Contiguous) : x; }

Tensor staged(const Tensor& x, Targets* targets) {
  if (!is_deferred(x)) return x;
  TORCH_CHECK_VALUE(!x._is_zerotensor(),
                    "a tensor that is written to must have memory, but is torch's efficient zero tensor: clone it");
  targets->emplace_back(x, with_values(x));
  return targets->back().second;
}

namespace {

class Filled final : public c10d::Work {
 public:
  Filled(int rank, Backend::Started work, Targets targets)
      : Work(rank, work->retrieveOpType()), work_(std::move(work)), targets_(std::move(targets)) {}

  bool isCompleted() override {
    if (!work_->isCompleted()) return false;
    if (work_->isSuccess()) fill();
    return true;
  }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }
  float getDuration() const override { return work_->getDuration(); }
#ifdef PARALLEL_STATE_HAS_HOOKS
  std::uint64_t getCompletionKey() const override { return work_->getCompletionKey(); }
#endif
  std::vector<Tensor> result() override {
    std::vector<Tensor> found = work_->result();
    for (Tensor& each : found) each = target_of(each);
    return found;
  }
  void synchronize() override {
    work_->synchronize();
    static_cast<void>(isCompleted());
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = work_->wait(timeout);
    fill();
    return done;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto self = c10::intrusive_ptr<Filled>::reclaim_copy(this);
    return work_->getFuture()->then(
        [self](c10::ivalue::Future& done) {
          const c10::IValue value = done.value();
          self->fill();
          return self->with_targets(value);
        },
        c10::AnyType::get());
  }

 private:
  Tensor target_of(const Tensor& x) const {
    for (const auto& [target, held] : targets_) {
      if (x.is_same(held)) return target;
    }
    return x;
  }

  c10::IValue with_targets(const c10::IValue& value) const {
    if (value.isTensor()) return target_of(value.toTensor());
    if (!value.isList()) return value;
    const c10::List<c10::IValue> list = value.toList();
    c10::impl::GenericList found(list.elementType());
    for (const c10::IValue& each : list) found.push_back(with_targets(each));
    return found;
  }

  void fill() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_filled_) return;
    const at::AutoDispatchBelowADInplaceOrView below;  // like an in-place write
    for (const auto& [target, held] : targets_) target.copy_(held);
    is_filled_ = true;
  }

  const Backend::Started work_;
  const Targets targets_;
  bool is_filled_ = false;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> fill_when_done(int rank, c10::intrusive_ptr<c10d::Work> work, Targets targets) {
  auto made = c10::make_intrusive<Filled>(rank, std::move(work), std::move(targets));
  static_cast<void>(made->isCompleted());
  return made;
}

// torch's own kernel for deferred tensors passes a copy to the backend, and loses the backend's writes.

namespace {

bool is_of_this_backend(const c10::OperatorHandle& op, const c10::IValue* given) {
  const auto& arguments = op.schema().arguments();
  std::optional<c10::DeviceType> device;
  const auto look = [&device](const Tensor& x) {
    if (!device.has_value() && x.defined()) device = x.device().type();
  };
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    if (arguments[at].name() == "process_group") group = given[at].toCustomClass<c10d::ProcessGroup>();
    else if (given[at].isTensor()) look(given[at].toTensor());
    else if (given[at].isTensorList()) {
      for (const Tensor& each : given[at].toTensorVector()) look(each);
    }
  }
  if (!group || !device.has_value()) return false;
  try {
    return dynamic_cast<Backend*>(group->getBackend(*device).get()) != nullptr;
  } catch (const std::exception&) {
    return false;
  }
}

// Copies deferred tensors for other backends, as torch does.
template <DispatchKey kKey>
void hand_on(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  c10::IValue* const given = stack->data() + (stack->size() - op.schema().arguments().size());
  if (!is_of_this_backend(op, given)) {
    for (std::size_t at = 0; at < op.schema().arguments().size(); ++at) {
      if (given[at].isTensor()) given[at] = with_values(given[at].toTensor());
      else if (given[at].isTensorList()) given[at] = with_values(given[at].toTensorVector());
    }
  }
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey), stack);
}

template <DispatchKey kKey>
void add_all(torch::Library& library) {
  for (const char* const name :
       {"allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_", "allgather_", "allgather_coalesced_",
        "_allgather_base_", "allgather_into_tensor_coalesced_", "gather_", "scatter_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_base_", "alltoall_", "send", "recv_",
        "recv_any_source_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&hand_on<kKey>>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(c10d, Conjugate, library) { add_all<DispatchKey::Conjugate>(library); }
TORCH_LIBRARY_IMPL(c10d, Negative, library) { add_all<DispatchKey::Negative>(library); }
TORCH_LIBRARY_IMPL(c10d, ZeroTensor, library) { add_all<DispatchKey::ZeroTensor>(library); }

}  // namespace parallel_state
