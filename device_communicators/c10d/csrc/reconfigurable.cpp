#include "reconfigurable.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

namespace parallel_state {

namespace {

constexpr std::int64_t kOwnHook = 0;

class Reconfigured final : public Operation {
 public:
  explicit Reconfigured(int rank) : Operation(rank, c10d::OpType::UNKNOWN, nullptr, {}, {}, 0) { finish(nullptr); }

 protected:
  bool await(std::optional<Clock::time_point>) override { return true; }
};

}  // namespace

ReconfigurableBackend::ReconfigurableBackend(int rank, int size, std::chrono::milliseconds timeout,
                                             Membership membership)
    : HookedBackend(rank, size), options_(c10::make_intrusive<Options>(timeout)), membership_(std::move(membership)) {
  init();
}

ReconfigurableBackend::~ReconfigurableBackend() { release_resources(); }

ReconfigurableBackend::Group ReconfigurableBackend::group(const char* method) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (group_) return group_;
  }
  std::rethrow_exception(membership_.no_group(method));
}

ReconfigurableBackend::Group ReconfigurableBackend::take_group() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(group_, nullptr);
}

ReconfigurableBackend::Started ReconfigurableBackend::reconfigure(const c10d::ReconfigureOptions& options) {
  Group made = membership_.reconfigure(options);
  made->setTimeout(options_->timeout);
#ifdef PARALLEL_STATE_HAS_HOOKS
  if (made->supportsCompletionHooks()) {
    made->registerCompletionHook(kOwnHook, [hooks = hooks_](const c10d::CompletionHookArgs& args) {
      hooks->completed.call(args.completionKey, args.duration_ms);
    });
    made->registerAbortHook(kOwnHook, [hooks = hooks_] { hooks->failed.call(); });
  }
#endif
  const std::lock_guard<std::mutex> lock(mutex_);
  rank_ = made->getRank();
  size_ = made->getSize();
  group_ = std::move(made);
  return c10::make_intrusive<Reconfigured>(rank_);
}

void ReconfigurableBackend::end_group() {
  const Group group = take_group();
  if (!group) return;
#ifdef PARALLEL_STATE_HAS_HOOKS
  if (group->supportsAbortHooks())
    group->unregisterAbortHook(kOwnHook);  // the next group replaces this one: not a failure
#endif
  group->abort();
}

void ReconfigurableBackend::abort() {
  const Group group = take_group();
  if (!group) return;
  membership_.revoke();
  group->abort();
}

void ReconfigurableBackend::shutdown() {
  if (const Group group = take_group()) group->shutdown();
  membership_.close();
}

void ReconfigurableBackend::release_resources() {
  if (!membership_.close) return;  // called a second time
  shutdown();
  membership_ = {};
}

void ReconfigurableBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (group_) group_->setTimeout(timeout);
}

void ReconfigurableBackend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (group_) group_->addEphemeralTimeout(timeout);
}

std::uint64_t ReconfigurableBackend::getSequenceNumberForGroup() {
  return group("get_sequence_number")->getSequenceNumberForGroup();
}

using Started = ReconfigurableBackend::Started;

Started ReconfigurableBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return group("all_reduce")->allreduce(tensors, options);
}

Started ReconfigurableBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return group("all_reduce")->allreduce_sparse(tensors, options);
}

Started ReconfigurableBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return group("all_reduce_coalesced")->allreduce_coalesced(tensors, options);
}

Started ReconfigurableBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return group("reduce")->reduce(tensors, options);
}

Started ReconfigurableBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return group("broadcast")->broadcast(tensors, options);
}

Started ReconfigurableBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) {
  return group("all_gather")->allgather(outputs, inputs, options);
}

Started ReconfigurableBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                   const c10d::AllgatherOptions& options) {
  return group("all_gather_coalesced")->allgather_coalesced(outputs, inputs, options);
}

Started ReconfigurableBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::AllgatherOptions& options) {
  return group("all_gather_into_tensor")->_allgather_base(output, input, options);
}

Started ReconfigurableBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const c10d::AllgatherOptions& options) {
  return group("all_gather_into_tensor")->allgather_into_tensor_coalesced(outputs, inputs, options);
}

Started ReconfigurableBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                      const c10d::GatherOptions& options) {
  return group("gather")->gather(outputs, inputs, options);
}

Started ReconfigurableBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const c10d::ScatterOptions& options) {
  return group("scatter")->scatter(outputs, inputs, options);
}

Started ReconfigurableBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                              const c10d::ReduceScatterOptions& options) {
  return group("reduce_scatter")->reduce_scatter(outputs, inputs, options);
}

Started ReconfigurableBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::ReduceScatterOptions& options) {
  return group("reduce_scatter_tensor")->_reduce_scatter_base(output, input, options);
}

Started ReconfigurableBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const c10d::ReduceScatterOptions& options) {
  return group("reduce_scatter_tensor")->reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

Started ReconfigurableBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                             std::vector<std::int64_t>& output_splits,
                                             std::vector<std::int64_t>& input_splits,
                                             const c10d::AllToAllOptions& options) {
  return group("all_to_all_single")->alltoall_base(output, input, output_splits, input_splits, options);
}

Started ReconfigurableBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return group("all_to_all")->alltoall(outputs, inputs, options);
}

Started ReconfigurableBackend::send(Tensors& tensors, int dst, int tag) {
  return group("send")->send(tensors, dst, tag);
}

Started ReconfigurableBackend::recv(Tensors& tensors, int src, int tag) {
  return group("recv")->recv(tensors, src, tag);
}

Started ReconfigurableBackend::recvAnysource(Tensors& tensors, int tag) {
  return group("recv")->recvAnysource(tensors, tag);
}

Started ReconfigurableBackend::barrier(const c10d::BarrierOptions& options) {
  return group("barrier")->barrier(options);
}

void ReconfigurableBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  group("monitored_barrier")->monitoredBarrier(options, wait_all_ranks);
}

void ReconfigurableBackend::startCoalescing() { group("start_coalescing")->startCoalescing(); }

Started ReconfigurableBackend::endCoalescing() { return group("end_coalescing")->endCoalescing(); }

ReconfigurableBackend::Group ReconfigurableBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                          const std::vector<int>& ranks,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  return group("split")->split(store, ranks, options);
}

ReconfigurableBackend::Group ReconfigurableBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& options,
                                                          const int& rank, const int& size) {
  return group("merge")->merge(store, options, rank, size);
}

ReconfigurableBackend::Group ReconfigurableBackend::shrink(const std::vector<std::int64_t>& excluded, int flags,
                                                           const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  return group("shrink_group")->shrink(excluded, flags, options);
}

}  // namespace parallel_state

#endif  // C10D_BACKEND_HAS_RECONFIGURE
