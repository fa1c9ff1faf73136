#include "pairs.h"

#include <algorithm>
#include <utility>

namespace parallel_state {
namespace {

Pairs::Transfer& transfer_of(void* self) { return *static_cast<Pairs::Transfer*>(self); }

}  // namespace

const TransferUser Pairs::kUser{
    [](void* self, int source, const TransferFailure* failure) {
      Transfer& transfer = transfer_of(self);
      return transfer.pairs->settle(transfer, source, failure);
    },
    [](void* self) { transfer_of(self).announce(); },
    [](void* self) { Held::reclaim(static_cast<Transfer*>(self)); },
};

Pairs::Pairs(std::shared_ptr<const Library> library, void* transfers, Raise raise, std::shared_ptr<const Hooks> hooks,
             std::shared_ptr<CallLog> calls)
    : library_(std::move(library)),
      raise_(std::move(raise)),
      hooks_(std::move(hooks)),
      calls_(std::move(calls)),
      transfers_(transfers) {}

Pairs::~Pairs() {
  library_->transfers_close(transfers_);
  library_->transfers_delete(transfers_);
}

void Pairs::start(const Held& transfer, std::chrono::milliseconds timeout) {
  transfer->pairs = shared_from_this();
  transfer->begin(*hooks_);
  const at::Tensor& tensor = transfer->tensor;
  const TransferCall call{transfer->peer,
                          transfer->is_send ? 1 : 0,
                          transfer->tag,
                          static_cast<int>(tensor.scalar_type()),
                          tensor.data_ptr(),
                          tensor.nbytes(),
                          std::chrono::duration<double>(timeout).count(),
                          &kUser,
                          Held(transfer).release()};
  const std::int64_t number = library_->transfers_start(transfers_, &call);
  TORCH_CHECK_WITH(
      DistBackendError, number != kInsideTransfer,
      "this thread is in a transfer of the group already, so its signal handler can't start another transfer");
  if (number == kRefusedTransfer) {
    TransferFailure failure;
    library_->transfers_failure(transfers_, reinterpret_cast<std::int64_t*>(&failure));
    TORCH_CHECK_WITH(DistBackendError, failure.status != TransferFailure::kClosed,
                     "the group was destroyed or aborted: it takes no more transfers");
    std::rethrow_exception(failure_of_all(failure));
  }
  transfer->number_ = static_cast<std::uint64_t>(number);
}

bool Pairs::await(Transfer& transfer, std::optional<Clock::time_point> until) {
  const std::uint64_t sequence = transfer.getSequencenumber();
  const CallLog::Scope scope(*calls_, sequence, transfer.is_send ? "send" : "recv", transfer.result()[0],
                             transfer.peer);
  const double timeout_s = until ? std::max(0.0, std::chrono::duration<double>(*until - Clock::now()).count()) : -1.0;
  switch (library_->transfers_wait(transfers_, transfer.number_, timeout_s)) {
    case kLateTransfer: return false;
    case kInterruptedTransfer: {
      TransferFailure failure;
      failure.status = static_cast<std::int64_t>(QueueStatus::kInterrupted);
      failure.sends = transfer.is_send ? 1 : 0;
      failure.peer = transfer.peer;
      const std::exception_ptr raised = raise_(failure);
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        transfer.interruption_ = raised;
      }
      library_->transfers_interrupt(transfers_, transfer.number_, 1);
      failure_of_all(failure);
      std::rethrow_exception(raised);  // the handler may have ended the transfer before it raised
    }
    case kInsideWait:
      TORCH_CHECK_WITH(
          DistBackendError, false,
          "this thread is in a transfer of the group already, so its signal handler can't wait for another transfer");
    default: return true;
  }
}

int Pairs::settle(Transfer& transfer, int source, const TransferFailure* failure) {
  std::exception_ptr error;
  if (failure != nullptr) {
    error = error_of(transfer, *failure);
  } else {
    try {
      if (transfer.target.defined()) {
        const at::AutoDispatchBelowADInplaceOrView below;
        transfer.target.copy_(transfer.tensor);
      }
    } catch (...) {
      error = std::current_exception();
    }
    if (!transfer.is_send) transfer.set_source_rank(source);
    transfer.tensor.reset();
  }
  transfer.target.reset();
  transfer.settle(std::move(error), hooks_.get());
  return transfer.has_announcement() ? 1 : 0;
}

std::exception_ptr Pairs::error_of(Transfer& transfer, const TransferFailure& failure) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (transfer.interruption_ != nullptr) return transfer.interruption_;
  }
  return failure_of_all(failure);
}

std::exception_ptr Pairs::failure_of_all(const TransferFailure& failure) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_ != nullptr) return failure_;
    if (failure.status == TransferFailure::kClosed && closed_ != nullptr) return closed_;
  }
  const std::exception_ptr made = raise_(failure);  // without the lock: it waits for the interpreter
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_ == nullptr) failure_ = made;
  return failure_;
}

void Pairs::close(const std::exception_ptr& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = error;
  }
  library_->transfers_close(transfers_);
}

bool Pairs::drain(Clock::time_point deadline) {
  const double timeout_s = std::chrono::duration<double>(deadline - Clock::now()).count();
  return library_->transfers_drain(transfers_, std::max(0.0, timeout_s)) != 0;
}

}  // namespace parallel_state
