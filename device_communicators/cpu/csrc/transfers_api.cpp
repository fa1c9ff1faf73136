#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "calling.h"
#include "handle.h"
#include "released.h"
#include "rings.h"
#include "streams.h"

namespace {

using namespace parallel_state;

Transfers& transfers_of(void* opened) { return **static_cast<std::shared_ptr<Transfers>*>(opened); }

constexpr TransferUser kPython{nullptr, nullptr, [](void* object) { released().add(&object, 1); }};

template <typename Function>
void* unlocked(Function function) {
  std::int64_t outcome = 0;
  bool has_memory = true;
  const Released::Visit here;
  try {
    outcome = without_lock(function);
  } catch (const std::bad_alloc&) {
    has_memory = false;
  }
  released().let_go();
  return has_memory ? calling.make_integer(outcome) : calling.no_memory();
}

// A rank that left on purpose isn't lost: its data may still arrive, and then its connection ends.
class GroupLosses final : public Losses {
 public:
  explicit GroupLosses(std::shared_ptr<Handle> handle) : handle_(std::move(handle)) {}

  Loss loss(int awaited) const override {
    const Loss found = handle_->loss(awaited);
    if (found.rank != awaited || found.reporter >= 0 || !handle_->has_left(awaited)) return found;
    return handle_->liveness().is_doomed() ? Loss(kOutside) : Loss();
  }
  // Connections report ranks that gave up; wake_progress reports deaths.
  bool watch(Sleep*) const override { return true; }

 private:
  const std::shared_ptr<Handle> handle_;
};

template <typename Made>
void* opened(Made made) {
  return new std::shared_ptr<Transfers>(std::move(made));
}

// The transfer keeps `owner`.
TransferCall call_of(void* const* given, void* owner) {
  calling.hold(owner);
  return {int_of(given[2]),
          int_of(given[1]),
          int_of(given[3]),
          int_of(given[4]),
          pointer_of(given[5]),
          number_of(given[6]),
          0,
          &kPython,
          owner};
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// `losses`: of ps_liveness_new or ps_liveness_of. Null without memory.
void* ps_rings_new(const void* losses, int rank, int size, const std::int64_t* places) {
  static_assert(sizeof(TransferPlaces) == 9 * sizeof(std::int64_t));
  TransferPlaces given;
  std::memcpy(&given, places, sizeof given);
  try {
    return opened(std::make_shared<Rings>(static_cast<const Watch*>(losses)->losses, rank, size, given));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// This rank may send `early_bytes` before their receive. `granted_bytes`: see Streams. `losses`: of ps_liveness_new or
// ps_group_losses.
void* ps_streams_new(const void* losses, int rank, int size, const int* ranks, const int* descriptors,
                     const std::uint64_t* early_bytes, int count, std::uint64_t granted_bytes, std::int64_t spin_ns,
                     std::uint64_t striped_bytes) {
  try {
    const auto made = std::make_shared<Streams>(static_cast<const Watch*>(losses)->losses, rank, size, granted_bytes,
                                                spin_ns, striped_bytes);
    for (int at = 0; at < count; ++at) made->add(ranks[at], descriptors[at], early_bytes[at]);
    return opened(made);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void ps_streams_facts(void* transfers, int rank, std::uint64_t* out) {
  static_cast<Streams&>(transfers_of(transfers)).facts(rank, out);
}

void* ps_group_losses(std::uint64_t group) {
  std::shared_ptr<Handle> handle = find(group);
  if (handle == nullptr) return nullptr;
  return new (std::nothrow) Watch{std::make_shared<const GroupLosses>(std::move(handle))};
}

// A forked child deletes nothing: a thread of the parent may have held the lock.
void ps_transfers_delete(void* transfers) {
  if (!transfers_of(transfers).is_foreign()) delete static_cast<std::shared_ptr<Transfers>*>(transfers);
}

void ps_transfers_serve(void* transfers, std::uint64_t group, int tag) {
  transfers_of(transfers).serve(tag);
  if (const std::shared_ptr<Handle> handle = find(group)) {
    handle->set_transfers(*static_cast<std::shared_ptr<Transfers>*>(transfers));
  }
}

std::int64_t ps_transfers_start(void* transfers, const TransferCall* call) {
  return transfers_of(transfers).start(*call, false);
}

int ps_transfers_wait(void* transfers, std::uint64_t number, double timeout_s) {
  return transfers_of(transfers).wait(number, timeout_s, false);
}

void ps_transfers_interrupt(void* transfers, std::uint64_t number, int ends_all) {
  transfers_of(transfers).interrupt(number, ends_all != 0);
}

int ps_transfers_failure(void* transfers, std::int64_t* words) {
  TransferFailure failure;
  const bool has_failed = transfers_of(transfers).failure(&failure);
  std::memcpy(words, &failure, sizeof failure);
  return has_failed ? 1 : 0;
}

void ps_transfers_failure_text(void* transfers, char* text, std::size_t capacity) {
  const std::string said = transfers_of(transfers).failure_text();
  text[said.copy(text, capacity - 1)] = '\0';
}

void ps_transfers_abandon(void* transfers) { transfers_of(transfers).abandon(); }

int ps_transfers_is_inside(void* transfers, int peer, int sends) {
  return transfers_of(transfers).is_inside(peer, sends != 0) ? 1 : 0;
}

int ps_transfers_waiting_sends(void* transfers, int dst) { return transfers_of(transfers).waiting_sends(dst); }

void ps_set_add_pending(Released::AddPending add_pending) { released().set_add_pending(add_pending); }

void ps_transfers_reserve(void* transfers, int src, int receives) { transfers_of(transfers).reserve(src, receives); }

int ps_transfers_drain(void* transfers, double timeout_s) { return transfers_of(transfers).drain(timeout_s) ? 1 : 0; }

// 0: a thread is still in a queue, whose memory must stay.
int ps_transfers_close(void* transfers) { return transfers_of(transfers).close() ? 1 : 0; }

void* ps_transfers_starting(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 8) return nullptr;
  const TransferCall call = call_of(given, given[7]);
  const auto transfers = shared<Transfers>(given[0]);
  return unlocked([&] { return transfers->start(call, false); });
}

// Timeout in us.
void* ps_transfers_running(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 9) return nullptr;
  const TransferCall call = call_of(given, given[7]);
  const auto transfers = shared<Transfers>(given[0]);
  const double timeout_s = seconds_of(given[8]);
  return unlocked([&]() -> std::int64_t { return transfers->run(call, timeout_s); });
}

// Timeout in us. If a signal handler ends the wait, the transfer continues, unless all transfers end together.
void* ps_transfers_waiting(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 3) return nullptr;
  const auto transfers = shared<Transfers>(given[0]);
  const std::uint64_t number = number_of(given[1]);
  const double timeout_s = seconds_of(given[2]);
  return unlocked([&]() -> std::int64_t {
    const int outcome = transfers->wait(number, timeout_s, true);
    if (outcome == kInterruptedTransfer && transfers->end_together()) transfers->interrupt(number, true);
    return outcome;
  });
}

void* ps_transfers_done(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 2) return nullptr;
  const auto transfers = shared<Transfers>(given[0]);
  const std::uint64_t number = number_of(given[1]);
  return unlocked([&]() -> std::int64_t { return transfers->is_done(number) ? 1 : 0; });
}

}  // extern "C"
#pragma GCC visibility pop
