#include "one_sided.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "copy.h"

namespace parallel_state {

SharedWindow::SharedWindow(std::uint64_t group, std::shared_ptr<Handle> handle, const WindowPart& part,
                           const void* data)
    : group_(group),
      handle_(std::move(handle)),
      rank_(handle_->rank()),
      streams_(std::dynamic_pointer_cast<Streams>(handle_->transfers())),
      parts_(static_cast<std::size_t>(handle_->size())) {
  WindowPart& own = parts_[static_cast<std::size_t>(rank_)];
  own = part;
  own.signals = own.memory = -1;
  Windows* const mapped = handle_->windows_of(rank_);
  const auto bytes = static_cast<std::size_t>(own.bytes);
  is_given_ = mapped != nullptr && data != nullptr && mapped->offset_of(data, bytes) != Windows::kOutside;
  own.is_copy = data != nullptr && !is_given_ ? 1 : 0;
  const std::size_t line_bytes = parts_.size() * sizeof(Counter);
  memory_ = is_given_ ? std::shared_ptr<char>(handle_, static_cast<char*>(const_cast<void*>(data))) : allocate(bytes);
  if (memory_ == nullptr || (signals_ = allocate(line_bytes)) == nullptr) return;
  for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
    (new (signals_.get() + rank * sizeof(Counter)) Counter)->own();
  }
  if (own.is_copy != 0) {
    copy(memory_.get(), data, bytes);
  } else if (!is_given_) {
    std::memset(memory_.get(), 0, bytes);
  }
  const auto offset_of = [mapped](const std::shared_ptr<char>& block, std::size_t size) {
    return static_cast<std::int64_t>(mapped == nullptr ? 0 : mapped->offset_of(block.get(), size));
  };
  own.memory = offset_of(memory_, bytes);
  own.signals = offset_of(signals_, line_bytes);
  if (streams_ != nullptr) own.number = streams_->open_window(memory_, static_cast<std::uint64_t>(bytes));
}

SharedWindow::~SharedWindow() {
  if (streams_ != nullptr && number_of(rank_) != 0 && peers_.empty()) streams_->close_window(number_of(rank_));
}

// In the arena, until `end`; privately for a rank alone on its host.
std::shared_ptr<char> SharedWindow::allocate(std::size_t bytes) {
  if (Arena* const arena = handle_->arena()) {
    void* const block = arena->allocate(bytes);
    return block == nullptr ? nullptr : std::shared_ptr<char>(handle_, static_cast<char*>(block));
  }
  const HostsGroup* const hosts = handle_->hosts();
  if ((hosts == nullptr ? parts_.size() : hosts->local_ranks().size()) > 1) return nullptr;
  void* const block = std::aligned_alloc(kPage, (bytes / kPage + 1) * kPage);
  return block == nullptr ? nullptr : std::shared_ptr<char>(static_cast<char*>(block), std::free);
}

Status SharedWindow::open(const WindowPart* parts, Refusal* refusal) {
  for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
    if (parts[rank].signals >= 0) continue;
    refusal->text = "rank " + std::to_string(rank) +
                    " of the group has too little shared memory for its part of a window: enlarge /dev/shm, or raise "
                    "PARALLEL_STATE_SYMMETRIC_BYTES on all ranks";
    return Status::kUnsupported;
  }
  parts_.assign(parts, parts + parts_.size());
  for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
    peers_.push_back(std::make_unique<Peer>());
    Windows* const mapped = handle_->windows_of(static_cast<int>(rank));
    const bool is_own = static_cast<int>(rank) == rank_;
    if (mapped == nullptr && !is_own) continue;
    Peer& peer = *peers_.back();
    const WindowPart& part = parts_[rank];
    char* line = signals_.get();
    peer.memory = memory_.get();
    if (!is_own) {
      peer.memory = mapped->at(static_cast<std::uint64_t>(part.memory), static_cast<std::size_t>(part.bytes));
      line = mapped->at(static_cast<std::uint64_t>(part.signals), parts_.size() * sizeof(Counter));
    }
    if (peer.memory == nullptr || line == nullptr) return Status::kUnmapped;
    peer.to = reinterpret_cast<Counter*>(signals_.get()) + rank;
    peer.from = reinterpret_cast<Counter*>(line) + rank_;
  }
  return Status::kDone;
}

Status SharedWindow::end(Refusal* refusal) {
  if (ended_.exchange(true)) return Status::kDone;
  if (streams_ != nullptr) {
    std::vector<std::uint32_t> apart;
    for (int rank = 0; rank < handle_->size(); ++rank) {
      apart.push_back(peer(rank).memory == nullptr ? number_of(rank) : 0);
    }
    const int how = streams_->await_puts(number_of(rank_), apart, handle_->timeout_s());
    if (how != kEndedTransfer) return ended(how, "deregister", -1, refusal);
    streams_->close_window(number_of(rank_));
  }
  Arena* const arena = handle_->arena();
  if (arena == nullptr) return Status::kDone;
  if (!is_given_) arena->release(memory_.get());
  arena->release(signals_.get());
  return Status::kDone;
}

Status SharedWindow::lost(int rank, Refusal* refusal) const {
  refusal->loss = handle_->loss(rank);
  return refusal->loss.rank >= 0 || refusal->loss.reporter >= 0 ? Status::kPeerDied : Status::kDone;
}

Status SharedWindow::ended(int how, const char* call, int rank, Refusal* refusal) const {
  if (how == kEndedTransfer) return Status::kDone;
  if (how == kLateTransfer) return Status::kTimedOut;
  if (how == kInterruptedTransfer) return Status::kInterrupted;
  if (how == kInsideWait) {
    refusal->text =
        std::string(call) + ": a signal handler can't make this call while it interrupts a transfer between hosts";
    return Status::kWrongArgument;
  }
  if (rank >= 0 && handle_->has_left(rank)) return refusal->loss = Loss(rank), Status::kPeerDied;
  streams_->failure(&refusal->failure);
  refusal->text = streams_->failure_text();
  return refusal->failure.status == TransferFailure::kClosed ? Status::kClosed : Status::kBroken;
}

Status SharedWindow::check(int rank, const char* call, bool maps, Refusal* refusal) const {
  const auto number = [](auto value) { return std::to_string(value); };
  if (ended_.load(std::memory_order_acquire)) {
    refusal->text = std::string(call) + ": the window was deregistered";
    return Status::kWrongArgument;
  }
  if (rank < 0 || rank >= handle_->size()) {
    refusal->text = std::string(call) + ": the rank must be one of the group, 0 to " + number(handle_->size() - 1) +
                    ", but is " + number(rank);
    return Status::kWrongArgument;
  }
  if (find(group_) != handle_) return Status::kClosed;
  if (peer(rank).memory != nullptr || (streams_ != nullptr && !maps)) return Status::kDone;
  refusal->text = std::string(call) + ": rank " + number(rank) + " shares no memory with rank " + number(rank_) +
                  (maps ? ", so it can't be mapped; use put" : ", and only the first ranks of the hosts are connected");
  return Status::kUnsupported;
}

Status SharedWindow::write(int dst, std::size_t offset, const void* data, std::size_t bytes, bool signals,
                           const char* call, Refusal* refusal) {
  Peer& to = peer(dst);
  if (to.memory == nullptr) {
    const double timeout_s = handle_->timeout_s();
    return ended(streams_->put(dst, number_of(dst), offset, data, bytes, signals, timeout_s), call, dst, refusal);
  }
  if (bytes != 0) {
    copy(to.memory + offset, data, bytes);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  if (!signals) return Status::kDone;
  const std::lock_guard<std::mutex> lock(to.mutex);
  to.to->publish(++to.sent, 0);
  return Status::kDone;
}

Status SharedWindow::put(int dst, std::int64_t first, std::int64_t elements, int dtype, const void* data, bool signals,
                         Refusal* refusal) {
  Status status = check(dst, "put", false, refusal);
  if (status != Status::kDone) return status;
  const WindowPart& part = part_of(dst);
  if (dtype != part.dtype) {
    refusal->text = "put: the tensor must have the dtype of the window of rank " + std::to_string(dst);
    return Status::kWrongArgument;
  }
  if (first < 0 || elements > part.elements || first > part.elements - elements) {
    refusal->text = "put: elements " + std::to_string(first) + " to " + std::to_string(first + elements) +
                    " aren't all in the window of rank " + std::to_string(dst) + ", which has " +
                    std::to_string(part.elements);
    return Status::kWrongArgument;
  }
  if ((status = lost(dst, refusal)) != Status::kDone || (elements == 0 && !signals)) return status;
  const std::int64_t width = elements == 0 ? 0 : part.bytes / part.elements;
  return write(dst, static_cast<std::size_t>(first * width), data, static_cast<std::size_t>(elements * width), signals,
               "put", refusal);
}

Status SharedWindow::signal(int dst, Refusal* refusal) {
  Status status = check(dst, "signal", false, refusal);
  if (status != Status::kDone || (status = lost(dst, refusal)) != Status::kDone) return status;
  return write(dst, 0, nullptr, 0, true, "signal", refusal);
}

Status SharedWindow::wait_signal(int src, double timeout_s, Refusal* refusal) {
  const Status status = check(src, "wait_signal", false, refusal);
  if (status != Status::kDone) return status;
  Peer& from = peer(src);
  if (from.memory == nullptr) {
    return ended(streams_->take_signal(src, number_of(rank_), timeout_s), "wait_signal", src, refusal);
  }
  Deadline deadline;
  deadline.set(timeout_s);
  for (;;) {
    std::uint64_t taken = from.taken.load(std::memory_order_relaxed);
    if (from.from->read() > taken) {
      if (from.taken.compare_exchange_strong(taken, taken + 1, std::memory_order_acq_rel)) return Status::kDone;
      continue;
    }
    if (timeout_s <= 0) return Status::kTimedOut;
    switch (wait_for(*from.from, taken + 1, handle_->wait_policy(), deadline, *handle_, src)) {
      case WaitResult::kReached: break;
      case WaitResult::kTimedOut: return Status::kTimedOut;
      case WaitResult::kInterrupted: return Status::kInterrupted;
      case WaitResult::kPeerDied: refusal->loss = handle_->loss(src); return Status::kPeerDied;
    }
  }
}

Status SharedWindow::memory_of(int rank, void** found, Refusal* refusal) {
  const Status status = check(rank, "map_remote_tensor", true, refusal);
  if (status == Status::kDone) *found = peer(rank).memory;
  return status;
}

}  // namespace parallel_state
