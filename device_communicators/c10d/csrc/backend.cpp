#include "backend.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/view_as_real.h>

#include <torch/csrc/distributed/c10d/exception.h>

#include "../../cpu/csrc/call.h"
#include "../../cpu/csrc/floating_point.h"
#include "../../cpu/csrc/group.h"

namespace parallel_state {
namespace {

using at::Tensor;
using c10::DistBackendError;
using c10d::OpType;
using RedOp = c10d::ReduceOp::RedOpType;

constexpr std::size_t kPromptBytes = 64 << 10;
constexpr auto kShutdownGrace = std::chrono::seconds(2);

struct Native {
  Dtype dtype;
  ReduceOp op;
};

bool native_of(at::ScalarType dtype, RedOp op, Native* found) {
  const bool is_bool = dtype == at::kBool;
  switch (op) {
    case RedOp::SUM: found->op = is_bool ? ReduceOp::kMax : ReduceOp::kSum; break;
    case RedOp::AVG:
      if (is_bool) return false;
      found->op = ReduceOp::kAverage;
      break;
    case RedOp::PRODUCT: found->op = is_bool ? ReduceOp::kMin : ReduceOp::kProduct; break;
    case RedOp::MIN: found->op = ReduceOp::kMin; break;
    case RedOp::MAX: found->op = ReduceOp::kMax; break;
    case RedOp::BAND:
      if (!is_bool) return false;
      found->op = ReduceOp::kMin;
      break;
    case RedOp::BOR:
      if (!is_bool) return false;
      found->op = ReduceOp::kMax;
      break;
    default: return false;
  }
  switch (dtype) {
    case at::kFloat: found->dtype = Dtype::kFloat32; return true;
    case at::kDouble: found->dtype = Dtype::kFloat64; return true;
    case at::kHalf: found->dtype = Dtype::kFloat16; return true;
    case at::kBFloat16: found->dtype = Dtype::kBfloat16; return true;
    case at::kChar: found->dtype = Dtype::kInt8; return true;
    case at::kShort: found->dtype = Dtype::kInt16; return true;
    case at::kInt: found->dtype = Dtype::kInt32; return true;
    case at::kLong: found->dtype = Dtype::kInt64; return true;
    case at::kByte:
    case at::kBool: found->dtype = Dtype::kUint8; return true;
    default: return false;
  }
}

// Numbers of user_call.py; reductions that only torch has follow.
int number_of(RedOp op) {
  switch (op) {
    case RedOp::SUM: return 0;
    case RedOp::MAX: return 1;
    case RedOp::MIN: return 2;
    case RedOp::PRODUCT: return 3;
    case RedOp::AVG: return 4;
    default: return 5 + static_cast<int>(op);
  }
}

bool is_narrow_float(at::ScalarType dtype) { return at::isFloatingType(dtype) && c10::elementSize(dtype) == 1; }

constexpr auto kReduceMethod = static_cast<Method>(152), kGatherMethod = static_cast<Method>(96),
               kScatterMethod = static_cast<Method>(104), kAllGathervMethod = static_cast<Method>(40);

Told tell(Method method, const Tensor& x, int reduction = -1, std::int64_t root = -1) {
  return told_of(method, x.sizes(), static_cast<int>(x.scalar_type()), reduction, -1, static_cast<int>(root));
}

std::size_t bytes_of(const std::vector<Tensor>& tensors) {
  std::size_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

std::exception_ptr error_of(const char* text) {
  return std::make_exception_ptr(DistBackendError(text, nullptr, nullptr));
}

// Kernels write past autograd; so do the copies around them.
struct Below {
  at::AutoDispatchBelowADInplaceOrView guard;
};

// torch runs up to this many elements in the calling thread.
constexpr std::int64_t kOneThreadElements = 32768;

void divide_(const Tensor& x, std::int64_t divisor) {
  const DefaultFloatingPoint state;
  const at::ScalarType dtype = x.scalar_type();
  if (!at::isIntegralType(dtype, /*includeBool=*/true)) {
    x.div_(divisor);
  } else if (dtype == at::kUInt64) {
    const Tensor flat = x.contiguous();
    auto* const numbers = static_cast<std::uint64_t*>(flat.mutable_data_ptr());
    for (std::int64_t i = 0; i < flat.numel(); ++i) numbers[i] /= static_cast<std::uint64_t>(divisor);
    if (!flat.is_same(x)) x.copy_(flat);
  } else {  // int8 can't hold 128 ranks
    x.copy_(x.to(at::kLong).div_(divisor, "trunc"));
  }
}

// gloo has no averages: `averaged` are divided when its work is done.
class Borrowed final : public c10d::Work {
 public:
  using Name = std::function<std::exception_ptr(const char* text, double elapsed_s)>;

  Borrowed(int rank, OpType type, Backend::Started work, Name name, std::vector<Tensor> averaged, int size,
           std::shared_ptr<const Hooks> hooks)
      : Work(rank, type),
        work_(std::move(work)),
        name_(std::move(name)),
        started_(Clock::now()),
        hooks_(std::move(hooks)),
        size_(size) {
    if (averaged.empty() && hooks_->completed.is_empty()) return;
    c10::intrusive_ptr<c10::ivalue::Future> summed;
    try {
      summed = work_->getFuture();
    } catch (const c10::Error&) {  // gloo's transfers; its works of reduce_scatter write their outputs in `wait`
      averaged_at_wait_ = std::move(averaged);
      ends_at_wait_ = true;
      return;
    }
    const auto completed = [hooks = hooks_, key = key_](c10::ivalue::Future& done) {
      if (!done.hasError()) hooks->completed.call(key, std::nullopt);
    };
    if (averaged.empty()) {
      summed->addCallback(completed);
      return;
    }
    averaged_ = summed->then(
        [averaged = std::move(averaged), size](c10::ivalue::Future& done) {
          c10::IValue value = done.value();
          const Below below;
          for (const Tensor& x : averaged) divide_(x, size);
          return value;
        },
        summed->elementType());
    averaged_->addCallback(completed);
  }

  bool isCompleted() override { return averaged_ ? averaged_->completed() : work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
#ifdef PARALLEL_STATE_HAS_HOOKS
  std::uint64_t getCompletionKey() const override { return key_; }
#endif
  std::vector<Tensor> result() override {
    const bool is_transfer = opType_ == OpType::SEND || opType_ == OpType::RECV || opType_ == OpType::RECVANYSOURCE;
    return is_transfer ? std::vector<Tensor>{} : work_->result();
  }
  void synchronize() override { work_->synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return averaged_ ? averaged_ : work_->getFuture(); }
  bool wait(std::chrono::milliseconds timeout) override {
    try {
      const bool is_done = work_->wait(timeout);
      if (averaged_) averaged_->wait();
      std::call_once(waited_, [this] {
        const Below below;
        for (const Tensor& x : averaged_at_wait_) divide_(x, size_);
        if (ends_at_wait_) hooks_->completed.call(key_, std::nullopt);
      });
      return is_done;
    } catch (const std::exception& error) {
      if (timeout > kNoTimeout && !work_->isCompleted()) throw;  // only the wait timed out
      const double elapsed_s = std::chrono::duration<double>(Clock::now() - started_).count();
      if (const std::exception_ptr named = name_(error.what(), elapsed_s)) std::rethrow_exception(named);
      throw;
    }
  }

 private:
  const Backend::Started work_;
  const Name name_;
  const Clock::time_point started_;
  c10::intrusive_ptr<c10::ivalue::Future> averaged_;
  std::vector<Tensor> averaged_at_wait_;
  std::once_flag waited_;
  const std::shared_ptr<const Hooks> hooks_;
  const int size_;
  const std::uint64_t key_ = new_key();
  bool ends_at_wait_ = false;
};

bool all_contiguous(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) {
    if (!tensor.is_contiguous()) return false;
  }
  return true;
}

// torch views only stride 1 as bytes, but a tensor of one element is contiguous with any.
Tensor as_bytes(const Tensor& x) { return x.as_strided({x.numel()}, {1}).view(at::kByte); }

struct Extent {
  const char* begin;
  const char* end;
};

Extent extent_of(const Tensor& x) {
  if (x.numel() == 0) return {nullptr, nullptr};
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < x.dim(); ++dim) last += (x.size(dim) - 1) * x.stride(dim);
  const auto* const begin = static_cast<const char*>(x.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<std::int64_t>(x.element_size())};
}

bool overlap(const Extent& a, const Extent& b) { return a.begin < b.end && b.begin < a.end; }

bool overlap(const Tensor& a, const Tensor& b) { return overlap(extent_of(a), extent_of(b)); }

bool any_overlap(const std::vector<Tensor>& tensors) {
  std::vector<Extent> extents;
  for (const Tensor& tensor : tensors) {
    if (tensor.numel() != 0) extents.push_back(extent_of(tensor));
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  const char* end = nullptr;
  for (const Extent& each : extents) {
    if (each.begin < end) return true;
    end = std::max(end, each.end);
  }
  return false;
}

// Tensors are divided in place, so each must occur once.
std::vector<Tensor> once_each(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> found;
  for (const Tensor& x : tensors) {
    const auto is_same = [&x](const Tensor& y) {
      return x.const_data_ptr() == y.const_data_ptr() && x.sizes() == y.sizes() && x.strides() == y.strides();
    };
    if (std::none_of(found.begin(), found.end(), is_same)) found.push_back(x);
  }
  TORCH_CHECK_VALUE(!any_overlap(found), "AVG over gloo takes tensors that don't overlap: pass copies");
  return found;
}

// Copied if an output overlaps `input`, except `outputs[own]` at its address.
Tensor apart(const Tensor& input, const std::vector<Tensor>& outputs, int own) {
  const Tensor in = input.contiguous();
  if (!in.is_same(input)) return in;
  for (int index = 0; index < static_cast<int>(outputs.size()); ++index) {
    const bool is_same =
        index == own && outputs[index].is_contiguous() && outputs[index].const_data_ptr() == in.const_data_ptr();
    if (!is_same && overlap(outputs[index], in)) return in.clone();
  }
  return in;
}

// Copied if `part` overlaps `whole`, except at the place of rank `own`.
Tensor apart_from_whole(const Tensor& part, const Tensor& whole, int own) {
  const auto* const place = static_cast<const char*>(whole.const_data_ptr()) + own * part.nbytes();
  return place != part.const_data_ptr() && overlap(part, whole) ? part.clone() : part;
}

std::vector<Tensor> before_writes(std::vector<Tensor> inputs,
                                  const std::function<std::vector<Tensor>(std::size_t call)>& outputs_of) {
  std::vector<Extent> written;
  for (std::size_t call = 0; call < inputs.size(); ++call) {
    const Extent read = extent_of(inputs[call]);
    const auto is_over = [&](const Extent& each) { return overlap(each, read); };
    if (std::any_of(written.begin(), written.end(), is_over)) inputs[call] = inputs[call].clone();
    for (const Tensor& output : outputs_of(call)) written.push_back(extent_of(output));
  }
  return inputs;
}

Tensor reduce_rows(const Tensor& rows, RedOp op) {
  const at::ScalarType dtype = rows.scalar_type();
  if (rows.size(1) > kOneThreadElements) {  // torch's threads have their own floating-point state
    Tensor total = at::empty({rows.size(1)}, rows.options());
    for (std::int64_t begin = 0; begin < rows.size(1); begin += kOneThreadElements) {
      const std::int64_t length = std::min(kOneThreadElements, rows.size(1) - begin);
      total.narrow(0, begin, length).copy_(reduce_rows(rows.narrow(1, begin, length), op));
    }
    return total;
  }
  // torch has few operators for these. Flipping the highest bit keeps uint64's order.
  const bool is_unsigned = dtype == at::kUInt16 || dtype == at::kUInt32 || dtype == at::kUInt64;
  const bool flips = dtype == at::kUInt64 && (op == RedOp::MIN || op == RedOp::MAX);
  constexpr std::int64_t kHighestBit = std::numeric_limits<std::int64_t>::min();
  Tensor all = rows;
  if (is_unsigned) all = dtype == at::kUInt64 ? all.view(at::kLong) : all.to(at::kLong);
  if (at::isFloatingType(dtype) && c10::elementSize(dtype) < 4) all = all.to(at::kFloat);
  if (flips) all = all.bitwise_xor(kHighestBit);
  const DefaultFloatingPoint state;
  Tensor total = all[0].clone();
  for (std::int64_t row = 1; row < all.size(0); ++row) {
    const Tensor next = all[row];
    switch (op) {
      case RedOp::SUM:
      case RedOp::AVG: total.add_(next); break;
      case RedOp::PRODUCT: total.mul_(next); break;
      case RedOp::MIN: at::minimum_out(total, total, next); break;
      case RedOp::MAX: at::maximum_out(total, total, next); break;
      case RedOp::BAND: total.bitwise_and_(next); break;
      case RedOp::BOR: total.bitwise_or_(next); break;
      default: total.bitwise_xor_(next); break;
    }
  }
  if (flips) total = total.bitwise_xor(kHighestBit);
  total = dtype == at::kUInt64 ? total.view(dtype) : total.to(dtype);
  if (op == RedOp::AVG) divide_(total, rows.size(0));
  return total;
}

template <typename Options>
Options summed(Options options) {
  if (options.reduceOp == RedOp::AVG) options.reduceOp = RedOp::SUM;
  return options;
}

void* begin_of_joined(const std::vector<Tensor>& tensors) {
  if (!all_contiguous(tensors)) return nullptr;
  char* begin = nullptr;
  char* end = nullptr;
  for (const Tensor& tensor : tensors) {
    if (tensor.nbytes() == 0) continue;
    char* const at = static_cast<char*>(tensor.mutable_data_ptr());
    if (begin == nullptr) begin = end = at;
    if (at != end) return nullptr;
    end += tensor.nbytes();
  }
  return begin;
}

Tensor joined(const std::vector<Tensor>& tensors, const std::vector<Tensor>& outputs) {
  bool is_apart = true;
  for (const Tensor& tensor : tensors) {
    for (const Tensor& output : outputs) is_apart = is_apart && !tensor.is_alias_of(output);
  }
  const at::TensorOptions bytes = tensors[0].options().dtype(at::kByte);
  if (void* const begin = is_apart ? begin_of_joined(tensors) : nullptr) {
    return at::from_blob(begin, {static_cast<std::int64_t>(bytes_of(tensors))}, [tensors](void*) {}, bytes);
  }
  std::vector<Tensor> parts;
  for (const Tensor& tensor : tensors) {
    if (tensor.numel() != 0) parts.push_back(as_bytes(tensor.contiguous()));
  }
  return parts.empty() ? at::empty({0}, bytes) : at::cat(parts);
}

}  // namespace

Backend::Backend(int rank, int size, std::shared_ptr<const Library> library, std::uint64_t group, void* transfers,
                 std::chrono::milliseconds timeout, Callbacks callbacks)
    : HookedBackend(rank, size),
      library_(std::move(library)),
      group_(group),
      options_(c10::make_intrusive<Options>(timeout)),
      callbacks_(std::move(callbacks)),
      made_in_(fork_generation()) {
  lane_ = std::make_shared<Lane>(library_ == nullptr ? +[](int) {} : library_->wait_gently, callbacks_.interruption,
                                 hooks_);
  if (transfers != nullptr) {
    const auto raise = [raise = callbacks_.pair_error, hooks = hooks_](const TransferFailure& failure) {
      const std::exception_ptr error = raise(failure);
      if (failure.status != static_cast<std::int64_t>(QueueStatus::kInterrupted)) Hooks::call_failed(hooks);
      return error;
    };
    pairs_ = std::make_shared<Pairs>(library_, transfers, raise, hooks_, calls_);
  }
  init();
}

Backend::~Backend() { release_resources(); }

void Backend::release_resources() {
  if (!callbacks_.leave) return;
  // The threads may need the interpreter lock to end.
  callbacks_.without_interpreter([this] {
    shutdown();
    pairs_.reset();
  });
  auto last = std::make_unique<const Callbacks>(std::exchange(callbacks_, {}));
  if (is_forked_child()) static_cast<void>(last.release());  // the references are the parent's
}

template <typename... Parts>
void Backend::check(bool holds, const Parts&... parts) const {
  TORCH_CHECK_VALUE(holds, parts...);
}

const Tensor& Backend::only(const Tensors& tensors, const char* method) const {
  check(tensors.size() == 1, method, " takes one tensor a rank, but got ", tensors.size());
  check_dense(tensors[0], method);
  return tensors[0];
}

void Backend::check_alike(const Tensors& tensors, const char* method) const {
  check(!tensors.empty(), method, " takes at least one tensor");
  for (const Tensor& tensor : tensors) {
    check_dense(tensor, method);
    check(tensor.numel() == tensors[0].numel() && tensor.scalar_type() == tensors[0].scalar_type(), method,
          " needs tensors of one size and dtype, but got ", tensors[0].numel(), " × ", tensors[0].scalar_type(),
          " and ", tensor.numel(), " × ", tensor.scalar_type());
  }
}

void Backend::check_dense(const Tensor& tensor, const char* method) const {
  check(tensor.layout() == at::kStrided, method, " takes dense tensors only, but got one of layout ", tensor.layout());
  check(tensor.is_cpu(), method, " of backend 'parallel_state' takes CPU tensors, but got one on ", tensor.device(),
        ": for GPUs initialise with \"cpu:parallel_state,cuda:nccl\"");
}

void Backend::check_parts(const Tensor& whole, const Tensor& part, const char* method, const char* which) const {
  check_dense(part, method);
  check_dense(whole, method);
  check(whole.numel() == part.numel() * size_, method, " needs an ", which, " of ", size_, " × ", part.numel(),
        " elements, but got ", whole.numel());
  check(whole.scalar_type() == part.scalar_type(), method, " needs an ", which, " of dtype ", part.scalar_type(),
        ", but got ", whole.scalar_type());
}

void Backend::check_reduction(const c10d::ReduceOp& op, at::ScalarType dtype) const {
  check(op != RedOp::PREMUL_SUM, "PREMUL_SUM is NCCL's: multiply first, then reduce with SUM");
  check(op != RedOp::AVG || dtype != at::kBool, "AVG takes numbers, but got ", dtype);
  check(!at::isComplexType(dtype) || op == RedOp::SUM || op == RedOp::AVG || op == RedOp::PRODUCT,
        "complex numbers can't be reduced by this reduction: use SUM, AVG or PRODUCT");
  const bool is_bitwise = op == RedOp::BAND || op == RedOp::BOR || op == RedOp::BXOR;
  check(!is_bitwise || at::isIntegralType(dtype, /*includeBool=*/true), "bitwise reductions take integers, but got ",
        dtype);
}

void Backend::check_root(std::int64_t root, const char* method) const {
  check(root >= 0 && root < size_, method, ": the root must be a rank of the group, 0 to ", size_ - 1, ", but is ",
        root);
}

void Backend::check_usable(const char* method) {
  if (is_forked_child()) {
    std::rethrow_exception(callbacks_.usage_error(
        "this process was forked from a rank of the group, and is no rank itself. Start processes with "
        "'spawn' or 'forkserver', or initialise torch.distributed in the child",
        true));
  }
  if (getError() != c10d::ErrorType::SUCCESS) std::rethrow_exception(callbacks_.failed(method));
  if (suspended_.load(std::memory_order_relaxed)) {
    std::rethrow_exception(
        callbacks_.usage_error(std::string(method) + ": the group is suspended; call resume() first", false));
  }
}

void Backend::suspend() {
  if (suspended_ || size_ == 1) return;
  check_usable("suspend");
  const Clock::time_point now = Clock::now();
  const bool is_busy = !lane_->drain(now) || (pairs_ && !pairs_->drain(now));
  suspended_ = true;  // before the ranks agree, so that no other thread begins a call
  try {
    callbacks_.suspend(is_busy);
  } catch (...) {
    suspended_ = false;
    throw;
  }
}

void Backend::resume() {
  if (!suspended_) return;
  callbacks_.resume();
  suspended_ = false;
}

std::unordered_map<std::string, std::uint64_t> Backend::getMemoryStats() { return callbacks_.memory_stats(); }

const c10::intrusive_ptr<c10d::Backend>& Backend::gloo() {
  const std::lock_guard<std::mutex> lock(gloo_mutex_);
  if (!gloo_) {
    TORCH_CHECK_WITH(DistBackendError, !closed_, "the group was destroyed");
    gloo_ = callbacks_.make_gloo();
  }
  return gloo_;
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  if (callbacks_.set_timeout) callbacks_.set_timeout(timeout);
}

std::atomic<std::int64_t> Backend::extended_ms{0};

std::chrono::milliseconds Backend::timeout_of(std::chrono::milliseconds requested) const {
  const std::chrono::milliseconds extra(ephemeral_ms_.load(std::memory_order_relaxed) +
                                        extended_ms.load(std::memory_order_relaxed));
  return (requested == c10d::kUnsetTimeout ? options_->timeout : requested) + extra;
}

void Backend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  const std::lock_guard<std::mutex> lock(ephemeral_mutex_);
  ephemeral_ms_ += timeout.count();
}

Backend::Ephemeral::Ephemeral(Backend& of) : backend(of) {
  if (backend.ephemeral_ms_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard<std::mutex> lock(backend.ephemeral_mutex_);
  owned_ms = backend.ephemeral_ms_ - backend.owned_ephemeral_ms_;
  backend.owned_ephemeral_ms_ += owned_ms;
}

Backend::Ephemeral::~Ephemeral() {
  if (owned_ms == 0) return;
  const std::lock_guard<std::mutex> lock(backend.ephemeral_mutex_);
  backend.ephemeral_ms_ -= owned_ms;
  backend.owned_ephemeral_ms_ -= owned_ms;
}

void Backend::done(int status, const char* method, Clock::time_point started) {
  if (status == static_cast<int>(Status::kDone)) return;
  const bool interrupted = status == static_cast<int>(Status::kInterrupted);  // a handler may have destroyed the group
  TORCH_CHECK_WITH(DistBackendError, !closed_ || interrupted, "the group was destroyed or aborted while ", method,
                   " was under way");
  const double elapsed_s = std::chrono::duration<double>(Clock::now() - started).count();
  const std::exception_ptr error = callbacks_.collective_error(status, method, elapsed_s, timeout_s_);
  if (!interrupted) call_failure_hooks();  // after the error, for which the peers wait
  std::rethrow_exception(error);
}

template <typename Function, typename... Arguments>
void Backend::call(const char* method, Told told, Function function, Arguments... arguments) {
  const auto started = Clock::now();
  done(function(group_, told.word, told.shape, arguments...), method, started);
}

void Backend::call_failure_hooks() {
  callbacks_.without_interpreter([this] { Hooks::call_failed(hooks_); });
}

Backend::Started Backend::submit(Kind kind, Tensors inputs, Tensors outputs, const CallOptions& options,
                                 std::function<void()> body) {
  check_usable(kind.method);
  const double timeout_s = std::chrono::duration<double>(timeout_of(options.timeout)).count();
  auto ephemeral = ephemeral_ms_.load(std::memory_order_relaxed) == 0 ? nullptr : std::make_shared<Ephemeral>(*this);
  const std::size_t bytes = bytes_of(inputs);
  const Tensors& alike = kind.type == OpType::SCATTER ? outputs : inputs;
  Tensor x = alike.empty() ? Tensor() : alike[0];
  auto call = c10::make_intrusive<Lane::Call>(rank_, kind.type, kind.title, std::move(inputs), std::move(outputs),
                                              sequence_.fetch_add(1, std::memory_order_relaxed) + 1);
  call->set_list_length(kind.list_length);
  auto run = [this, timeout_s, ephemeral = std::move(ephemeral), body = std::move(body), method = kind.method,
              sequence = call->getSequencenumber(), x = std::move(x)]() mutable {
    const Below below;
    const CallLog::Scope scope(*calls_, sequence, method, x);
    const auto ends = std::move(ephemeral);
    timeout_s_ = timeout_s;
    if (is_native()) library_->group_timeout(group_, timeout_s);
    body();
  };
  if (!options.asyncOp && !coalescing_ && lane_->begin_inline()) {
    std::exception_ptr error;
    call->begin(*hooks_);
    try {
      run();
    } catch (...) {
      error = std::current_exception();
    }
    call->settle(error, hooks_.get());
    lane_->end_inline();
    call->announce(nullptr);  // nothing else has the call yet
    if (error != nullptr) std::rethrow_exception(error);
    return call;
  }
  // The destructor's `shutdown` waits for the lane's thread.
  call->body = std::move(run);
  lane_->post(call, bytes >= kPromptBytes || coalescing_);
  if (!options.asyncOp && !coalescing_) call->wait(kNoTimeout);
  return kept(std::move(call));
}

Backend::Started Backend::by_gloo(Kind kind, const std::function<Started(c10d::Backend&)>& start, Tensors averaged,
                                  int peer) {
  check_usable(kind.method);
  const auto name = [callbacks = callbacks_, hooks = hooks_, method = kind.method, peer](const char* text,
                                                                                         double elapsed_s) {
    const std::exception_ptr error = callbacks.gloo_error(text, method, peer, elapsed_s);
    if (error != nullptr) callbacks.without_interpreter([&] { Hooks::call_failed(hooks); });
    return error;
  };
  averaged = once_each(averaged);
  if (peer < 0 && kind.type != OpType::RECVANYSOURCE) sequence_.fetch_add(1, std::memory_order_relaxed);
  Started work;
  try {
    work = start(*gloo());
  } catch (const std::exception& error) {
    if (const std::exception_ptr named = name(error.what(), 0)) std::rethrow_exception(named);
    throw;
  }
  return kept(
      c10::make_intrusive<Borrowed>(rank_, kind.type, std::move(work), name, std::move(averaged), size_, hooks_));
}

template <typename Written, typename Read, typename Call>
Backend::Started Backend::resolved(Written& written, Read& read, Call call) {
  if (!is_deferred(written) && !is_deferred(read)) return nullptr;
  Targets targets;
  Written outputs = staged(written, &targets);
  Read inputs = with_values(read);
  return filled(call(outputs, inputs), std::move(targets));
}

template <typename Call>
Backend::Started Backend::resolved(Tensors& tensors, bool is_written, Call call) {
  Tensors none;
  const auto on_written = [&](Tensors& held, Tensors&) { return call(held); };
  const auto on_read = [&](Tensors&, Tensors& held) { return call(held); };
  return is_written ? resolved(tensors, none, on_written) : resolved(none, tensors, on_read);
}

Backend::Started Backend::filled(Started work, Targets targets) {
  if (targets.empty()) return work;
  if (coalescing_) targets_.insert(targets_.end(), targets.begin(), targets.end());
  return fill_when_done(rank_, std::move(work), std::move(targets));
}

Backend::Started Backend::kept(Started work) {
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

// With a root it is published as part of `reduce`.
void Backend::all_reduce_flat(const Tensor& x, const c10d::ReduceOp& op, int root) {
  if (size_ == 1) return;
  Native how;
  if (!native_of(x.scalar_type(), op, &how)) {
    reduce_by_gathering(x, op);
    return;
  }
  const Told told = tell(root < 0 ? Method::kAllReduceInPlace : kReduceMethod, x, number_of(op), root);
  void* const data = x.mutable_data_ptr();
  call(root < 0 ? "all_reduce" : "reduce", told, library_->all_reduce, data, data, x.numel(),
       static_cast<int>(how.dtype), static_cast<int>(how.op));
}

void Backend::reduce_by_gathering(const Tensor& x, const c10d::ReduceOp& op) {
  const at::ScalarType dtype = x.scalar_type();
  if (at::isComplexType(dtype) && op != RedOp::PRODUCT) return all_reduce_flat(at::view_as_real(x), op);
  if (is_narrow_float(dtype)) {
    const Tensor wide = x.to(at::kFloat);
    all_reduce_flat(wide, op);
    x.copy_(wide);
    return;
  }
  x.view({-1}).copy_(reduce_rows(gather_rows({x}), op));
}

Tensor Backend::gather_rows(const Tensors& tensors) {
  const auto count = static_cast<std::int64_t>(tensors.size());
  const Tensor mine = at::empty({count, tensors[0].numel()}, tensors[0].options());
  for (std::int64_t row = 0; row < count; ++row) mine[row].view(tensors[row].sizes()).copy_(tensors[row]);
  if (size_ == 1) return mine;
  const Tensor all = at::empty({size_ * count, tensors[0].numel()}, mine.options());
  all_gather_into(all, mine);
  return all;
}

void Backend::all_reduce(const Tensor& x, const c10d::ReduceOp& op) {
  if (x.is_contiguous()) return all_reduce_flat(x, op);
  const Tensor flat = x.contiguous();
  all_reduce_flat(flat, op);
  x.copy_(flat);
}

Backend::Started Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (const auto work = resolved(tensors, true, [&](auto& held) { return allreduce(held, options); })) return work;
  if (!tensors.empty() && tensors[0].layout() != at::kStrided) return allreduce_sparse(tensors, options);
  check_alike(tensors, "all_reduce");
  const Tensor x = tensors[0];
  const bool is_average = options.reduceOp == RedOp::AVG;
  check_reduction(options.reduceOp, x.scalar_type());
  check(!is_average || tensors.size() == 1, "all_reduce takes one tensor a rank for an average, but got ",
        tensors.size());
  constexpr Kind kKind = {OpType::ALLREDUCE, "all_reduce", "parallel_state:all_reduce"};
  if (is_on_gloo()) {
    return by_gloo(
        kKind, [&](auto& gloo) { return gloo.allreduce(tensors, summed(options)); }, is_average ? tensors : Tensors{});
  }
  if (tensors.size() == 1) {
    return submit(kKind, {x}, {x}, options, [this, x, op = options.reduceOp] { all_reduce(x, op); });
  }
  // As over gloo, all tensors of all ranks are reduced to one result.
  return submit(kKind, tensors, tensors, options, [this, tensors, op = options.reduceOp] {
    const Tensor total = reduce_rows(gather_rows(tensors), op);
    for (const Tensor& tensor : tensors) tensor.copy_(total.view(tensor.sizes()));
  });
}

Backend::Started Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  constexpr Kind kKind = {OpType::_ALLREDUCE_SPARSE, "all_reduce", "parallel_state:all_reduce_sparse"};
  if (is_on_gloo()) return by_gloo(kKind, [&](auto& gloo) { return gloo.allreduce(tensors, options); });
  return submit(kKind, {}, tensors, options,
                [this, tensors, options]() mutable { gloo()->allreduce(tensors, options)->wait(); });
}

Backend::Started Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  if (const auto work = resolved(tensors, true, [&](auto& held) { return allreduce_coalesced(held, options); }))
    return work;
  check(!tensors.empty(), "all_reduce_coalesced takes at least one tensor");
  for (const Tensor& tensor : tensors) {
    check_dense(tensor, "all_reduce_coalesced");
    check_reduction(options.reduceOp, tensor.scalar_type());
  }
  constexpr Kind kKind = {OpType::ALLREDUCE_COALESCED, "all_reduce", "parallel_state:all_reduce_coalesced"};
  if (is_on_gloo()) {
    return by_gloo(
        kKind, [&](auto& gloo) { return gloo.allreduce_coalesced(tensors, summed(options)); },
        options.reduceOp == RedOp::AVG ? tensors : Tensors{});
  }
  return submit(kKind, tensors, tensors, options, [this, tensors, op = options.reduceOp] {
    if (!any_overlap(tensors)) {
      for (const Tensor& tensor : tensors) all_reduce(tensor, op);
      return;
    }
    // In place, one tensor's result would be reduced again.
    Tensors totals;
    for (const Tensor& tensor : tensors) totals.push_back(tensor.clone(at::MemoryFormat::Contiguous));
    for (const Tensor& total : totals) all_reduce_flat(total, op);
    for (std::size_t index = 0; index < tensors.size(); ++index) tensors[index].copy_(totals[index]);
  });
}

Backend::Started Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (const auto work = resolved(tensors, rank_ == options.rootRank, [&](auto& held) { return reduce(held, options); }))
    return work;
  const Tensor x = only(tensors, "reduce");
  const int root = static_cast<int>(options.rootRank);
  check_root(root, "reduce");
  check_reduction(options.reduceOp, x.scalar_type());
  constexpr Kind kKind = {OpType::REDUCE, "reduce", "parallel_state:reduce"};
  const bool averages = options.reduceOp == RedOp::AVG && rank_ == root;
  if (is_on_gloo()) {
    return by_gloo(
        kKind, [&](auto& gloo) { return gloo.reduce(tensors, summed(options)); }, averages ? tensors : Tensors{});
  }
  return submit(kKind, {x}, {x}, options, [this, x, root, op = options.reduceOp] {
    if (size_ == 1) return;
    const Tensor total = x.clone(at::MemoryFormat::Contiguous);
    all_reduce_flat(total, op, root);
    if (rank_ == root) x.copy_(total);
  });
}

Backend::Started Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (const auto work =
          resolved(tensors, rank_ != options.rootRank, [&](auto& held) { return broadcast(held, options); }))
    return work;
  check_alike(tensors, "broadcast");
  const int root = static_cast<int>(options.rootRank);
  check_root(root, "broadcast");
  check(options.rootTensor >= 0 && options.rootTensor < static_cast<std::int64_t>(tensors.size()),
        "broadcast: the root's tensor must be one of ", tensors.size(), ", but is ", options.rootTensor);
  const Tensor x = tensors[options.rootTensor];
  constexpr Kind kKind = {OpType::BROADCAST, "broadcast", "parallel_state:broadcast"};
  if (is_on_gloo()) return by_gloo(kKind, [&](auto& gloo) { return gloo.broadcast(tensors, options); });
  const auto run = [this, x, root] {
    if (size_ == 1) return;
    const Tensor flat = x.contiguous();
    call("broadcast", tell(Method::kBroadcastInPlace, flat, -1, root), library_->broadcast, flat.mutable_data_ptr(),
         flat.nbytes(), root);
    if (rank_ != root && !flat.is_same(x)) x.copy_(flat);
  };
  if (tensors.size() == 1) return submit(kKind, {x}, {x}, options, run);
  return submit(kKind, {x}, tensors, options, [run, x, tensors] {
    run();
    for (const Tensor& tensor : tensors) {
      if (!tensor.is_same(x)) tensor.copy_(x.view_as(tensor));
    }
  });
}

void Backend::all_gather_into(const Tensor& output, const Tensor& input) {
  const Tensor out = output.is_contiguous() ? output : at::empty(output.sizes(), output.options());
  const Tensor in = apart_from_whole(input.contiguous(), out, rank_);
  if (size_ == 1) {
    out.view({-1}).copy_(in.view({-1}));
  } else {
    call("all_gather", tell(Method::kAllGather, in), library_->all_gather, out.mutable_data_ptr(), in.const_data_ptr(),
         1, in.nbytes());
  }
  if (!out.is_same(output)) output.copy_(out);
}

void Backend::all_gather_list(const Tensors& outputs, const Tensor& input) {
  const Tensor in = apart(input, outputs, rank_);
  if (size_ == 1) {
    outputs[0].copy_(in);
    return;
  }
  const bool direct = all_contiguous(outputs);
  std::vector<void*> to(size_);
  std::vector<std::size_t> bytes(size_);
  bool is_even = true;
  Tensor staged;
  for (int rank = 0; rank < size_; ++rank) {
    bytes[rank] = outputs[rank].nbytes();
    is_even = is_even && bytes[rank] == in.nbytes();
  }
  if (!direct) staged = at::empty({static_cast<std::int64_t>(bytes_of(outputs))}, in.options().dtype(at::kByte));
  std::size_t offset = 0;
  static char nowhere;
  for (int rank = 0; rank < size_; ++rank) {
    to[rank] = direct ? outputs[rank].mutable_data_ptr() : static_cast<char*>(staged.mutable_data_ptr()) + offset;
    if (to[rank] == nullptr) to[rank] = &nowhere;
    offset += bytes[rank];
  }
  const Told told = is_even ? tell(Method::kAllGather, in)
                            : told_of(kAllGathervMethod, at::IntArrayRef{}, static_cast<int>(in.scalar_type()));
  call("all_gather", told, library_->gatherv, to.data(), bytes.data(), in.const_data_ptr(), -1);
  offset = 0;
  for (int rank = 0; rank < size_; ++rank) {
    const Tensor& output = outputs[rank];
    if (rank == rank_) {
      output.view_as(output).copy_(in.view(output.sizes()));
    } else if (!direct) {
      const auto begin = static_cast<std::int64_t>(offset), end = begin + static_cast<std::int64_t>(bytes[rank]);
      output.copy_(staged.slice(0, begin, end).view(output.scalar_type()).view(output.sizes()));
    }
    offset += bytes[rank];
  }
}

void Backend::check_lists(std::size_t outputs, std::size_t inputs, const char* method) const {
  check(outputs == 1 && inputs == 1, method, " takes one tensor, and one list of tensors, a rank, but got ", inputs,
        " and ", outputs);
}

Backend::Started Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  if (const auto work = resolved(outputs, inputs, [&](auto& out, auto& in) { return allgather(out, in, options); }))
    return work;
  constexpr const char* kMethod = "all_gather";
  check_alike(inputs, kMethod);
  check(outputs.size() == inputs.size(), kMethod, " needs a list of outputs for each of the ", inputs.size(),
        " inputs, but got ", outputs.size());
  const Tensor x = inputs[0];
  const bool several = inputs.size() > 1;
  for (const Tensors& out : outputs) {
    check(out.size() == size_ * inputs.size(), kMethod, " needs an output for each of the ", inputs.size(),
          " inputs of ", size_, " ranks, but got ", out.size());
    for (const Tensor& output : out) {
      check_dense(output, kMethod);
      check(output.scalar_type() == x.scalar_type(), kMethod, " needs outputs of dtype ", x.scalar_type(), ", but got ",
            output.scalar_type());
      check(!several || output.numel() == x.numel(), kMethod, " of several tensors needs outputs of ", x.numel(),
            " elements, but got ", output.numel());
    }
  }
  const Tensors out = outputs[0];
  check(several || out[rank_].numel() == x.numel(), "this rank's output of all_gather must have the ", x.numel(),
        " elements of its input, but has ", out[rank_].numel());
  constexpr Kind kKind = {OpType::ALLGATHER, kMethod, "parallel_state:all_gather"};
  if (is_on_gloo()) return by_gloo(kKind, [&](auto& gloo) { return gloo.allgather(outputs, inputs, options); });
  if (!several) {
    return submit(kKind, {x}, out, options, [this, x, out] { all_gather_list(out, x); });
  }
  Tensors flat;
  for (const Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  Kind kind = kKind;
  kind.list_length = out.size();
  return submit(kind, inputs, flat, options, [this, inputs, outputs] {
    const Tensor all = gather_rows(inputs);
    for (const Tensors& list : outputs) {
      for (std::size_t index = 0; index < list.size(); ++index) {
        list[index].copy_(all[static_cast<std::int64_t>(index)].view(list[index].sizes()));
      }
    }
  });
}

Backend::Started Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  if (const auto work =
          resolved(outputs, inputs, [&](auto& out, auto& in) { return allgather_coalesced(out, in, options); }))
    return work;
  check(static_cast<int>(outputs.size()) == size_, "all_gather_coalesced needs a list of outputs for each of the ",
        size_, " ranks, but got ", outputs.size());
  for (const Tensors& list : outputs) {
    check(list.size() == inputs.size(), "all_gather_coalesced needs ", inputs.size(), " outputs a rank, but got ",
          list.size());
  }
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    check_dense(inputs[index], "all_gather_coalesced");
    for (const Tensors& list : outputs) {
      check_dense(list[index], "all_gather_coalesced");
      check(list[index].numel() == inputs[index].numel() && list[index].scalar_type() == inputs[index].scalar_type(),
            "all_gather_coalesced needs outputs of the input's ", inputs[index].numel(), " × ",
            inputs[index].scalar_type(), ", but got ", list[index].numel(), " × ", list[index].scalar_type());
    }
  }
  constexpr Kind kKind = {OpType::ALLGATHER_COALESCED, "all_gather", "parallel_state:all_gather_coalesced"};
  if (is_on_gloo()) {
    return by_gloo(kKind, [&](auto& gloo) { return gloo.allgather_coalesced(outputs, inputs, options); });
  }
  Tensors flat;
  for (const Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  Kind kind = kKind;
  kind.list_length = size_ == 1 ? 0 : inputs.size();
  return submit(kind, inputs, flat, options, [this, outputs, inputs] {
    const auto outputs_of = [&](std::size_t index) {
      Tensors of_ranks;
      for (const Tensors& list : outputs) of_ranks.push_back(list[index]);
      return of_ranks;
    };
    const Tensors in = before_writes(inputs, outputs_of);
    for (std::size_t index = 0; index < in.size(); ++index) {
      all_gather_list(outputs_of(index), in[index]);
    }
  });
}

Backend::Started Backend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  if (const auto work = resolved(output, input, [&](auto& out, auto& in) { return _allgather_base(out, in, options); }))
    return work;
  check_parts(output, input, "all_gather_into_tensor", "output");
  constexpr Kind kKind = {OpType::_ALLGATHER_BASE, "all_gather", "parallel_state:_all_gather_base"};
  if (is_on_gloo()) return by_gloo(kKind, [&](auto& gloo) { return gloo._allgather_base(output, input, options); });
  return submit(kKind, {input}, {output}, options, [this, output, input] { all_gather_into(output, input); });
}

Backend::Started Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  if (const auto work = resolved(
          outputs, inputs, [&](auto& out, auto& in) { return allgather_into_tensor_coalesced(out, in, options); }))
    return work;
  check(outputs.size() == inputs.size(), "all_gather_into_tensor_coalesced needs as many outputs as inputs, but got ",
        outputs.size(), " and ", inputs.size());
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    check_parts(outputs[index], inputs[index], "all_gather_into_tensor_coalesced", "output");
  }
  constexpr Kind kKind = {OpType::COALESCED, "all_gather", "parallel_state:all_gather_into_tensor_coalesced"};
  if (is_on_gloo()) {
    return by_gloo(kKind, [&](auto& gloo) { return gloo.allgather_into_tensor_coalesced(outputs, inputs, options); });
  }
  return submit(kKind, inputs, outputs, options, [this, outputs, inputs] {
    const Tensors in = before_writes(inputs, [&](std::size_t index) { return Tensors{outputs[index]}; });
    for (std::size_t index = 0; index < in.size(); ++index) all_gather_into(outputs[index], in[index]);
  });
}

Backend::Started Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  if (const auto work = resolved(outputs, inputs, [&](auto& out, auto& in) { return gather(out, in, options); }))
    return work;
  const Tensor x = only(inputs, "gather");
  const int root = static_cast<int>(options.rootRank);
  check_root(root, "gather");
  const bool is_root = rank_ == root;
  check(is_root ? outputs.size() == 1 && static_cast<int>(outputs[0].size()) == size_ : outputs.empty(),
        is_root ? "gather needs an output for each rank on its destination"
                : "gather takes outputs on its destination only");
  const Tensors out = is_root ? outputs[0] : Tensors{};
  for (const Tensor& output : out) {
    check_dense(output, "gather");
    check(output.numel() == x.numel() && output.scalar_type() == x.scalar_type(),
          "gather needs outputs of the input's ", x.numel(), " × ", x.scalar_type(), ", but got ", output.numel(),
          " × ", output.scalar_type());
  }
  constexpr Kind kKind = {OpType::GATHER, "gather", "parallel_state:gather"};
  if (is_on_gloo()) return by_gloo(kKind, [&](auto& gloo) { return gloo.gather(outputs, inputs, options); });
  return submit(kKind, {x}, out, options, [this, x, out, root] {
    const Tensor in = apart(x, out, rank_);
    Tensors staged;
    for (const Tensor& output : out) {
      staged.push_back(output.is_contiguous() ? output : at::empty(output.sizes(), output.options()));
    }
    if (size_ > 1) {
      static char nowhere;
      std::vector<void*> to(size_, nullptr);
      const std::vector<std::size_t> bytes(size_, in.nbytes());
      for (std::size_t rank = 0; rank < staged.size(); ++rank) {
        to[rank] = staged[rank].mutable_data_ptr() != nullptr ? staged[rank].mutable_data_ptr() : &nowhere;
      }
      call("gather", tell(kGatherMethod, in, -1, root), library_->gatherv, to.data(), bytes.data(), in.const_data_ptr(),
           root);
    }
    for (std::size_t rank = 0; rank < staged.size(); ++rank) {
      if (static_cast<int>(rank) == rank_) {
        out[rank].copy_(in.view(out[rank].sizes()));
      } else if (!staged[rank].is_same(out[rank])) {
        out[rank].copy_(staged[rank]);
      }
    }
  });
}

Backend::Started Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  if (const auto work = resolved(outputs, inputs, [&](auto& out, auto& in) { return scatter(out, in, options); }))
    return work;
  const Tensor x = only(outputs, "scatter");
  const int root = static_cast<int>(options.rootRank);
  check_root(root, "scatter");
  const bool is_root = rank_ == root;
  check(is_root ? inputs.size() == 1 && static_cast<int>(inputs[0].size()) == size_ : inputs.empty(),
        is_root ? "scatter needs an input for each rank on its source" : "scatter takes inputs on its source only");
  const Tensors in = is_root ? inputs[0] : Tensors{};
  for (const Tensor& input : in) {
    check_dense(input, "scatter");
    check(input.numel() == x.numel() && input.scalar_type() == x.scalar_type(), "scatter needs inputs of the output's ",
          x.numel(), " × ", x.scalar_type(), ", but got ", input.numel(), " × ", input.scalar_type());
  }
  constexpr Kind kKind = {OpType::SCATTER, "scatter", "parallel_state:scatter"};
  if (is_on_gloo()) return by_gloo(kKind, [&](auto& gloo) { return gloo.scatter(outputs, inputs, options); });
  return submit(kKind, in, {x}, options, [this, x, in, root] {
    if (size_ == 1) {
      x.copy_(in[0]);
      return;
    }
    const Tensor flat = in.empty() ? Tensor() : joined(in, {x});
    const Tensor out = x.is_contiguous() ? x : at::empty(x.sizes(), x.options());
    call("scatter", tell(kScatterMethod, out, -1, root), library_->scatter, out.mutable_data_ptr(),
         flat.defined() ? flat.const_data_ptr() : nullptr, out.nbytes(), root);
    if (!out.is_same(x)) x.copy_(out);
  });
}

void Backend::reduce_scatter_into(const Tensor& output, const Tensor& input, const c10d::ReduceOp& op) {
  Tensor in = input.contiguous();
  Native how;
  if (size_ == 1) {
    output.view_as(output).copy_(in.view(output.sizes()));
    return;
  }
  const auto* const own = static_cast<const char*>(in.const_data_ptr()) + rank_ * output.nbytes();
  if (own != output.const_data_ptr() && overlap(output, in)) in = in.clone();
  if (!native_of(in.scalar_type(), op, &how)) {
    const Tensor total = in.is_same(input) ? in.clone() : in;
    all_reduce_flat(total, op);
    output.copy_(total.view({size_, -1})[rank_].view(output.sizes()));
    return;
  }
  const Tensor out = output.is_contiguous() ? output : at::empty(output.sizes(), output.options());
  call("reduce_scatter", tell(Method::kReduceScatter, in, number_of(op)), library_->reduce_scatter,
       out.mutable_data_ptr(), in.const_data_ptr(), 1, out.numel(), static_cast<int>(how.dtype),
       static_cast<int>(how.op));
  if (!out.is_same(output)) output.copy_(out);
}

Backend::Started Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  if (const auto work =
          resolved(outputs, inputs, [&](auto& out, auto& in) { return reduce_scatter(out, in, options); }))
    return work;
  check_lists(inputs.size(), outputs.size(), "reduce_scatter");
  const Tensor out = only(outputs, "reduce_scatter");
  const Tensors in = inputs[0];
  check(static_cast<int>(in.size()) == size_, "reduce_scatter needs an input for each of the ", size_,
        " ranks, but got ", in.size());
  check_reduction(options.reduceOp, out.scalar_type());
  bool is_even = true;
  for (const Tensor& input : in) {
    check_dense(input, "reduce_scatter");
    check(input.scalar_type() == out.scalar_type(), "reduce_scatter needs inputs of dtype ", out.scalar_type(),
          ", but got ", input.scalar_type());
    is_even = is_even && input.numel() == out.numel();
  }
  check(in[rank_].numel() == out.numel(), "reduce_scatter needs this rank's input to have the ", out.numel(),
        " elements of its output, but it has ", in[rank_].numel());
  constexpr Kind kKind = {OpType::REDUCE_SCATTER, "reduce_scatter", "parallel_state:reduce_scatter"};
  if (is_on_gloo()) {
    return by_gloo(
        kKind, [&](auto& gloo) { return gloo.reduce_scatter(outputs, inputs, summed(options)); },
        options.reduceOp == RedOp::AVG ? outputs : Tensors{});
  }
  return submit(kKind, in, {out}, options, [this, out, in, is_even, op = options.reduceOp] {
    if (is_even) return reduce_scatter_into(out, joined(in, {out}).view(out.scalar_type()), op);
    Tensors parts;
    for (const Tensor& input : in) parts.push_back(input.reshape({-1}));
    const Tensor flat = at::cat(parts);
    all_reduce_flat(flat, op);
    std::int64_t begin = 0;
    for (int rank = 0; rank < rank_; ++rank) begin += in[rank].numel();
    out.copy_(flat.slice(0, begin, begin + out.numel()).view(out.sizes()));
  });
}

Backend::Started Backend::_reduce_scatter_base(Tensor& output, Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  if (const auto work =
          resolved(output, input, [&](auto& out, auto& in) { return _reduce_scatter_base(out, in, options); }))
    return work;
  check_parts(input, output, "reduce_scatter_tensor", "input");
  check_reduction(options.reduceOp, input.scalar_type());
  constexpr Kind kKind = {OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", "parallel_state:_reduce_scatter_base"};
  if (is_on_gloo()) {
    return by_gloo(
        kKind, [&](auto& gloo) { return gloo._reduce_scatter_base(output, input, summed(options)); },
        options.reduceOp == RedOp::AVG ? Tensors{output} : Tensors{});
  }
  return submit(kKind, {input}, {output}, options,
                [this, output, input, op = options.reduceOp] { reduce_scatter_into(output, input, op); });
}

Backend::Started Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  if (const auto work = resolved(
          outputs, inputs, [&](auto& out, auto& in) { return reduce_scatter_tensor_coalesced(out, in, options); }))
    return work;
  check(outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced needs as many outputs as inputs, but got ",
        outputs.size(), " and ", inputs.size());
  for (std::size_t index = 0; index < inputs.size(); ++index) {
    check_parts(inputs[index], outputs[index], "reduce_scatter_tensor_coalesced", "input");
    check_reduction(options.reduceOp, inputs[index].scalar_type());
  }
  constexpr Kind kKind = {OpType::REDUCE_SCATTER_TENSOR_COALESCED, "reduce_scatter",
                          "parallel_state:reduce_scatter_tensor_coalesced"};
  if (is_on_gloo()) {
    return by_gloo(
        kKind, [&](auto& gloo) { return gloo.reduce_scatter_tensor_coalesced(outputs, inputs, summed(options)); },
        options.reduceOp == RedOp::AVG ? outputs : Tensors{});
  }
  return submit(kKind, inputs, outputs, options, [this, outputs, inputs, op = options.reduceOp] {
    const Tensors in = before_writes(inputs, [&](std::size_t index) { return Tensors{outputs[index]}; });
    for (std::size_t index = 0; index < in.size(); ++index) reduce_scatter_into(outputs[index], in[index], op);
  });
}

Backend::Started Backend::alltoall_base(Tensor& output, Tensor& input, std::vector<std::int64_t>& output_splits,
                                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  if (const auto work = resolved(output, input, [&](auto& out, auto& in) {
        return alltoall_base(out, in, output_splits, input_splits, options);
      }))
    return work;
  constexpr const char* kMethod = "all_to_all_single";
  check_dense(input, kMethod);
  check_dense(output, kMethod);
  check(output.scalar_type() == input.scalar_type(), kMethod, " needs an output of dtype ", input.scalar_type(),
        ", but got ", output.scalar_type());
  check(input.is_contiguous() && output.is_contiguous(), kMethod, " needs contiguous tensors");
  const auto bytes_by_rank = [&](const Tensor& x, const std::vector<std::int64_t>& splits, const char* what) {
    std::vector<std::size_t> bytes(size_);
    if (splits.empty()) {
      check(x.numel() == 0 || (x.dim() > 0 && x.size(0) % size_ == 0), kMethod, ": without splits the rows of its ",
            what, " must divide by the ", size_, " ranks");
      for (std::size_t& each : bytes) each = x.nbytes() / size_;
      return bytes;
    }
    check(static_cast<int>(splits.size()) == size_, kMethod, " needs a split for each of the ", size_,
          " ranks, but got ", splits.size());
    const std::int64_t rows = x.dim() == 0 ? 0 : x.size(0);
    const std::size_t row_bytes = rows == 0 ? 0 : x.nbytes() / rows;
    std::int64_t total = 0;
    for (int rank = 0; rank < size_; ++rank) {
      check(splits[rank] >= 0, kMethod, ": splits must not be negative, but one is ", splits[rank]);
      total += splits[rank];
      bytes[rank] = splits[rank] * row_bytes;
    }
    check(total == rows, kMethod, ": the splits of its ", what, " must add up to its ", rows, " rows, but add up to ",
          total);
    return bytes;
  };
  const auto in_bytes = bytes_by_rank(input, input_splits, "input"),
             out_bytes = bytes_by_rank(output, output_splits, "output");
  constexpr Kind kKind = {OpType::ALLTOALL_BASE, "all_to_all", "parallel_state:all_to_all"};
  if (is_on_gloo()) {
    return by_gloo({OpType::ALLTOALL_BASE, kMethod, nullptr},
                   [&](auto& gloo) { return gloo.alltoall_base(output, input, output_splits, input_splits, options); });
  }
  return submit(kKind, {input}, {output}, options, [this, output, input, in_bytes, out_bytes] {
    if (size_ == 1) {
      output.copy_(input.view(output.sizes()));
      return;
    }
    const Tensor in = overlap(output, input) ? input.clone() : input;
    const Told told = told_of(Method::kAllToAll, input.dim() > 1 ? input.sizes().slice(1) : at::IntArrayRef{},
                              static_cast<int>(input.scalar_type()));
    call("all_to_all", told, library_->all_to_all, output.mutable_data_ptr(), in.const_data_ptr(), out_bytes.data(),
         in_bytes.data());
  });
}

Backend::Started Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  if (const auto work = resolved(outputs, inputs, [&](auto& out, auto& in) { return alltoall(out, in, options); }))
    return work;
  constexpr const char* kMethod = "all_to_all";
  check(static_cast<int>(inputs.size()) == size_ && static_cast<int>(outputs.size()) == size_, kMethod,
        " needs an input and an output for each of the ", size_, " ranks, but got ", inputs.size(), " and ",
        outputs.size());
  for (const Tensor& each : inputs) check_dense(each, kMethod);
  for (const Tensor& each : outputs) check_dense(each, kMethod);
  constexpr Kind kKind = {OpType::ALLTOALL, kMethod, "parallel_state:all_to_all"};
  if (is_on_gloo()) {
    return by_gloo({OpType::ALLTOALL, "all_to_all", nullptr},
                   [&](auto& gloo) { return gloo.alltoall(outputs, inputs, options); });
  }
  return submit(kKind, inputs, outputs, options, [this, outputs, inputs] {
    if (size_ == 1) {
      outputs[0].copy_(inputs[0]);
      return;
    }
    std::vector<std::size_t> in_bytes, out_bytes;
    for (const Tensor& input : inputs) in_bytes.push_back(input.nbytes());
    for (const Tensor& output : outputs) out_bytes.push_back(output.nbytes());
    const Tensor in = joined(inputs, outputs);
    void* const begin = begin_of_joined(outputs);
    Tensor out;
    if (begin == nullptr) out = at::empty({static_cast<std::int64_t>(bytes_of(outputs))}, in.options());
    const Told told = told_of(Method::kAllToAll, at::IntArrayRef{}, static_cast<int>(inputs[0].scalar_type()));
    call("all_to_all", told, library_->all_to_all, begin == nullptr ? out.mutable_data_ptr() : begin,
         in.const_data_ptr(), out_bytes.data(), in_bytes.data());
    if (begin != nullptr) return;
    std::int64_t at = 0;
    for (const Tensor& output : outputs) {
      const std::int64_t end = at + static_cast<std::int64_t>(output.nbytes());
      if (output.numel() != 0) {
        output.copy_(out.slice(0, at, end).clone().view(output.scalar_type()).view(output.sizes()));
      }
      at = end;
    }
  });
}

Backend::Started Backend::barrier(const c10d::BarrierOptions& options) {
  constexpr Kind kKind = {OpType::BARRIER, "barrier", "parallel_state:barrier"};
  if (is_on_gloo()) return by_gloo(kKind, [&](auto& gloo) { return gloo.barrier(options); });
  return submit(kKind, {}, {}, options, [this] {
    if (size_ == 1) return;
    call("barrier", told_of(Method::kBarrier, at::IntArrayRef{}, 0), library_->barrier);
  });
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  check_usable("monitored_barrier");
  callbacks_.monitored_barrier(timeout_of(options.timeout), wait_all_ranks);
}

Backend::Started Backend::transfer(Kind kind, Tensors& tensors, int peer, int tag,
                                   const std::function<Started(c10d::Backend&)>& start) {
  if (!pairs_) return by_gloo(kind, start, {}, peer);
  check_usable(kind.method);
  const Tensor x = only(tensors, kind.method);
  const bool sends = kind.type == OpType::SEND;
  if (peer != Pairs::kAnySource) {
    check(peer >= 0 && peer < size_ && peer != rank_, kind.method,
          ": the peer must be another rank of the group, 0 to ", size_ - 1, " except this rank ", rank_, ", but is ",
          peer);
  }
  check(sends || at::has_internal_overlap(x) != at::MemOverlap::Yes, kind.method,
        " needs a tensor whose elements share no memory, but got an expanded tensor: clone() it first");
  auto work = c10::make_intrusive<Pairs::Transfer>(rank_, kind.type, kind.title, Tensors{x}, Tensors{x},
                                                   sequence_.load(std::memory_order_relaxed));
  work->is_send = sends;
  work->peer = peer;
  work->tag = tag;
  {
    const Below below;
    work->tensor = sends || x.is_contiguous() ? x.contiguous() : at::empty(x.sizes(), x.options());
  }
  if (!sends && !work->tensor.is_same(x)) work->target = x;
  pairs_->start(work, timeout_of(c10d::kUnsetTimeout));
  return kept(std::move(work));
}

Backend::Started Backend::send(Tensors& tensors, int dst, int tag) {
  if (const auto work = resolved(tensors, false, [&](auto& held) { return send(held, dst, tag); })) return work;
  return transfer({OpType::SEND, "send", "parallel_state:send"}, tensors, dst, tag,
                  [&](auto& gloo) { return gloo.send(tensors, dst, tag); });
}

Backend::Started Backend::recv(Tensors& tensors, int src, int tag) {
  if (const auto work = resolved(tensors, true, [&](auto& held) { return recv(held, src, tag); })) return work;
  return transfer({OpType::RECV, "recv", "parallel_state:recv"}, tensors, src, tag,
                  [&](auto& gloo) { return gloo.recv(tensors, src, tag); });
}

Backend::Started Backend::recvAnysource(Tensors& tensors, int tag) {
  if (const auto work = resolved(tensors, true, [&](auto& held) { return recvAnysource(held, tag); })) return work;
  return transfer({OpType::RECVANYSOURCE, "recv", "parallel_state:recvAnySource"}, tensors, Pairs::kAnySource, tag,
                  [&](auto& gloo) { return gloo.recvAnysource(tensors, tag); });
}

namespace {

class Together final : public Operation {
 public:
  Together(int rank, std::vector<Backend::Started> works, std::vector<Tensor> outputs, std::uint64_t sequence)
      : Operation(rank, OpType::COALESCED, nullptr, {}, std::move(outputs), sequence), works_(std::move(works)) {}

  bool isCompleted() override {
    for (const auto& work : works_) {
      if (!work->isCompleted()) return false;
    }
    return true;
  }
  bool isSuccess() const override {
    for (const auto& work : works_) {
      if (!work->isSuccess()) return false;
    }
    return true;
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (const std::exception_ptr error = work->exception()) return error;
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    for (const auto& work : works_) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      work->wait(timeout > kNoTimeout ? std::max(left, std::chrono::milliseconds(1)) : timeout);
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    const auto all = c10::collectAll(futures);
    return all->then(
        [outputs = outputs_of_all()](c10::ivalue::Future& done) {
          for (const c10::IValue& each : done.value().toListRef()) each.toFuture()->wait();
          return c10::IValue(outputs);
        },
        c10::ListType::create(c10::TensorType::get()));
  }

 protected:
  bool await(std::optional<Clock::time_point>) override { return true; }

 private:
  std::vector<Tensor> outputs_of_all() { return result(); }

  std::vector<Backend::Started> works_;
};

}  // namespace

void Backend::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
  targets_.clear();
}

Backend::Started Backend::endCoalescing() {
  coalescing_ = false;
  std::vector<Started> works;
  works.swap(coalesced_);
  if (works.empty()) return nullptr;
  if (works.size() == 1) return filled(works[0], std::exchange(targets_, {}));
  Tensors outputs;
  for (const Started& work : works) {
    const Tensors of_work = work->result();
    outputs.insert(outputs.end(), of_work.begin(), of_work.end());
  }
  return filled(c10::make_intrusive<Together>(rank_, std::move(works), std::move(outputs),
                                              sequence_.load(std::memory_order_relaxed)),
                std::exchange(targets_, {}));
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) return nullptr;
  return callbacks_.split(store, ranks, options ? options->timeout : options_->timeout,
                          options ? options->group_name : "");
}

c10::intrusive_ptr<c10d::Backend> Backend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const c10::intrusive_ptr<c10d::Backend::Options>& options,
                                                 const int& rank, const int& size) {
  return callbacks_.merge(store->clone(), rank, size, options ? options->timeout : options_->timeout,
                          options ? options->group_name : "");
}

c10::intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<std::int64_t>& excluded, int flags,
                                                  const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  constexpr int kAbort = 1;
  check((flags | kAbort) == kAbort, "shrink_group: shrink_flags must be SHRINK_DEFAULT or SHRINK_ABORT, not ", flags);
  check(!options || options->backend == options_->backend,
        "shrink_group: pg_options must be of the backend parallel_state, not of ", options ? options->backend : "");
  if ((flags & kAbort) != 0 && end_calls(/*in_order=*/false)) stays_ = true;
  return callbacks_.shrink(excluded, options ? options->timeout : options_->timeout,
                           options_->global_ranks_in_group.empty());
}

c10d::ErrorType Backend::getError() { return callbacks_.error->load(std::memory_order_relaxed); }

void Backend::abort() {
  if (!closed_) call_failure_hooks();
  end(/*in_order=*/false);
}

void Backend::shutdown() { end(/*in_order=*/true); }

void Backend::end(bool in_order) {
  if (end_calls(in_order) || stays_.exchange(false)) callbacks_.leave();
}

// A forked child leaves its parent's memory, locks and connections unchanged.
bool Backend::end_calls(bool in_order) {
  if (closed_.exchange(true)) return false;
  if (is_forked_child()) {
    new std::pair(lane_, pairs_);  // leaked: the threads are the parent's
    return false;
  }
  const auto deadline = Clock::now() + (in_order ? kShutdownGrace : std::chrono::seconds(0));
  const bool done = in_order && lane_->drain(deadline) && (!pairs_ || pairs_->drain(deadline));
  if (!done && is_native()) library_->group_doom(group_);
  // First end what the thread may wait in, then the thread.
  const auto error =
      error_of(in_order ? "the group was destroyed while the call was under way" : "the group was aborted");
  c10::intrusive_ptr<c10d::Backend> gloo;
  {
    const std::lock_guard<std::mutex> lock(gloo_mutex_);
    gloo = gloo_;
  }
  if (!done && gloo) gloo->abort();
  lane_->close(error);
  if (pairs_) pairs_->close(error);
  if (gloo && done) gloo->shutdown();
  return true;
}

}  // namespace parallel_state
