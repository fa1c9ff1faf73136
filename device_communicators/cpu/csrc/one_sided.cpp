#include "one_sided.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "copy.h"

namespace parallel_state {

class SharedWindow::Alive final : public Liveness {
 public:
  explicit Alive(const Handle& handle) : handle_(handle) {}
  bool is_alive(int rank) const override {
    const Loss found = handle_.loss(rank);
    return found.rank < 0 && found.reporter < 0;
  }

 private:
  const Handle& handle_;
};

SharedWindow::SharedWindow(std::uint64_t group, std::shared_ptr<Handle> handle, const WindowPart& part,
                           const void* data)
    : group_(group),
      handle_(std::move(handle)),
      rank_(handle_->rank()),
      parts_(static_cast<std::size_t>(handle_->size())) {
  WindowPart& own = parts_[static_cast<std::size_t>(rank_)];
  own = part;
  own.signals = own.memory = -1;
  Windows* const mapped = handle_->windows_of(rank_);
  if (mapped == nullptr) return;
  const auto bytes = static_cast<std::size_t>(own.bytes);
  const std::uint64_t given = data == nullptr ? Windows::kOutside : mapped->offset_of(data, bytes);
  own.is_copy = data != nullptr && given == Windows::kOutside ? 1 : 0;
  if (given == Windows::kOutside && (memory_ = handle_->arena()->allocate(bytes)) == nullptr) return;
  const std::size_t line_bytes = parts_.size() * sizeof(Counter);
  if ((signals_ = handle_->arena()->allocate(line_bytes)) == nullptr) return;
  for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
    (new (static_cast<Counter*>(signals_) + rank) Counter)->own();
  }
  if (own.is_copy != 0) {
    copy(memory_, data, bytes);
  } else if (memory_ != nullptr) {
    std::memset(memory_, 0, bytes);
  }
  own.memory = static_cast<std::int64_t>(memory_ == nullptr ? given : mapped->offset_of(memory_, bytes));
  own.signals = static_cast<std::int64_t>(mapped->offset_of(signals_, line_bytes));
}

Status SharedWindow::open(const WindowPart* parts, Refusal* refusal) {
  for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
    if (parts[rank].signals >= 0) continue;
    refusal->text = "rank " + std::to_string(rank) +
                    " of the group has no memory that other ranks map for its part of a window: enlarge /dev/shm, or "
                    "PARALLEL_STATE_SYMMETRIC_BYTES on all ranks";
    return Status::kUnsupported;
  }
  parts_.assign(parts, parts + parts_.size());
  for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
    peers_.push_back(std::make_unique<Peer>());
    Windows* const mapped = handle_->windows_of(static_cast<int>(rank));
    if (mapped == nullptr) continue;
    Peer& peer = *peers_.back();
    const WindowPart& part = parts_[rank];
    peer.memory = mapped->at(static_cast<std::uint64_t>(part.memory), static_cast<std::size_t>(part.bytes));
    char* const line = mapped->at(static_cast<std::uint64_t>(part.signals), parts_.size() * sizeof(Counter));
    if (peer.memory == nullptr || line == nullptr) return Status::kUnmapped;
    peer.to = static_cast<Counter*>(signals_) + rank;
    peer.from = reinterpret_cast<Counter*>(line) + rank_;
  }
  return Status::kDone;
}

void SharedWindow::end() {
  if (ended_.exchange(true)) return;
  for (void* const block : {memory_, signals_}) {
    if (block != nullptr) handle_->arena()->release(block);
  }
}

Status SharedWindow::check(int rank, const char* call, Refusal* refusal) const {
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
  if (peer(rank).memory != nullptr) return Status::kDone;
  refusal->text = std::string(call) + ": rank " + number(rank) + " shares no memory with rank " + number(rank_) +
                  ", so neither can use the other's window; use send and recv between hosts";
  return Status::kUnsupported;
}

Status SharedWindow::put(int dst, std::int64_t first, std::int64_t elements, int dtype, const void* data,
                         Refusal* refusal) {
  const Status status = check(dst, "put", refusal);
  if (status != Status::kDone) return status;
  const WindowPart& part = parts_[static_cast<std::size_t>(dst)];
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
  refusal->loss = handle_->loss(dst);
  if (refusal->loss.rank >= 0 || refusal->loss.reporter >= 0) return Status::kPeerDied;
  if (elements == 0) return Status::kDone;
  const std::int64_t width = part.bytes / part.elements;
  copy(peer(dst).memory + first * width, data, static_cast<std::size_t>(elements * width));
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return Status::kDone;
}

Status SharedWindow::signal(int dst, Refusal* refusal) {
  const Status status = check(dst, "signal", refusal);
  if (status != Status::kDone) return status;
  refusal->loss = handle_->loss(dst);
  if (refusal->loss.rank >= 0 || refusal->loss.reporter >= 0) return Status::kPeerDied;
  Peer& to = peer(dst);
  const std::lock_guard<std::mutex> lock(to.mutex);
  to.to->publish(++to.sent, 0);
  return Status::kDone;
}

Status SharedWindow::wait_signal(int src, double timeout_s, Refusal* refusal) {
  const Status status = check(src, "wait_signal", refusal);
  if (status != Status::kDone) return status;
  Peer& from = peer(src);
  const Alive alive(*handle_);
  Deadline deadline;
  deadline.set(timeout_s);
  for (;;) {
    std::uint64_t taken = from.taken.load(std::memory_order_relaxed);
    if (from.from->read() > taken) {
      if (from.taken.compare_exchange_strong(taken, taken + 1, std::memory_order_acq_rel)) return Status::kDone;
      continue;  // another thread took it
    }
    if (timeout_s <= 0) return Status::kTimedOut;
    switch (wait_for(*from.from, taken + 1, handle_->wait_policy(), deadline, alive, src)) {
      case WaitResult::kReached: break;
      case WaitResult::kTimedOut: return Status::kTimedOut;
      case WaitResult::kInterrupted: return Status::kInterrupted;
      case WaitResult::kPeerDied: refusal->loss = handle_->loss(src); return Status::kPeerDied;
    }
  }
}

Status SharedWindow::memory_of(int rank, void** found, Refusal* refusal) {
  const Status status = check(rank, "map_remote_tensor", refusal);
  if (status == Status::kDone) *found = peer(rank).memory;
  return status;
}

}  // namespace parallel_state
