// Explores the ticks and slots of the collectives within a host: host_group.cpp, collectives.cpp and wait.cpp.
//
//   ticks_explorer --ranks R --calls bBgaw
//
//   b, B  broadcast from rank 0, from rank 1
//   g, a  gatherv and all_gather to all ranks
//   w     barrier
//   p     pass
//   x     a mismatch: each rank broadcasts its own data
//
//   --barriers fail      the kernel has no membarrier
//   --weaken SITE=ORDER  the operations of that site have this order
//
// Checked: the results, nobody accesses a slot while it is written, no process sleeps forever, and of ranks that make
// different calls one detects it.
#include <poll.h>
#include <sys/uio.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "interleavings.h"

#include "wait.cpp"

#include "host_group.cpp"

#include "collectives.cpp"

using namespace parallel_state;
using interleavings::machine;

bool parallel_state::interrupted(bool) { return false; }
ReduceFunction parallel_state::reduce_function(Dtype, ReduceOp) { return nullptr; }
PartFunction parallel_state::part_function(Dtype, ReduceOp) { return nullptr; }
std::size_t parallel_state::size_of(Dtype) { return 1; }
std::size_t parallel_state::wide_size_of(Dtype) { return 1; }

EndWatch::~EndWatch() = default;
void EndWatch::on_end(int, bool) noexcept {}
GroupLiveness::GroupLiveness(Member* members, ReportedEnds* ends, int size, int me)
    : members_(members), ends_(ends), size_(size), me_(me) {}
Loss GroupLiveness::loss(int) const { return Loss(); }
bool GroupLiveness::watch(Sleep*) const { return false; }

// Inputs are private in these cases, and there are no reductions.
std::uint64_t HostGroup::offer(const void*, std::size_t, const void*, std::size_t) { return 0; }
Status HostGroup::hear(Inputs&, std::uint64_t, std::uint64_t, std::size_t) { return Status::kDone; }
Status HostGroup::close() { return Status::kBroken; }
Status HostGroup::look_up(int, const std::atomic<std::uint64_t>&, std::size_t, const char**) { return Status::kBroken; }
Status HostGroup::all_reduce(void*, const void*, std::size_t, Dtype, ReduceOp, double) { return Status::kBroken; }
Status HostGroup::all_reduce_add_rms_norm(const AddRmsNorm&, double) { return Status::kBroken; }

namespace {

constexpr double kTimeoutS = 1e6;
constexpr std::size_t kBytes = 8, kSlotBytes = 32;

int ranks = 2;
std::string calls = "bb";
char* statuses = nullptr;  // of a mismatch, 1 + status, by rank

void expect(bool holds, const char* what) {
  if (!holds) machine.fail(what);
}

std::uint64_t data_of(int rank, std::size_t call) { return 1000 * (call + 1) + static_cast<std::uint64_t>(rank); }

void mismatch(HostGroup* group) {
  std::uint64_t data = 0;
  const int me = group->rank();
  statuses[me] = static_cast<char>(1 + static_cast<int>(group->broadcast(&data, kBytes, me, kTimeoutS)));
  int finished = 0, done = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    finished += statuses[rank] != 0;
    done += statuses[rank] == 1 + static_cast<int>(Status::kDone);
  }
  expect(finished < ranks || done < ranks, "nobody detects a mismatch");
}

void make_calls(HostGroup* group) {
  const int me = group->rank();
  for (std::size_t call = 0; call < calls.size(); ++call) {
    std::uint64_t own = data_of(me, call), found[interleavings::kProcesses] = {};
    found[me] = own;
    const char kind = calls[call];
    if (kind == 'x') return mismatch(group);
    Status status = Status::kBroken;
    if (kind == 'b' || kind == 'B') {
      const int src = kind == 'b' ? 0 : 1;
      status = group->broadcast(&own, kBytes, src, kTimeoutS);
      expect(status != Status::kDone || own == data_of(src, call), "a broadcast gives other data");
    } else if (kind == 'g') {
      void* outs[interleavings::kProcesses];
      std::size_t bytes[interleavings::kProcesses];
      for (int rank = 0; rank < ranks; ++rank) {
        outs[rank] = &found[rank];
        bytes[rank] = kBytes;
      }
      status = group->gatherv(outs, bytes, &own, -1, kTimeoutS);
    } else if (kind == 'a') {
      status = group->all_gather(found, &own, 1, kBytes, kTimeoutS);
    } else if (kind == 'w') {
      status = group->barrier(kTimeoutS);
    } else if (kind == 'p') {
      status = group->pass(kTimeoutS);
    }
    expect(status == Status::kDone, "a call fails");
    for (int rank = 0; rank < ranks && (kind == 'g' || kind == 'a'); ++rank) {
      expect(found[rank] == data_of(rank, call), "a gather gives other data");
    }
  }
}

void set_up() {
  char* const segment = machine.shared();
  const std::size_t slots = HostGroup::slots_offset(ranks, 0), end = HostGroup::segment_bytes(ranks);
  expect(end + interleavings::kProcesses <= interleavings::kSharedBytes, "the segment is too large");
  statuses = segment + end;
  machine.set_data(segment + slots, kSlotBytes, (end - slots) / kSlotBytes);
  auto* const lines = reinterpret_cast<Counter*>(segment);
  for (int rank = 0; rank < ranks; ++rank) {
    machine.name(&lines[rank].value, "value");
    machine.name(&lines[rank].sleepers, "sleepers");
    machine.name(&lines[rank].core, "core");
    for (auto& note : lines[rank].notes) machine.name(&note, "note");
  }
  static const GroupLiveness liveness(nullptr, nullptr, ranks, 0);
  WaitPolicy policy;
  policy.spin_ns = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    machine.add("rank", [&] {
      auto* const group = new HostGroup(segment, rank, ranks, liveness, policy);
      return [group] { make_calls(group); };
    });
  }
}

}  // namespace

int main(int count, char** arguments) {
  auto& options = machine.options;
  for (int at = 1; at + 1 < count; at += 2) {
    const std::string name = arguments[at], value = arguments[at + 1];
    if (name == "--ranks") ranks = std::stoi(value);
    else if (name == "--calls") calls = value;
    else if (name == "--barriers") options.barriers = interleavings::Options::kFail;
    else if (name == "--weaken") options.weakened = value;
    else return std::fprintf(stderr, "unknown argument %s\n", arguments[at]), 2;
  }
  const bool holds = machine.explore(set_up);
  if (!holds) machine.print_failure();
  for (const std::string& site : machine.sites()) std::printf("site: %s\n", site.c_str());
  std::printf("%zu states%s\n", machine.states(), holds ? ", all holds" : "");
  return holds ? 0 : 1;
}
