// The C interface of the library, for ctypes: no C++ type and no torch in it. Status codes are those of group.h.

#include <cstring>
#include <new>

#include "group.h"

using parallel_state::Dtype;
using parallel_state::Group;
using parallel_state::ReduceOp;
using parallel_state::WaitPolicy;

#pragma GCC visibility push(default)
extern "C" {

int ps_version() { return 1; }

const char* ps_instruction_set() { return parallel_state::instruction_set(); }

std::size_t ps_segment_bytes(int size) { return Group::segment_bytes(size); }

void* ps_group_new(void* segment, int rank, int size, const std::int64_t* pids, std::int64_t spin_ns, int yields) {
  WaitPolicy policy;
  policy.spin_ns = spin_ns;
  policy.yields = yields;
  return new (std::nothrow) Group(segment, rank, size, pids, policy);
}

void ps_group_delete(void* group) { delete static_cast<Group*>(group); }

// Rank, and both calls, of the last failure.
void ps_group_failure(void* group, std::int64_t* out) {
  const auto* self = static_cast<const Group*>(group);
  out[0] = self->suspect();
  out[1] = static_cast<std::int64_t>(self->expected());
  out[2] = static_cast<std::int64_t>(self->found());
}

int ps_barrier(void* group, double timeout_s) {
  return static_cast<int>(static_cast<Group*>(group)->barrier(timeout_s));
}

int ps_all_reduce(void* group, void* out, const void* in, std::size_t count, int dtype, int op, double timeout_s) {
  return static_cast<int>(static_cast<Group*>(group)->all_reduce(out, in, count, static_cast<Dtype>(dtype),
                                                                 static_cast<ReduceOp>(op), timeout_s));
}

int ps_reduce_scatter(void* group, void* out, const void* in, std::size_t outer, std::size_t inner, int dtype, int op,
                      double timeout_s) {
  return static_cast<int>(static_cast<Group*>(group)->reduce_scatter(out, in, outer, inner, static_cast<Dtype>(dtype),
                                                                     static_cast<ReduceOp>(op), timeout_s));
}

int ps_all_gather(void* group, void* out, const void* in, std::size_t outer, std::size_t inner_bytes,
                  double timeout_s) {
  return static_cast<int>(static_cast<Group*>(group)->all_gather(out, in, outer, inner_bytes, timeout_s));
}

int ps_gatherv(void* group, void* const* outs, const std::size_t* bytes, const void* in, double timeout_s) {
  return static_cast<int>(static_cast<Group*>(group)->gatherv(outs, bytes, in, timeout_s));
}

int ps_broadcast(void* group, void* data, std::size_t bytes, int src, double timeout_s) {
  return static_cast<int>(static_cast<Group*>(group)->broadcast(data, bytes, src, timeout_s));
}

int ps_scatter(void* group, void* out, const void* in, std::size_t bytes, int src, double timeout_s) {
  return static_cast<int>(static_cast<Group*>(group)->scatter(out, in, bytes, src, timeout_s));
}

int ps_all_to_all(void* group, void* out, const void* in, const std::size_t* out_bytes, const std::size_t* in_bytes,
                  double timeout_s) {
  return static_cast<int>(static_cast<Group*>(group)->all_to_all(out, in, out_bytes, in_bytes, timeout_s));
}

}  // extern "C"
#pragma GCC visibility pop
