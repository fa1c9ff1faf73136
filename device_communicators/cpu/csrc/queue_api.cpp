#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "../../control/csrc/machine.h"
#include "calling.h"
#include "handle.h"
#include "messages.h"
#include "open_queue.h"
#include "pack.h"
#include "queue.h"

namespace {

using namespace parallel_state;
using parallel_state::control::ProcessWatch;

// For ends that aren't ranks of a world, such as those of vLLM's queues.
class ProcessLiveness final : public Losses {
 public:
  // A PID of 0 or less isn't watched.
  ProcessLiveness(const std::int64_t* pids, int count) : processes_(static_cast<std::size_t>(count)) {
    for (Process& each : processes_) {
      each.pid = static_cast<int>(*pids++);
      has_ended(each);
    }
  }

  Loss loss(int awaited) const override {
    if (has_ended(processes_[awaited])) return Loss(awaited);
    for (std::size_t end = 0; end < processes_.size(); ++end) {
      if (has_ended(processes_[end])) return Loss(static_cast<int>(end));
    }
    return Loss();
  }
  bool watch(Sleep*) const override {
    return std::none_of(processes_.begin(), processes_.end(), [](const Process& each) { return each.pid > 0; });
  }

 private:
  struct Process {
    int pid = 0;
    mutable std::mutex opening;
    mutable ProcessWatch watch;
    mutable std::atomic<ProcessWatch::Found> found{ProcessWatch::kUnknown};
  };
  static bool has_ended(const Process& process) {
    if (process.pid > 0 && process.found.load(std::memory_order_acquire) == ProcessWatch::kUnknown) {
      const std::lock_guard<std::mutex> lock(process.opening);
      // Descriptors may have run out for a while.
      if (process.found.load(std::memory_order_relaxed) == ProcessWatch::kUnknown) {
        process.found.store(process.watch.open(process.pid, 0), std::memory_order_release);
      }
    }
    const ProcessWatch::Found found = process.found.load(std::memory_order_acquire);
    return found == ProcessWatch::kExited || (found == ProcessWatch::kRuns && process.watch.has_exited());
  }

  std::vector<Process> processes_;
};

template <typename End>
void* open(void* control, void* data, std::uint64_t chunk_bytes, std::uint64_t chunks, int readers, const int* ranks,
           int me, const void* liveness, std::int64_t spin_ns, int yields, QueueReport* report) {
  WaitPolicy policy;
  policy.spin_ns = spin_ns;
  policy.yields = yields;
  const auto made = std::make_shared<OpenEnd<End>>(control, data, RingShape{chunk_bytes, chunks, readers}, ranks, me,
                                                   *static_cast<const Watch*>(liveness)->losses, policy, report);
  made->spin_ns = spin_ns;
  made->itself = made;
  return made.get();
}

template <typename End, typename Add>
void serve(OpenEnd<End>* open, std::uint64_t group, std::uint64_t* broadcasts, Add add) {
  open->broadcasts = broadcasts;
  if (const std::shared_ptr<Handle> handle = find(group)) add(*handle);
}

template <typename End>
bool close(OpenEnd<End>* open) {
  const std::shared_ptr<OpenEnd<End>> last = open->itself;
  const InTurn<End> turn{*open};
  if (!turn) return false;
  open->closed = true;
  open->itself = nullptr;
  return true;
}

template <typename End>
int told(OpenEnd<End>* opened, QueueStatus status) {
  opened->report->suspect = opened->end.suspect();
  opened->report->reporter = opened->end.given_up().reporter;
  opened->report->reason = opened->end.given_up().status;
  return static_cast<int>(status);
}

// No limit: calls that bypass Python hold a turn only for a copy.
constexpr double kSoonS = 1e9;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

std::size_t ps_queue_control_bytes(int readers) { return RingShape{64, 1, readers}.control_bytes(); }

void* ps_liveness_new(const std::int64_t* pids, int count) {
  return new (std::nothrow) Watch{std::make_shared<const ProcessLiveness>(pids, count)};
}

void* ps_liveness_of(std::uint64_t group) {
  std::shared_ptr<Handle> handle = find(group);
  if (handle == nullptr) return nullptr;
  const Losses* const losses = &handle->liveness();
  return new (std::nothrow) Watch{std::shared_ptr<const Losses>(std::move(handle), losses)};
}

void ps_liveness_delete(void* liveness) { delete static_cast<Watch*>(liveness); }

void* ps_queue_writer_new(void* control, void* data, std::uint64_t chunk_bytes, std::uint64_t chunks, int readers,
                          const int* ranks, const void* liveness, std::int64_t spin_ns, int yields,
                          QueueReport* report) {
  return open<QueueWriter>(control, data, chunk_bytes, chunks, readers, ranks, 0, liveness, spin_ns, yields, report);
}

void* ps_queue_reader_new(void* control, void* data, std::uint64_t chunk_bytes, std::uint64_t chunks, int readers,
                          const int* ranks, int me, const void* liveness, std::int64_t spin_ns, int yields,
                          QueueReport* report) {
  return open<QueueReader>(control, data, chunk_bytes, chunks, readers, ranks, me, liveness, spin_ns, yields, report);
}

void ps_queue_writer_leave(void* writer) { static_cast<OpenWriter*>(writer)->end.leave(); }

void ps_queue_reader_leave(void* reader) { static_cast<OpenReader*>(reader)->end.leave(); }

// 0: a thread uses the end; keep its memory and call again.
int ps_queue_writer_delete(void* writer) { return close(static_cast<OpenWriter*>(writer)) ? 1 : 0; }
int ps_queue_reader_delete(void* reader) { return close(static_cast<OpenReader*>(reader)) ? 1 : 0; }

// `dst` -1: all other ranks.
void ps_queue_writer_serve(void* writer, std::uint64_t group, int dst, std::uint64_t* broadcasts) {
  auto* open = static_cast<OpenWriter*>(writer);
  serve(open, group, broadcasts, [=](Handle& handle) {
    open->end.set_lender(handle.lender());
    handle.queues().add(dst, open->itself);
  });
}
void ps_queue_reader_serve(void* reader, std::uint64_t group, int src, int of_all, std::uint64_t* broadcasts) {
  auto* open = static_cast<OpenReader*>(reader);
  serve(open, group, broadcasts, [=](Handle& handle) {
    open->end.set_lender(handle.arena_of(src));
    handle.queues().add(src, of_all != 0, open->itself);
  });
}

// Calls that bypass Python don't use the end until `calls` are taken back. Any thread.
void ps_queue_reserve(QueueReport* report, int calls) {
  // Release: a thread that reads the last withdrawal sees all that was received before.
  report->reserved.fetch_add(calls, std::memory_order_release);
}

// The first `more_heads` pieces belong to the head. Without a timeout returns kTimedOut unless all fits.
int ps_queue_send(void* writer, const char* head, std::uint64_t head_bytes, const Piece* pieces, int count,
                  int more_heads, std::uint64_t fingerprint, double timeout_s) {
  auto* opened = static_cast<OpenWriter*>(writer);
  constexpr int kFew = 64;
  Piece few[kFew];
  Piece* all = count < kFew ? few : new (std::nothrow) Piece[count + 1];
  if (all == nullptr) return static_cast<int>(QueueStatus::kMalformed);
  all[0] = {const_cast<char*>(head), head_bytes};
  if (count != 0) std::memcpy(all + 1, pieces, count * sizeof(Piece));
  const InTurn<QueueWriter> turn{*opened, kSoonS};
  const int status = told(opened, opened->end.send(all, count + 1, 1 + more_heads, fingerprint, timeout_s));
  if (all != few) delete[] all;
  return status;
}

// With the interpreter lock. 0: Python must do it; else call `ps_packed`.
int ps_pack(void* object, const void* python, int depth, std::uint64_t limit, std::uint64_t slices, std::uint64_t mine,
            void* whole) {
  if (!packer().pack(*static_cast<const Python*>(python), object, depth, limit, {slices, mine, whole})) return 0;
  packer().hold();
  return 1;
}

// This thread's last message. The caller releases `objects`. Null `pieces` frees the memory for the next message.
int ps_packed(Piece* pieces, int most, int* counts, void** objects) {
  Packer& packed = packer();
  if (pieces == nullptr) {
    packed.free();
    return 0;
  }
  const std::vector<Piece>& made = packed.pieces();
  const std::vector<void*> held = packed.take_held();
  const int count = static_cast<int>(made.size());
  counts[0] = packed.heads();
  counts[1] = static_cast<int>(held.size());
  std::copy(held.begin(), held.end(), objects);
  for (int index = 0; index < count && index < most; ++index) pieces[index] = made[static_cast<std::size_t>(index)];
  return count;
}

int ps_queue_resume(void* writer, double timeout_s) {
  auto* opened = static_cast<OpenWriter*>(writer);
  const InTurn<QueueWriter> turn{*opened, kSoonS};
  return told(opened, opened->end.resume(timeout_s));
}

int ps_queue_take(void* reader, char* head, std::uint64_t capacity, double timeout_s) {
  auto* opened = static_cast<OpenReader*>(reader);
  QueueReader& end = opened->end;
  QueueReport& report = *opened->report;
  const InTurn<QueueReader> turn{*opened, timeout_s};
  if (!turn) {
    report.suspect = end.writer();
    return static_cast<int>(QueueStatus::kTimedOut);
  }
  if (report.broken != 0) return static_cast<int>(report.broken);
  QueueStatus status = report.found != 0 ? QueueStatus::kDone : end.next(timeout_s);
  report.found = 0;
  if (status != QueueStatus::kDone) return told(opened, status);
  const std::uint64_t head_bytes = end.header().head_bytes;
  report.total_bytes = static_cast<std::int64_t>(end.header().total_bytes);
  report.head_bytes = static_cast<std::int64_t>(head_bytes);
  report.fingerprint = static_cast<std::int64_t>(end.header().fingerprint);
  if (head_bytes <= capacity) {
    const Piece piece{head, head_bytes};
    status = end.read(&piece, 1, timeout_s);
  }
  report.left_bytes = static_cast<std::int64_t>(end.bytes_left());
  return told(opened, status);
}

int ps_queue_read(void* reader, const Piece* pieces, int count, double timeout_s) {
  auto* opened = static_cast<OpenReader*>(reader);
  const InTurn<QueueReader> turn{*opened, kSoonS};
  const QueueStatus status = opened->end.read(pieces, count, timeout_s);
  opened->report->left_bytes = static_cast<std::int64_t>(opened->end.bytes_left());
  return told(opened, status);
}

}  // extern "C"
#pragma GCC visibility pop
