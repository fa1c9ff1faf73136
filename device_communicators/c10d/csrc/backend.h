// torch.distributed's collectives and transfers over the memory that a host's ranks share.
//
// A group whose ranks are all on one host works in its segment (device_communicators/cpu). Every other group, and every
// call that shared memory has no form of, is gloo's, which is made when the first such call comes: whether it does is
// decided by facts that all ranks have alike.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "pairs.h"

namespace parallel_state {

// What Python does for a backend; each takes the interpreter's lock by itself.
struct Callbacks {
  // The error for a status of group.h, of a collective that `method` names.
  std::function<std::exception_ptr(int status, const char* method, double elapsed_s)> collective_error;
  Pairs::Raise pair_error;
  std::function<std::exception_ptr(const std::string& text)> usage_error;
  std::function<void(std::chrono::milliseconds timeout, bool wait_all_ranks)> monitored_barrier;
  std::function<c10::intrusive_ptr<c10d::Backend>()> make_gloo;
  std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                                  std::chrono::milliseconds timeout, const std::string& name)>
      split;
};

class Backend final : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout) : c10d::Backend::Options("parallel_state", timeout) {}
  };

  // `group` is the number of the shared-memory group, 0 where there is none; `library` may be null then.
  Backend(int rank, int size, std::shared_ptr<const Library> library, std::uint64_t group, QueuePlaces places,
          std::chrono::milliseconds timeout, Callbacks callbacks);
  ~Backend() override;

  const std::string getBackendName() const override { return "parallel_state"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_.load(std::memory_order_relaxed); }

  using Tensors = std::vector<at::Tensor>;
  using Started = c10::intrusive_ptr<c10d::Work>;

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
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

 private:
  struct Kind {  // of a call, as it is recorded
    c10d::OpType type;
    const char* method;
    const char* title;
  };

  template <typename Body>
  Started submit(Kind kind, Tensors inputs, Tensors outputs, bool is_async, std::chrono::milliseconds timeout,
                 Body body);
  Started transfer(Kind kind, Tensors& tensors, int peer, int tag);
  Started kept(Started work);

  bool shares_memory() const { return group_ != 0; }
  const c10::intrusive_ptr<c10d::Backend>& gloo();
  void check_usable();
  template <typename... Parts>
  void check(bool holds, const Parts&... parts) const;
  const at::Tensor& only(const Tensors& tensors, const char* method) const;
  void check_dense(const at::Tensor& tensor, const char* method) const;
  void check_lists(std::size_t outputs, std::size_t inputs, const char* method) const;
  void check_root(std::int64_t root, const char* method) const;
  void done(int status, const char* method, Clock::time_point started);

  // The steps of the calls, in whichever thread runs them.
  void all_reduce(const at::Tensor& x, const c10d::ReduceOp& op);
  void all_reduce_flat(const at::Tensor& x, const c10d::ReduceOp& op);
  void reduce_by_gathering(const at::Tensor& x, const c10d::ReduceOp& op);
  void all_gather_into(const at::Tensor& output, const at::Tensor& input);
  void all_gather_list(const Tensors& outputs, const at::Tensor& input);
  void reduce_scatter_into(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);

  const std::shared_ptr<const Library> library_;
  const std::uint64_t group_;
  const c10::intrusive_ptr<Options> options_;
  const Callbacks callbacks_;
  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Pairs> pairs_;
  std::mutex gloo_mutex_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<bool> closed_{false};
  bool coalescing_ = false;
  std::vector<Started> coalesced_;
};

}  // namespace parallel_state
