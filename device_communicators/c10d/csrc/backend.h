// A group uses shared memory on one host, else the library's transport between hosts if supported, else gloo. All ranks
// choose the same.
#pragma once

#include "../../cpu/csrc/call.h"
#include "deferred.h"
#include "pairs.h"

namespace parallel_state {

// Each callback takes the interpreter lock.
struct Callbacks {
  std::function<std::exception_ptr(int status, const char* method, double elapsed_s, double timeout_s)>
      collective_error;
  std::function<std::exception_ptr(int status, const char* method, int rank, double elapsed_s, double timeout_s)>
      window_error;
  Pairs::Raise pair_error;
  Interruption interruption;
  std::function<std::exception_ptr(const std::string& text, bool is_forked)> usage_error;
  std::function<void(std::chrono::milliseconds timeout, bool wait_all_ranks)> monitored_barrier;
  // Set by Python when the group fails: later calls raise the result of `failed`.
  std::shared_ptr<std::atomic<c10d::ErrorType>> error =
      std::make_shared<std::atomic<c10d::ErrorType>>(c10d::ErrorType::SUCCESS);
  std::function<std::exception_ptr(const char* method)> failed;
  std::function<void()> leave;
  std::function<c10::intrusive_ptr<c10d::Backend>()> make_gloo;
  std::function<void(const std::function<void()>&)> without_interpreter;
  std::function<std::exception_ptr(const char* text, const char* method, int peer, double elapsed_s)> gloo_error;
  std::function<void(std::chrono::milliseconds timeout)> set_timeout;
  std::function<void(bool is_busy)> suspend;  // raises if any rank is busy
  std::function<void()> resume;
  std::function<std::unordered_map<std::string, std::uint64_t>()> memory_stats;
  // Returns the path of the library and a group's number, for windows of a group of one rank.
  std::function<std::pair<std::string, std::uint64_t>()> group_of_one;
  using Group = c10::intrusive_ptr<c10d::Backend>;
  using Store = c10::intrusive_ptr<c10d::Store>;
  using Timeout = std::chrono::milliseconds;
  std::function<Group(const Store&, const std::vector<int>& ranks, Timeout timeout, const std::string& name)> split;
  std::function<Group(const Store&, int rank, int size, Timeout timeout, const std::string& name)> merge;
  // `renumber`: the new group's ranks are their own global ranks.
  std::function<Group(const std::vector<std::int64_t>& excluded, Timeout timeout, bool renumber)> shrink;
};

class Backend final : public HookedBackend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout) : c10d::Backend::Options("parallel_state", timeout) {}
    Options(const Options& other) : c10d::Backend::Options(other) {}
    // torch 2.15 copies options by this for a child group. No `override`: older versions lack it.
    virtual c10::intrusive_ptr<c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }
    std::function<void(std::chrono::milliseconds)> apply_timeout;
  };

  // `group`: 0 without `library`. `transfers`: null over gloo.
  Backend(int rank, int size, std::shared_ptr<const Library> library, std::uint64_t group, void* transfers,
          std::chrono::milliseconds timeout, Callbacks callbacks);
  ~Backend() override;

  const std::string getBackendName() const override { return "parallel_state"; }
  // A copy: torch before 2.15 writes a child group's timeout and name into it.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_->clone(); }
  const c10::intrusive_ptr<Options>& options() const { return options_; }
  const std::shared_ptr<CallLog>& calls() const { return calls_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  virtual void addEphemeralTimeout(const std::chrono::milliseconds& timeout);
  static std::atomic<std::int64_t> extended_ms;  // what `extended_deadline` adds to all calls of this process
  // No `override`: torch has them from 2.14 on.
  virtual void suspend();
  virtual void resume();
  virtual std::unordered_map<std::string, std::uint64_t> getMemoryStats();
  bool supportsSplitting() const override { return true; }
  // Only batch_isend_irecv asks; its coalescing manager stays open after an exception.
  bool supportsCoalescing() const override { return false; }
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
  virtual bool supportsShrinking() const { return size_ > 1; }
  virtual c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<std::int64_t>& excluded, int flags,
                                                   const c10::intrusive_ptr<c10d::Backend::Options>& options);
  virtual c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const c10::intrusive_ptr<c10d::Backend::Options>& options,
                                                  const int& rank, const int& size);
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return !is_on_gloo(); }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif
  // Python's object, which the callbacks hold, has only a weak pointer to this.
  void release_resources() override;

 private:
  friend class Window;
  struct Kind {
    c10d::OpType type;
    const char* method;
    const char* title;
    std::size_t list_length = 0;
  };

  struct CallOptions {
    template <typename Given>
    CallOptions(const Given& given) : asyncOp(given.asyncOp), timeout(given.timeout) {}
    bool asyncOp;
    std::chrono::milliseconds timeout;
  };

  Started submit(Kind kind, Tensors inputs, Tensors outputs, const CallOptions& options, std::function<void()> body);
  Started by_gloo(Kind kind, const std::function<Started(c10d::Backend&)>& start, Tensors averaged = {}, int peer = -1);
  Started transfer(Kind kind, Tensors& tensors, int peer, int tag, const std::function<Started(c10d::Backend&)>& start);
  Started kept(Started work);
  // Makes the call on copies of deferred tensors. Null if none is deferred.
  template <typename Written, typename Read, typename Call>
  Started resolved(Written& written, Read& read, Call call);
  template <typename Call>
  Started resolved(Tensors& tensors, bool is_written, Call call);
  Started filled(Started work, Targets targets);

  // A forked child has the memory, but is no rank.
  bool is_forked_child() const { return made_in_ != fork_generation(); }
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds requested) const;
  bool is_native() const { return group_ != 0; }
  bool is_on_gloo() const { return size_ > 1 && !is_native(); }
  const c10::intrusive_ptr<c10d::Backend>& gloo();
  void check_usable(const char* method);
  template <typename... Parts>
  void check(bool holds, const Parts&... parts) const;
  const at::Tensor& only(const Tensors& tensors, const char* method) const;
  void check_alike(const Tensors& tensors, const char* method) const;
  void check_dense(const at::Tensor& tensor, const char* method) const;
  void check_lists(std::size_t outputs, std::size_t inputs, const char* method) const;
  void check_parts(const at::Tensor& whole, const at::Tensor& part, const char* method, const char* which) const;
  void check_reduction(const c10d::ReduceOp& op, at::ScalarType dtype) const;
  void check_root(std::int64_t root, const char* method) const;
  void end(bool in_order);
  bool end_calls(bool in_order);
  void call_failure_hooks();
  void done(int status, const char* method, Clock::time_point started);
  template <typename Function, typename... Arguments>
  void call(const char* method, Told told, Function function, Arguments... arguments);
  struct Ephemeral {
    explicit Ephemeral(Backend& of);
    ~Ephemeral();
    Ephemeral(const Ephemeral&) = delete;
    Ephemeral& operator=(const Ephemeral&) = delete;
    Backend& backend;
    std::int64_t owned_ms = 0;
  };

  void all_reduce(const at::Tensor& x, const c10d::ReduceOp& op);
  void all_reduce_flat(const at::Tensor& x, const c10d::ReduceOp& op, int root = -1);
  void reduce_by_gathering(const at::Tensor& x, const c10d::ReduceOp& op);
  at::Tensor gather_rows(const Tensors& tensors);
  void all_gather_into(const at::Tensor& output, const at::Tensor& input);
  void all_gather_list(const Tensors& outputs, const at::Tensor& input);
  void reduce_scatter_into(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);

  const std::shared_ptr<const Library> library_;
  const std::uint64_t group_;
  const c10::intrusive_ptr<Options> options_;
  Callbacks callbacks_;
  const int made_in_;
  const std::shared_ptr<CallLog> calls_ = std::make_shared<CallLog>();
  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Pairs> pairs_;  // null: over gloo
  std::mutex gloo_mutex_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<bool> closed_{false}, suspended_{false};
  std::atomic<bool> stays_{false};
  std::atomic<std::int64_t> ephemeral_ms_{0};  // guarded by ephemeral_mutex_ when written
  std::int64_t owned_ephemeral_ms_ = 0;
  std::mutex ephemeral_mutex_;
  double timeout_s_ = 0;
  bool coalescing_ = false;
  std::vector<Started> coalesced_;
  Targets targets_;  // of `coalesced_`
};

}  // namespace parallel_state
