// torch defers conjugations, negations and zeros: a tensor's memory has other numbers or none. A call uses copies with
// the values.
#pragma once

#include <functional>
#include <utility>

#include "backend.h"

namespace parallel_state {

class ResolvingBackend final : public Backend {
 public:
  using Backend::Backend;

  using Targets = std::vector<std::pair<at::Tensor, at::Tensor>>;

  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Started allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Started allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Started allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  Started gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Started scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Started reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  Started _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  Started reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  Started alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Started alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Started send(Tensors& tensors, int dst, int tag) override;
  Started recv(Tensors& tensors, int src, int tag) override;
  Started recvAnysource(Tensors& tensors, int tag) override;
  void startCoalescing() override;
  Started endCoalescing() override;

 private:
  template <typename Written, typename Read, typename Call>
  Started resolved(Written& written, Read& read, Call call);
  Started filled(Started work, Targets targets);

  bool coalescing_ = false;
  Targets coalesced_;
};

}  // namespace parallel_state
