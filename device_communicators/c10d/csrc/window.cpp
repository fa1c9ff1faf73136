#include "window.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include <tuple>

#include "../../cpu/csrc/group.h"
#include "../../cpu/csrc/window_part.h"

namespace parallel_state {
namespace {

constexpr auto kSize = static_cast<std::size_t>(WindowPart::kWords);

const WindowPart& part_of(const std::vector<std::int64_t>& words, std::int64_t rank) {
  return reinterpret_cast<const WindowPart*>(words.data())[rank];
}

double seconds(std::chrono::duration<double> duration) { return duration.count(); }

class Done final : public Operation {
 public:
  explicit Done(int rank) : Operation(rank, c10d::OpType::UNKNOWN, nullptr, {}, {}, 0) { finish(nullptr); }

 protected:
  bool await(std::optional<Clock::time_point>) override { return true; }
};

}  // namespace

class Window::Signalled final : public Operation {
 public:
  Signalled(c10::intrusive_ptr<Window> window, int src, double timeout_s)
      : Operation(window->backend_->rank_, c10d::OpType::UNKNOWN, nullptr, {}, {}, 0),
        window_(std::move(window)),
        src_(src),
        timeout_s_(timeout_s) {}

  bool isCompleted() override {
    if (Operation::isCompleted()) return true;
    const std::unique_lock<std::mutex> lock(taking_, std::try_to_lock);
    if (lock.owns_lock() && !Operation::isCompleted()) try_take(0);
    return Operation::isCompleted();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK_NOT_IMPLEMENTED(isCompleted(), "a started wait_signal has no future before it is done: call its wait");
    return Operation::getFuture();
  }

 protected:
  bool await(std::optional<Clock::time_point> deadline) override {
    double timeout_s = timeout_s_;
    if (deadline) timeout_s = std::min(timeout_s, std::max(0.0, seconds(*deadline - Clock::now())));
    const std::lock_guard<std::mutex> lock(taking_);
    return Operation::isCompleted() || try_take(timeout_s);
  }

 private:
  bool try_take(double timeout_s) {
    const auto started = Clock::now();
    const int status = window_->take(src_, timeout_s);
    if (status == static_cast<int>(Status::kTimedOut) && timeout_s < timeout_s_) return false;
    try {
      window_->done(status, "wait_signal", src_, started, timeout_s);
      finish(nullptr);
    } catch (...) {
      if (status == static_cast<int>(Status::kInterrupted)) throw;
      finish(std::current_exception());
    }
    return true;
  }

  const c10::intrusive_ptr<Window> window_;
  const int src_;
  const double timeout_s_;
  std::mutex taking_;
};

c10::intrusive_ptr<c10d::Window> Backend::new_window(const std::optional<at::Tensor>& tensor) {
  check_usable("new_window");
  TORCH_CHECK_NOT_IMPLEMENTED(!is_on_gloo(), "windows of backend 'parallel_state' need the compiled collectives");
  auto library = library_;
  auto group = group_;
  if (!is_native()) {
    std::string path;
    std::tie(path, group) = callbacks_.group_of_one();
    library = std::make_shared<const Library>(path);
  }
  auto made = c10::make_intrusive<Window>(c10::intrusive_ptr<Backend>::reclaim_copy(this), library, group);
  if (tensor) made->tensor_register(*tensor, true);
  return made;
}

void Window::check(const char* method) {
  backend_->check_usable(method);
  TORCH_CHECK_WITH(DistBackendError, !backend_->closed_, method, " of a window: its group was destroyed or aborted");
  TORCH_CHECK_VALUE(opened_, method, " of a window without memory: call tensor_register first, on all ranks");
}

template <typename Options>
void Window::check(const char* method, const Options& options) {
  check(method);
  TORCH_CHECK_NOT_IMPLEMENTED(options.hints.empty(), method, " of backend 'parallel_state' has no hint '",
                              options.hints.begin()->first, "'");
}

void Window::done(int status, const char* method, std::int64_t rank, Clock::time_point started, double timeout_s) {
  if (status == static_cast<int>(Status::kDone)) return;
  TORCH_CHECK_WITH(DistBackendError, !backend_->closed_ || status == static_cast<int>(Status::kInterrupted),
                   "the group was destroyed or aborted while ", method, " was under way");
  std::rethrow_exception(backend_->callbacks_.window_error(status, method, static_cast<int>(rank),
                                                           seconds(Clock::now() - started), timeout_s));
}

void Window::tensor_register(const at::Tensor& tensor, bool owning) {
  constexpr const char* kMethod = "tensor_register";
  TORCH_CHECK_VALUE(!opened_, kMethod, ": the window has a tensor already: deregister that first");
  backend_->check_dense(tensor, kMethod);
  TORCH_CHECK_VALUE(tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(), kMethod,
                    " takes a contiguous tensor with its values in memory: call contiguous() and resolve_conj()");
  const auto started = Clock::now();
  WindowPart own;
  own.bytes = static_cast<std::int64_t>(tensor.nbytes());
  own.elements = tensor.numel();
  own.dtype = static_cast<std::int64_t>(tensor.scalar_type());
  const at::IntArrayRef shape = tensor.sizes();
  own.dims = std::min<std::int64_t>(1, tensor.numel());
  own.sizes[0] = tensor.numel();
  if (shape.size() <= WindowPart::kMostDims) {
    own.dims = tensor.dim();
    std::copy(shape.begin(), shape.end(), own.sizes);
  }
  const auto library = library_;
  at::Tensor part = at::empty({WindowPart::kWords}, at::kLong);
  at::Tensor all = at::empty({WindowPart::kWords * backend_->getSize()}, at::kLong);
  auto* const words = part.mutable_data_ptr<std::int64_t>();
  std::memcpy(words, &own, sizeof own);
  std::shared_ptr<void> opened(library->window_new(group_, words, tensor.const_data_ptr()), [library](void* last) {
    if (last != nullptr) library->window_delete(last);
  });
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  backend_->_allgather_base(all, part, options);
  TORCH_CHECK_WITH(DistBackendError, opened, "there is no memory for a window, or its group was destroyed");
  const auto* const begin = all.const_data_ptr<std::int64_t>();
  parts_.assign(begin, begin + all.numel());
  done(library->window_open(opened.get(), parts_.data()), kMethod, backend_->rank_, started);
  if (owning) tensor_ = tensor;
  opened_ = std::move(opened);
}

void Window::tensor_deregister() {
  check("tensor_deregister");
  const auto started = Clock::now();
  c10d::BarrierOptions options;
  options.asyncOp = false;
  backend_->barrier(options);
  int status = 0;
  backend_->callbacks_.without_interpreter([&] { status = library_->window_end(opened_.get()); });
  done(status, "tensor_deregister", backend_->rank_, started);
  opened_.reset();
  tensor_.reset();
}

Window::Started Window::put(const at::Tensor& tensor, std::int64_t dst, std::int64_t first_element, bool,
                            const c10d::PutOptions& options) {
  check("put", options);
  backend_->check_dense(tensor, "put");
  const auto started = Clock::now();
  const at::Tensor given = tensor.resolve_conj().resolve_neg().contiguous();
  const auto run = [&] {
    const CallLog::Scope scope(*backend_->calls_, backend_->getSequenceNumberForGroup(), "put", given,
                               static_cast<int>(dst));
    done(library_->window_put(opened_.get(), static_cast<int>(dst), first_element, given.numel(),
                              static_cast<int>(given.scalar_type()), given.const_data_ptr()),
         "put", dst, started);
  };
  backend_->callbacks_.without_interpreter(run);
  return c10::make_intrusive<Done>(backend_->rank_);
}

at::Tensor Window::map_remote_tensor(std::int64_t rank) {
  check("map_remote_tensor");
  void* found = nullptr;
  done(library_->window_memory(opened_.get(), static_cast<int>(rank), &found), "map_remote_tensor", rank, Clock::now());
  const WindowPart& part = part_of(parts_, rank);
  const at::IntArrayRef shape(part.sizes, static_cast<std::size_t>(part.dims));
  const at::TensorOptions options = at::TensorOptions(static_cast<at::ScalarType>(part.dtype));
  return at::from_blob(found, shape, [opened = opened_](void*) {}, options);
}

Window::Started Window::signal(std::int64_t peer, bool, const c10d::SignalOptions& options) {
  check("signal", options);
  const auto started = Clock::now();
  int status = 0;
  backend_->callbacks_.without_interpreter(
      [&] { status = library_->window_signal(opened_.get(), static_cast<int>(peer)); });
  done(status, "signal", peer, started);
  return c10::make_intrusive<Done>(backend_->rank_);
}

int Window::take(int src, double timeout_s) {
  if (!opened_) return static_cast<int>(Status::kClosed);
  const CallLog::Scope scope(*backend_->calls_, backend_->getSequenceNumberForGroup(), "wait_signal", {}, src);
  int status = 0;
  const std::shared_ptr<void> opened = opened_;
  backend_->callbacks_.without_interpreter([&] { status = library_->window_wait(opened.get(), src, timeout_s); });
  return status;
}

Window::Started Window::wait_signal(std::int64_t peer, bool is_async, const c10d::WaitSignalOptions& options) {
  check("wait_signal", options);
  const int src = static_cast<int>(peer);
  const double timeout_s = seconds(backend_->timeout_of(options.timeout));
  if (is_async) {
    get_attr(peer);
    return c10::make_intrusive<Signalled>(c10::intrusive_ptr<Window>::reclaim_copy(this), src, timeout_s);
  }
  const auto started = Clock::now();
  done(take(src, timeout_s), "wait_signal", peer, started, timeout_s);
  return c10::make_intrusive<Done>(backend_->rank_);
}

c10d::WindowAttr Window::get_attr(std::int64_t peer) {
  check("get_attr");
  void* found = nullptr;
  const int status = library_->window_memory(opened_.get(), static_cast<int>(peer), &found);
  const bool is_apart = status == static_cast<int>(Status::kUnsupported);
  if (!is_apart) done(status, "get_attr", peer, Clock::now());
  c10d::WindowAttr made;
  if (is_apart || part_of(parts_, peer).is_copy != 0) made.access_type = c10d::WindowAccessType::SEPARATE;
  return made;
}

}  // namespace parallel_state

#endif  // C10D_BACKEND_HAS_WINDOW
