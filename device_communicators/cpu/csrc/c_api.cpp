// A closed group returns kClosed.

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "calling.h"
#include "handle.h"
#include "../../control/csrc/driver.h"
#include "interrupt.h"

using namespace parallel_state;

namespace {

template <typename Call>
int with(std::uint64_t group, std::uint64_t word, std::uint64_t shape, Call call) {
  const std::shared_ptr<Handle> handle = find(group);
  if (handle == nullptr) return static_cast<int>(Status::kClosed);
  if (take_overlap(handle.get())) return static_cast<int>(Status::kBusy);
  return static_cast<int>(handle->run([&](Group& self, double timeout_s) {
    self.tell({word, shape});
    return call(self, timeout_s);
  }));
}

template <typename... Parameters, typename... Arguments>
int with(std::uint64_t group, std::uint64_t word, std::uint64_t shape, Status (Group::*call)(Parameters...),
         Arguments... arguments) {
  return with(group, word, shape, [=](Group& self, double timeout_s) { return (self.*call)(arguments..., timeout_s); });
}

// A closed group returns zero.
template <typename Function>
auto of(std::uint64_t group, Function function) -> decltype(function(std::declval<Handle&>())) {
  if (const std::shared_ptr<Handle> handle = find(group)) return function(*handle);
  return decltype(function(std::declval<Handle&>()))();
}

std::int64_t* show(const Shown& shown, std::int64_t* out) {
  *out++ = static_cast<std::int64_t>(shown.told.word);
  *out++ = static_cast<std::int64_t>(shown.told.shape);
  *out++ = shown.count;
  for (const std::uint64_t bytes : shown.parts) *out++ = static_cast<std::int64_t>(bytes);
  return out;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int ps_version() { return 25; }

const char* ps_instruction_set() { return instruction_set(); }

int ps_use_instruction_set(const char* name) { return use_instruction_set(name) ? 0 : 1; }

void ps_set_interpreter(int (*take_lock)(), int (*check_signals)(), void (*fetch)(void**, void**, void**),
                        void (*let_lock)(int), unsigned long main_thread) {
  set_interpreter({take_lock, check_signals, fetch, let_lock}, main_thread);
}

void ps_set_calling(const Calling* functions) { calling = *functions; }

void ps_take_exception(void** out) { take_exception(&out[0], &out[1], &out[2]); }

void* ps_signal_pipe() { return &signal_pipe(); }

int ps_has_signal() { return has_signal(signal_pipe()) ? 1 : 0; }

std::size_t ps_segment_bytes(int size) { return Handle::segment_bytes(size); }

std::size_t ps_slots_offset(int size, int rank) { return HostGroup::slots_offset(size, rank); }

void* ps_map(int descriptor, std::size_t bytes, std::size_t offset) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, static_cast<off_t>(offset));
  return memory == MAP_FAILED ? nullptr : memory;
}

void ps_unmap(void* memory, std::size_t bytes) { munmap(memory, bytes); }

int ps_has_populate() { return has_populate() ? 1 : 0; }
int ps_back(void* memory, std::size_t bytes, int descriptor, std::size_t offset) {
  return back_with_memory(memory, bytes, descriptor, offset) ? 1 : 0;
}

int ps_want_huge_pages() { return want_huge_pages(); }

void* ps_windows_new(void* first_page, std::size_t capacity, std::size_t first_window_bytes) {
  return new (std::nothrow) Windows(first_page, capacity, first_window_bytes);
}
void* ps_windows_at(void* windows, std::size_t offset, std::size_t bytes) {
  return static_cast<Windows*>(windows)->at(offset, bytes);
}
void ps_windows_delete(void* windows) { delete static_cast<Windows*>(windows); }

std::uint64_t ps_group_new(void* memory, std::size_t bytes, int rank, int size, std::int64_t spin_ns, int yields,
                           double timeout_s) {
  WaitPolicy policy;
  policy.spin_ns = spin_ns;
  policy.yields = yields;
  return keep(std::make_shared<Handle>(memory, bytes, rank, size, policy, timeout_s));
}

// Owns `descriptors`, which connect to `peers`; see Connections. Call it once, before ps_group_listen and any call.
// Returns 0, or EBADF for an unknown group.
int ps_group_span(std::uint64_t group, int rank, int size, const int* host_of_rank, const int* peers,
                  const int* descriptors, int connections, int meshed, int rounded) {
  const std::shared_ptr<Handle> handle = find(group);
  if (handle == nullptr) return EBADF;
  handle->span(rank, {host_of_rank, host_of_rank + size},
               std::make_unique<Connections>(size, peers, descriptors, connections), meshed != 0, rounded != 0);
  return 0;
}

void ps_group_arenas(std::uint64_t group, void* const* first_pages, std::size_t bytes, int descriptor,
                     std::size_t file_offset) {
  of(group, [=](Handle& handle) { handle.set_arenas(first_pages, bytes, descriptor, file_offset); });
}

void ps_group_areas(std::uint64_t group, int ranks, std::int64_t from_bytes) {
  of(group, [=](Handle& handle) { handle.set_areas(ranks, from_bytes); });
}
std::uint64_t ps_group_crossed_bytes(std::uint64_t group) {
  return of(group, [](Handle& handle) { return handle.crossed_bytes(); });
}

void* ps_group_allocate(std::uint64_t group, std::size_t bytes) {
  return of(group,
            [=](Handle& handle) { return handle.arena() == nullptr ? nullptr : handle.arena()->allocate(bytes); });
}

std::uint64_t ps_group_arena(std::uint64_t group, int trims) {
  const std::shared_ptr<Handle> handle = find(group);
  if (handle == nullptr || handle->arena() == nullptr) return 0;
  if (trims != 0) {
    handle->lender()->collect();
    handle->arena()->trim();
  }
  return handle->arena()->bytes();
}

// Returns the memory of whole pages of a shared file to the system, for all processes.
int ps_unback(void* memory, std::size_t bytes) { return madvise(memory, bytes, MADV_REMOVE) == 0 ? 1 : 0; }

std::uint64_t ps_backed_bytes(void* memory, std::size_t bytes) {
  std::vector<unsigned char> pages((bytes + kPage - 1) / kPage);
  if (mincore(memory, bytes, pages.data()) != 0) return 0;
  return kPage *
         static_cast<std::uint64_t>(std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; }));
}

void ps_group_leave(std::uint64_t group) {
  of(group, [](Handle& handle) { handle.leave_group(); });
}

void ps_group_timeout(std::uint64_t group, double timeout_s) {
  of(group, [=](Handle& handle) { handle.set_timeout(timeout_s); });
}

void ps_wait_gently(int gently) { wait_gently(gently != 0); }

int ps_group_has_left(std::uint64_t group, int rank) {
  return of(group, [=](Handle& handle) { return handle.has_left(rank) ? 1 : 0; });
}

int ps_group_listen(std::uint64_t group, std::int64_t stay, const int* ranks, int count, const int* domain,
                    int domain_count) {
  const std::shared_ptr<Handle> handle = find(group);
  const std::shared_ptr<control::Stay> found = control::find_stay(stay);
  if (handle == nullptr || found == nullptr) return 0;
  handle->listen_to(found->listeners, {ranks, ranks + count}, {domain, domain + domain_count});
  return 1;
}

void ps_group_doom(std::uint64_t group) {
  of(group, [](Handle& handle) { handle.liveness().doom(); });
}

void ps_group_fail(std::uint64_t group, int status, int suspect) {
  of(group, [=](Handle& handle) { handle.fail(status, suspect); });
}

// Memory is freed after the last call and the last tensor.
void ps_group_close(std::uint64_t group) {
  const std::shared_ptr<Handle> handle = find(group);
  if (handle != nullptr && handle->arena() != nullptr) {
    handle->lender()->collect();
    handle->arena()->end();
  }
  if (handle != nullptr && handle->hosts() != nullptr) handle->hosts()->connections().close();
  forget(group);
}

void ps_serve(const char* key, std::uint64_t group) {
  if (std::shared_ptr<Handle> handle = find(group)) serve(key, std::move(handle));
}

void ps_served_go_on(const char* key, std::uint64_t sequence) {
  if (const std::shared_ptr<Served> served = find_served(key)) served->go_on_after(sequence);
}

void ps_measure_calls(int on) { measure_calls(on != 0); }

void ps_group_meter(std::uint64_t group, std::uint64_t* out) {
  constexpr auto relaxed = std::memory_order_relaxed;
  const std::shared_ptr<Handle> handle = find(group);
  if (handle == nullptr) return;
  for (const Meter::Row& row : handle->meter().rows) {
    for (const auto* word : {&row.calls, &row.took_ns, &row.waited_ns}) *out++ = word->load(relaxed);
  }
  for (const auto& last : handle->meter().last) *out++ = last.load(relaxed);
}

void ps_stop_serving(const char* key) { stop_serving(key); }

// The calls are this rank's and the other's, each with 64 sizes of parts.
void ps_group_failure(std::uint64_t group, std::int64_t* out) {
  const Failure failure = of(group, [](Handle& handle) { return handle.failure(); });
  *out++ = failure.suspect;
  *out++ = static_cast<std::int64_t>(failure.elapsed_s * 1e6);
  *out++ = failure.reporter;
  *out++ = failure.misfit.from;
  *out++ = failure.misfit.to;
  *out++ = static_cast<std::int64_t>(failure.misfit.sent_bytes);
  *out++ = static_cast<std::int64_t>(failure.misfit.expected_bytes);
  show(failure.found, show(failure.expected, out));
}

void ps_group_failure_text(std::uint64_t group, char* out, int capacity) {
  const std::string text = of(group, [](Handle& handle) { return handle.failure().text; });
  if (capacity > 0) out[text.copy(out, static_cast<std::size_t>(capacity) - 1)] = '\0';
}

void ps_call_as(int method) { call_as(method); }

double ps_repeated_since_s() { return repeated_since_s(); }

// Returns kBusy if a call is running.
int ps_group_enter(std::uint64_t group) {
  const std::shared_ptr<Handle> handle = find(group);
  return static_cast<int>(handle == nullptr ? Status::kClosed : handle->hold() ? Status::kDone : Status::kBusy);
}

void ps_group_exit(std::uint64_t group) {
  of(group, [](Handle& handle) { handle.release(); });
}

int ps_group_is_busy(std::uint64_t group) {
  return of(group, [](Handle& handle) { return handle.is_busy() ? 1 : 0; });
}

int ps_compare(std::uint64_t group, std::uint64_t word, std::uint64_t shape) {
  return with(group, word, shape, &Group::compare);
}

void* ps_entering(void*, void* const* given, std::ptrdiff_t count) {
  return count == 1 ? calling.make_integer(ps_group_enter(number_of(given[0]))) : nullptr;
}

void* ps_announcing(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 5) return nullptr;
  const std::uint64_t group = number_of(given[0]), word = number_of(given[1]), shape = number_of(given[2]);
  const auto src = static_cast<int>(number_of(given[3]));
  const auto spin_ns = static_cast<std::int64_t>(number_of(given[4]));
  const auto announce = [=](Group& self, double timeout_s) { return self.announce(src, timeout_s, spin_ns); };
  return calling.make_integer(without_lock([&] { return with(group, word, shape, announce); }));
}

void* ps_exiting(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 1) return nullptr;
  ps_group_exit(number_of(given[0]));
  return calling.make_integer(0);
}

void ps_served_traffic(const char* key, std::uint64_t* out) {
  const std::shared_ptr<Served> served = find_served(key);
  for (int operation = 0; operation < static_cast<int>(Counted::kCount); ++operation) {
    const Traffic* traffic = served == nullptr ? nullptr : &served->traffic(static_cast<Counted>(operation));
    out[2 * operation] = traffic == nullptr ? 0 : traffic->calls.load(std::memory_order_relaxed);
    out[2 * operation + 1] = traffic == nullptr ? 0 : traffic->bytes.load(std::memory_order_relaxed);
  }
}

std::uint64_t ps_served_next(const char* key) {
  const std::shared_ptr<Served> served = find_served(key);
  return served == nullptr ? 0 : served->next_in_python();
}

int ps_served_records() { return 2 * Served::kRecords; }

int ps_served_has_transfers(const char* key) {
  const std::shared_ptr<Served> served = find_served(key);
  return served != nullptr && served->has_transfers() ? 1 : 0;
}

// Unordered rows. Times are microseconds of the monotonic clock (0: none).
void ps_served_recorded(const char* key, std::int64_t* out) {
  const std::shared_ptr<Served> served = find_served(key);
  constexpr auto relaxed = std::memory_order_relaxed;
  for (std::uint64_t index = 0; index < 2 * Served::kRecords; ++index) {
    if (served == nullptr) {
      std::fill_n(out, 8 + Record::kDims, 0);
      out += 8 + Record::kDims;
      continue;
    }
    const Record& record = served->record(index);
    *out++ = static_cast<std::int64_t>(record.sequence.load(relaxed));
    for (const auto* word : {&record.operation, &record.dtype, &record.dims, &record.peer, &record.method}) {
      *out++ = word->load(relaxed);
    }
    for (const auto* time : {&record.started_s, &record.ended_s})
      *out++ = static_cast<std::int64_t>(time->load(relaxed) * 1e6);
    for (const auto& size : record.sizes) *out++ = size.load(relaxed);
  }
}

int ps_barrier(std::uint64_t group, std::uint64_t word, std::uint64_t shape) {
  return with(group, word, shape, &Group::barrier);
}

int ps_all_reduce(std::uint64_t group, std::uint64_t word, std::uint64_t shape, void* out, const void* in,
                  std::size_t count, int dtype, int op) {
  return with(group, word, shape, &Group::all_reduce, out, in, count, static_cast<Dtype>(dtype),
              static_cast<ReduceOp>(op));
}

int ps_reduce_scatter(std::uint64_t group, std::uint64_t word, std::uint64_t shape, void* out, const void* in,
                      std::size_t outer, std::size_t inner, int dtype, int op) {
  return with(group, word, shape, &Group::reduce_scatter, out, in, outer, inner, static_cast<Dtype>(dtype),
              static_cast<ReduceOp>(op));
}

int ps_all_gather(std::uint64_t group, std::uint64_t word, std::uint64_t shape, void* out, const void* in,
                  std::size_t outer, std::size_t inner_bytes) {
  return with(group, word, shape, &Group::all_gather, out, in, outer, inner_bytes);
}

int ps_gatherv(std::uint64_t group, std::uint64_t word, std::uint64_t shape, void* const* outs,
               const std::size_t* bytes, const void* in, int dst) {
  return with(group, word, shape, &Group::gatherv, outs, bytes, in, dst);
}

int ps_broadcast(std::uint64_t group, std::uint64_t word, std::uint64_t shape, void* data, std::size_t bytes, int src) {
  return with(group, word, shape, &Group::broadcast, data, bytes, src);
}

int ps_scatter(std::uint64_t group, std::uint64_t word, std::uint64_t shape, void* out, const void* in,
               std::size_t bytes, int src) {
  return with(group, word, shape, &Group::scatter, out, in, bytes, src);
}

int ps_all_to_all(std::uint64_t group, std::uint64_t word, std::uint64_t shape, void* out, const void* in,
                  const std::size_t* out_bytes, const std::size_t* in_bytes) {
  return with(group, word, shape, &Group::all_to_all, out, in, out_bytes, in_bytes);
}

int ps_all_reduce_add_rms_norm(std::uint64_t group, std::uint64_t word, std::uint64_t shape, void* out,
                               void* residual_out, const void* in, const void* residual, const void* weight,
                               std::size_t rows, std::size_t hidden, float eps, int dtype) {
  const AddRmsNorm norm{out, residual_out, in, residual, weight, rows, hidden, eps, static_cast<Dtype>(dtype)};
  return with(group, word, shape,
              [&norm](Group& self, double timeout_s) { return self.all_reduce_add_rms_norm(norm, timeout_s); });
}

int ps_reduce(const char* instruction_set, void* const* outs, int out_count, const void* const* sources,
              int source_count, std::size_t count, int dtype, int op) {
  const auto reduce =
      parallel_state::reduce_function(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op), instruction_set);
  if (reduce == nullptr) return 1;
  reduce(outs, out_count, sources, source_count, count);
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
