// A backend whose group `reconfigure` creates and replaces (torch 2.15), by c10d/membership.py.
#pragma once

#include "backend.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

namespace parallel_state {

class ReconfigurableBackend final : public HookedBackend {
 public:
  using Group = c10::intrusive_ptr<c10d::Backend>;
  using Handles = std::vector<std::string>;
  using Options = parallel_state::Backend::Options;
  using Tensors = parallel_state::Backend::Tensors;
  using Started = parallel_state::Backend::Started;

  // Each callback takes the interpreter lock.
  struct Membership {
    std::function<std::string()> handle;
    std::function<Group(const c10d::ReconfigureOptions& options)> reconfigure;
    std::function<std::exception_ptr(const char* method)> no_group;
    std::function<void()> revoke;
    std::function<void()> close;
  };

  ReconfigurableBackend(int rank, int size, std::chrono::milliseconds timeout, Membership membership);
  ~ReconfigurableBackend() override;

  const std::string getBackendName() const override { return "parallel_state"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_->clone(); }
  const c10::intrusive_ptr<Options>& options() const { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  virtual void addEphemeralTimeout(const std::chrono::milliseconds& timeout);
  virtual void suspend() { group("suspend")->suspend(); }
  virtual void resume() { group("resume")->resume(); }
  virtual std::unordered_map<std::string, std::uint64_t> getMemoryStats() {
    return group("memory_stats")->getMemoryStats();
  }
  bool supportsSplitting() const override { return true; }
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return membership_.handle(); }
  Started reconfigure(const c10d::ReconfigureOptions& options) override;
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override {
    return group("new_window")->new_window(tensor);
  }
#endif
  void end_group();
  void abort() override;
  void shutdown() override;
  void release_resources() override;

  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override;
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Started allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
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
  Started barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  void startCoalescing() override;
  Started endCoalescing() override;
  Group split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
              const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  Group merge(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::Backend::Options>& options,
              const int& rank, const int& size) override;
  bool supportsShrinking() const override { return true; }
  Group shrink(const std::vector<std::int64_t>& excluded, int flags,
               const c10::intrusive_ptr<c10d::Backend::Options>& options) override;

 private:
  Group group(const char* method);
  Group take_group();

  const c10::intrusive_ptr<Options> options_;
  Membership membership_;
  std::mutex mutex_;
  Group group_;  // guarded by mutex_; null before the first `reconfigure`, during each, and after `abort`
};

}  // namespace parallel_state

#endif  // C10D_BACKEND_HAS_RECONFIGURE
