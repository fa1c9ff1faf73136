// Calls a collective in a loop, with nothing of Python between the iterations. For kernels.py, which compiles it.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>

// One call, of this library's C interface (group, told, shape, ...) or of MPI's (integer handles, as in the MPICH ABI).
struct Call {
  std::int64_t kind;
  void* function;
  std::uint64_t group;
  void* out;
  void* in;
  std::size_t count;
  std::int64_t dtype;
  std::int64_t op;
  std::int64_t comm;
  const std::size_t* blocks;
};

enum Kind { kNothing, kOurs, kMpi };
enum Collective { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kAllToAll };

// The second and third argument are what the others hear of the call; 0: what it is.
template <typename... Arguments>
static int call_group(const Call& call, Arguments... arguments) {
  return reinterpret_cast<int (*)(std::uint64_t, std::uint64_t, std::uint64_t, Arguments...)>(call.function)(
      call.group, 0, 0, arguments...);
}

static int call_ours(const Call& call, int collective) {
  const auto dtype = static_cast<int>(call.dtype), op = static_cast<int>(call.op);
  const void* const in = call.in;
  switch (collective) {
    case kAllReduce: return call_group(call, call.out, in, call.count, dtype, op);
    case kAllGather: return call_group(call, call.out, in, std::size_t{1}, call.count);
    case kReduceScatter: return call_group(call, call.out, in, std::size_t{1}, call.count, dtype, op);
    case kBroadcast: return call_group(call, call.out, call.count, 0);
    case kAllToAll: return call_group(call, call.out, in, call.blocks, call.blocks);
  }
  return -1;
}

static int call_mpi(const Call& call, int collective) {
  const int count = static_cast<int>(call.count), dtype = static_cast<int>(call.dtype);
  const int op = static_cast<int>(call.op), comm = static_cast<int>(call.comm);
  const void* in = call.in == call.out ? reinterpret_cast<const void*>(-1) : call.in;  // MPI_IN_PLACE
  switch (collective) {
    case kAllReduce:
    case kReduceScatter:
      return reinterpret_cast<int (*)(const void*, void*, int, int, int, int)>(call.function)(in, call.out, count,
                                                                                              dtype, op, comm);
    case kAllGather:
    case kAllToAll:
      return reinterpret_cast<int (*)(const void*, int, int, void*, int, int, int)>(call.function)(
          in, count, dtype, call.out, count, dtype, comm);
    case kBroadcast:
      return reinterpret_cast<int (*)(void*, int, int, int, int)>(call.function)(call.out, count, dtype, 0, comm);
  }
  return -1;
}

// Microseconds per iteration, or a thousand million times minus the status of a call that failed. With `touch` each
// iteration writes the whole input and reads the whole output; time that with kind kNothing and take it off.
extern "C" double time_loop(const Call* call, int collective, int iterations, int touch, std::size_t in_bytes,
                            std::size_t out_bytes) {
  static volatile std::uint64_t sink;
  timespec begin{}, end{};
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int i = 0; i < iterations; ++i) {
    if (touch) std::memset(call->in, 0, in_bytes);
    int status = 0;
    if (call->kind == kOurs) status = call_ours(*call, collective);
    if (call->kind == kMpi) status = call_mpi(*call, collective);
    if (status != 0) return -1e9 * status;
    if (touch) {
      const auto* words = static_cast<const std::uint64_t*>(call->out);
      std::uint64_t sum = 0;
      for (std::size_t word = 0; word < out_bytes / 8; ++word) sum += words[word];
      sink = sum;
    }
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (static_cast<double>(end.tv_sec - begin.tv_sec) * 1e9 + static_cast<double>(end.tv_nsec - begin.tv_nsec)) /
         1e3 / iterations;
}
