/* Replaces libnccl: the functions that device_communicators/nccl_library.py binds, for host memory, between processes.
 * Ranks of a communicator share a file in $STAND_IN_NCCL_DIR under its unique id. A call completes at once. Its
 * arguments are logged (`stand_in_log`) and compared with the other ranks': if they differ, every rank gets
 * ncclInvalidUsage. Like NCCL, it makes communicators in the background if the group of calls is non-blocking.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { Success, CudaError, SystemError, InternalError, InvalidArgument, InvalidUsage, RemoteError, InProgress };
enum { MaxRanks = 16, MaxSplits = 16, SlotBytes = 4 << 20, BoxBytes = 1 << 20, MaxOps = 256, LogBytes = 1 << 20 };

typedef struct {
  char internal[128];
} UniqueId;

typedef struct { /* as nccl.h of 2.28; a caller's may be longer */
  size_t size;
  unsigned magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char* netName;
  int splitShare, trafficClass;
  const char* commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
} Config;

typedef struct {
  _Atomic uint64_t sent, taken; /* bytes, of all time */
} Box;

typedef struct {
  _Atomic int joined, arrived;
  _Atomic unsigned generation;
  _Atomic int told[MaxSplits];
  int color[MaxSplits][MaxRanks], key[MaxSplits][MaxRanks];
  uint64_t call[MaxRanks];
  Box box[MaxRanks][MaxRanks]; /* [src][dst] */
} Shared;

typedef struct Comm {
  char name[160];
  int size, rank, blocking, splits, suspended;
  _Atomic int aborted, asyncError;
  Shared* shared;
  char *slots, *boxes;
  size_t bytes;
  struct Comm* child; /* of a split under way */
  struct Comm** place;
  int round, color, key;
} Comm;

typedef struct {
  int kind; /* 's', 'r', 'b' roadcast, 'd' reduce */
  const void* send;
  void* recv;
  size_t count;
  int dtype, op, peer;
  Comm* comm;
} Op;

static char logged[LogBytes];
static size_t logLength;
static _Thread_local int depth, queued;
static _Thread_local Op ops[MaxOps];
static int neverReady, refuseInit, failNext, refuseMemory, refuseWindow, leaveWindow, noWindow, wrongWindow;
static int liveComms, liveMemory;

enum { MaxWindows = 64 };
typedef struct {
  const char* base;
  size_t size;
  struct Comm* comm;
} Window;
static Window windows[MaxWindows];

const char* stand_in_log(void) { return logged; }
void stand_in_clear(void) { logLength = 0, logged[0] = 0; }
void stand_in_never_ready(int on) { neverReady = on; }
void stand_in_refuse_init(int result) { refuseInit = result; }
void stand_in_fail_next(int result) { failNext = result; }
void stand_in_async_error(Comm* comm, int result) { comm->asyncError = result; }
int stand_in_live(void) { return liveComms; }
void stand_in_refuse_memory(int result) { refuseMemory = result; }
void stand_in_refuse_window(int result) { refuseWindow = result; } /* once the other ranks have come */
void stand_in_leave_window(int result) { leaveWindow = result; }   /* and not come */
void stand_in_no_window(int on) { noWindow = on; }
void stand_in_wrong_window(int on) { wrongWindow = on; }
int stand_in_memory(void) { return liveMemory; }

#define LOG(...) (logLength += logLength < LogBytes - 512 ? (size_t)snprintf(logged + logLength, 512, __VA_ARGS__) : 0)

static void relax(void) { sched_yield(); }

static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

int ncclGetVersion(int* version) {
  const char* told = getenv("STAND_IN_NCCL_VERSION");
  *version = told ? atoi(told) : 22809;
  return Success;
}

int ncclGetUniqueId(UniqueId* id) {
  static int number;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%d-%d-%lx", (int)getpid(), ++number, (unsigned long)now.tv_nsec);
  LOG("GetUniqueId\n");
  return Success;
}

static size_t room(int size) { return sizeof(Shared) + (size_t)size * SlotBytes + (size_t)size * size * BoxBytes; }

static Comm* attach(const char* name, int size, int rank, int blocking) {
  const char* dir = getenv("STAND_IN_NCCL_DIR");
  char path[512];
  snprintf(path, sizeof path, "%s/%s", dir ? dir : "/tmp", name);
  int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, (off_t)room(size))) return NULL;
  Comm* comm = calloc(1, sizeof *comm);
  comm->bytes = room(size);
  comm->shared = mmap(NULL, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  comm->slots = (char*)(comm->shared + 1);
  comm->boxes = comm->slots + (size_t)size * SlotBytes;
  snprintf(comm->name, sizeof comm->name, "%s", name);
  comm->size = size, comm->rank = rank, comm->blocking = blocking;
  if (atomic_fetch_add(&comm->shared->joined, 1) + 1 == size) unlink(path);
  liveComms++;
  return comm;
}

static int readConfig(const Config* config) {
  if (!config || config->magic != 0xcafebeef || config->size < 72 || config->size > 256) return -1;
  return config->blocking == INT_MIN ? 1 : config->blocking;
}

static int isReady(Comm* comm) { return !neverReady && comm->shared->joined == comm->size; }

/* Returns true when the split is done. */
static int advance(Comm* parent) {
  Shared* shared = parent->shared;
  if (!parent->place) return 1;
  if (shared->told[parent->round] < parent->size) return 0;
  if (parent->color < 0) { /* NCCL_SPLIT_NOCOLOR */
    parent->place = NULL;
    return 1;
  }
  if (!parent->child) {
    int size = 0, rank = 0;
    for (int i = 0; i < parent->size; i++) {
      if (shared->color[parent->round][i] != parent->color) continue;
      size++;
      int key = shared->key[parent->round][i];
      rank += key < parent->key || (key == parent->key && i < parent->rank);
    }
    char name[300];
    snprintf(name, sizeof name, "%.120s-%d-%d", parent->name, parent->round, parent->color);
    parent->child = attach(name, size, rank, 1);
  }
  if (!isReady(parent->child)) return 0;
  *parent->place = parent->child;
  parent->child = NULL, parent->place = NULL;
  return 1;
}

int ncclCommInitRankConfig(Comm** place, int size, UniqueId id, int rank, Config* config) {
  int blocking = readConfig(config);
  LOG("CommInitRankConfig size=%d rank=%d blocking=%d name=%s\n", size, rank, blocking,
      config && config->commName ? config->commName : "");
  if (blocking < 0 || size > MaxRanks || rank >= size) return InvalidArgument;
  if (refuseInit) return refuseInit;
  Comm* comm = attach(id.internal, size, rank, blocking);
  if (!comm) return SystemError;
  *place = comm;
  if (!blocking) return InProgress;
  while (!isReady(comm)) relax();
  return Success;
}

int ncclCommSplit(Comm* comm, int color, int key, Comm** place, Config* config) {
  int blocking = config ? readConfig(config) : comm->blocking;
  LOG("CommSplit color=%d key=%d blocking=%d\n", color, key, blocking);
  if (config && config->maxCTAs != INT_MIN)
    LOG("Config cga=%d min=%d max=%d\n", config->cgaClusterSize, config->minCTAs, config->maxCTAs);
  if (blocking < 0 || comm->place || comm->splits == MaxSplits) return InvalidArgument;
  int round = comm->round = comm->splits++;
  comm->place = place, comm->color = color, comm->key = key;
  *place = NULL;
  comm->shared->color[round][comm->rank] = color;
  comm->shared->key[round][comm->rank] = key;
  atomic_fetch_add(&comm->shared->told[round], 1);
  if (!comm->blocking) return InProgress;
  while (!advance(comm)) relax();
  return Success;
}

int ncclCommGetAsyncError(Comm* comm, int* state) {
  *state = comm->asyncError ? comm->asyncError : isReady(comm) && advance(comm) ? Success : InProgress;
  return Success;
}

int ncclCommFinalize(Comm* comm) {
  LOG("CommFinalize\n");
  return comm->blocking ? Success : InProgress;
}

int ncclCommDestroy(Comm* comm) {
  LOG("CommDestroy\n");
  munmap(comm->shared, comm->bytes);
  liveComms--;
  free(comm);
  return Success;
}

int ncclCommAbort(Comm* comm) { /* another thread may be in it: its memory stays */
  LOG("CommAbort\n");
  comm->aborted = 1;
  liveComms--;
  return Success;
}

const char* ncclGetErrorString(int result) {
  static const char* texts[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                                "invalid argument", "invalid usage",        "remote process exited",  "in progress"};
  return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}
const char* ncclGetLastError(Comm* comm) { return (void)comm, "the stand-in says so"; }

static int barrier(Comm* comm) {
  Shared* shared = comm->shared;
  unsigned generation = shared->generation;
  if (atomic_fetch_add(&shared->arrived, 1) + 1 == comm->size) {
    shared->arrived = 0;
    atomic_fetch_add(&shared->generation, 1);
    return Success;
  }
  while (shared->generation == generation) {
    if (comm->aborted) return RemoteError;
    relax();
  }
  return Success;
}

/* Afterwards each rank's data is in its slot. */
static int meet(Comm* comm, uint64_t call, const void* send, size_t bytes) {
  if (bytes > SlotBytes) return InternalError;
  comm->shared->call[comm->rank] = call;
  if (send) memcpy(comm->slots + (size_t)comm->rank * SlotBytes, send, bytes);
  int result = barrier(comm);
  for (int i = 0; i < comm->size && !result; i++)
    if (comm->shared->call[i] != call) result = InvalidUsage;
  return result;
}

static uint64_t callOf(int kind, size_t count, int dtype, int op, int root) {
  return (uint64_t)kind << 56 | (uint64_t)(dtype & 15) << 52 | (uint64_t)(op & 15) << 48 |
         (uint64_t)(root & 255) << 40 | count;
}

static float fromBf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static uint16_t toBf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define COMBINE(a, b) \
  (op == 0 || op == 4 ? (a) + (b) : op == 1 ? (a) * (b) : op == 2 ? ((b) > (a) ? (b) : (a)) : ((b) < (a) ? (b) : (a)))
#define REDUCE(type, wide, from, to)                                                   \
  for (size_t i = 0; i < count; i++) {                                                 \
    wide sum = from(((const type*)comm->slots)[offset + i]);                           \
    for (int r = 1; r < comm->size; r++) {                                             \
      wide x = from(((const type*)(comm->slots + (size_t)r * SlotBytes))[offset + i]); \
      sum = (wide)COMBINE(sum, x);                                                     \
    }                                                                                  \
    if (op == 4) sum = (wide)(sum / (wide)comm->size);                                 \
    ((type*)out)[i] = to(sum);                                                         \
  }                                                                                    \
  break

static int reduceSlots(Comm* comm, void* out, size_t offset, size_t count, int dtype, int op) {
  if (op < 0 || op > 4 || (op == 4 && dtype > 5)) return InvalidArgument;  // nobody averages floats by it
  switch (dtype) {
    case 0: REDUCE(int8_t, int8_t, , );
    case 1: REDUCE(uint8_t, uint8_t, , );
    case 2: REDUCE(int32_t, int32_t, , );
    case 3: REDUCE(uint32_t, uint32_t, , );
    case 4: REDUCE(int64_t, int64_t, , );
    case 5: REDUCE(uint64_t, uint64_t, , );
    case 6: REDUCE(_Float16, float, (float), (_Float16));
    case 7: REDUCE(float, float, , );
    case 8: REDUCE(double, double, , );
    case 9: REDUCE(uint16_t, float, fromBf16, toBf16);
    default: return InvalidArgument;
  }
  return Success;
}

static int begin(Comm* comm) {
  int result = failNext;
  failNext = 0;
  if (!comm || comm->aborted || comm->suspended) return InvalidArgument;
  return result;
}

static int run(int result, Comm* comm) { /* the slots may be written again */ return result ? result : barrier(comm); }

/* A symmetric kernel assumes that all ranks have its own offset in registered memory. */

#ifndef WITHOUT_WINDOWS
int ncclMemAlloc(void** place, size_t size) {
  LOG("MemAlloc %zu\n", size);
  if (refuseMemory) return refuseMemory;
  *place = aligned_alloc(4096, size);
  if (!*place) return SystemError;
  liveMemory++;
  return Success;
}

int ncclMemFree(void* place) {
  LOG("MemFree\n");
  for (int i = 0; i < MaxWindows; i++)
    if (place && windows[i].base == place) return InvalidUsage;
  free(place);
  liveMemory--;
  return Success;
}

static int begin(Comm* comm);

int ncclCommWindowRegister(Comm* comm, void* base, size_t size, Window** place, int flags) {
  LOG("CommWindowRegister size=%zu flags=%d\n", size, flags);
  *place = NULL;
  if (leaveWindow) return leaveWindow;
  int result = begin(comm);
  if (!result) result = meet(comm, callOf(9, size, 0, 0, 0), NULL, 0);
  if (!result) result = barrier(comm);
  if (!result) result = refuseWindow;
  for (int i = 0; i < MaxWindows && !result && !noWindow && !*place; i++) {
    if (windows[i].base) continue;
    windows[i] = (Window){base, size, comm};
    *place = &windows[i];
  }
  return result;
}

int ncclCommWindowDeregister(Comm* comm, Window* window) {
  LOG("CommWindowDeregister\n");
  if (!window->base || window->comm != comm) return InvalidArgument;
  window->base = NULL;
  return Success;
}
#endif

/* Returns the offset in a window, plus one; 0 outside of all. */
static size_t offsetOf(Comm* comm, const void* at) {
  for (int i = 0; i < MaxWindows; i++) {
    Window* it = &windows[i];
    if (it->base && it->comm == comm && (const char*)at >= it->base && (const char*)at < it->base + it->size)
      return (size_t)((const char*)at - it->base) + ((size_t)i << 32) + 1;
  }
  return 0;
}

int ncclAllReduce(const void* send, void* recv, size_t count, int dtype, int op, Comm* comm, void* stream) {
  size_t from = offsetOf(comm, send), to = offsetOf(comm, recv), offset = from && to ? from * 31 + to : 0;
  LOG("AllReduce count=%zu dtype=%d op=%d inplace=%d stream=%ld", count, dtype, op, send == recv, (long)stream);
  if (offset) LOG(" symmetric at %zu", (to - 1) & 0xffffffff);
  LOG("\n");
  int result = begin(comm);
  size_t step = SlotBytes / sizes[dtype];
  for (size_t at = 0; at < count && !result; at += step) {
    size_t part = count - at < step ? count - at : step, skip = at * sizes[dtype];
    result = meet(comm, callOf(1, part, dtype, op, 0) ^ offset << 20, (const char*)send + skip, part * sizes[dtype]);
    if (!result && !(offset && wrongWindow)) result = reduceSlots(comm, (char*)recv + skip, 0, part, dtype, op);
    result = run(result, comm);
  }
  return result;
}

int ncclReduceScatter(const void* send, void* recv, size_t count, int dtype, int op, Comm* comm, void* stream) {
  LOG("ReduceScatter count=%zu dtype=%d op=%d stream=%ld\n", count, dtype, op, (long)stream);
  int result = begin(comm);
  if (!result) result = meet(comm, callOf(2, count, dtype, op, 0), send, count * (size_t)comm->size * sizes[dtype]);
  if (!result) result = reduceSlots(comm, recv, count * (size_t)comm->rank, count, dtype, op);
  return run(result, comm);
}

int ncclAllGather(const void* send, void* recv, size_t count, int dtype, Comm* comm, void* stream) {
  LOG("AllGather count=%zu dtype=%d stream=%ld\n", count, dtype, (long)stream);
  int result = begin(comm);
  size_t bytes = count * sizes[dtype];
  if (!result) result = meet(comm, callOf(3, count, dtype, 0, 0), send, bytes);
  for (int i = 0; i < comm->size && !result; i++)
    memcpy((char*)recv + (size_t)i * bytes, comm->slots + (size_t)i * SlotBytes, bytes);
  return run(result, comm);
}

static int rooted(Op* it) {
  Comm* comm = it->comm;
  size_t bytes = it->count * sizes[it->dtype];
  int isRoot = comm->rank == it->peer, isReduce = it->kind == 'd';
  int result = meet(comm, callOf(isReduce ? 4 : 5, it->count, it->dtype, it->op, it->peer),
                    isReduce || isRoot ? it->send : NULL, bytes);
  if (!result && isReduce && isRoot) result = reduceSlots(comm, it->recv, 0, it->count, it->dtype, it->op);
  if (!result && !isReduce) memcpy(it->recv, comm->slots + (size_t)it->peer * SlotBytes, bytes);
  return run(result, comm);
}

/* Returns true when the transfer is done. */
static int move(Op* it, size_t* done) {
  Comm* comm = it->comm;
  int src = it->kind == 's' ? comm->rank : it->peer, dst = it->kind == 's' ? it->peer : comm->rank;
  Box* box = &comm->shared->box[src][dst];
  char* data = comm->boxes + ((size_t)src * comm->size + (size_t)dst) * BoxBytes;
  size_t bytes = it->count * sizes[it->dtype];
  while (*done < bytes) {
    uint64_t at = it->kind == 's' ? box->sent : box->taken;
    size_t place = at % BoxBytes;
    size_t part = it->kind == 's' ? BoxBytes - (size_t)(at - box->taken) : (size_t)(box->sent - at);
    if (part > bytes - *done) part = bytes - *done;
    if (part > BoxBytes - place) part = BoxBytes - place;
    if (part == 0) return 0;
    if (it->kind == 's') {
      memcpy(data + place, (const char*)it->send + *done, part);
      atomic_fetch_add(&box->sent, part);
    } else {
      memcpy((char*)it->recv + *done, data + place, part);
      atomic_fetch_add(&box->taken, part);
    }
    *done += part;
  }
  return 1;
}

/* Collectives in order; transfers at the same time, but in order for one peer and direction. */
static int runGroup(void) {
  int count = queued, result = Success, left = 0;
  size_t done[MaxOps] = {0};
  char over[MaxOps] = {0};
  queued = 0;
  for (int i = 0; i < count && !result; i++) {
    if (ops[i].kind == 's' || ops[i].kind == 'r') left++;
    else result = rooted(&ops[i]);
  }
  while (left && !result) {
    for (int i = 0; i < count; i++) {
      Op* it = &ops[i];
      if (over[i] || (it->kind != 's' && it->kind != 'r')) continue;
      int first = 1;
      for (int k = 0; k < i; k++)
        if (!over[k] && ops[k].kind == it->kind && ops[k].peer == it->peer && ops[k].comm == it->comm) first = 0;
      if (first && move(it, &done[i])) over[i] = 1, left--;
      if (it->comm->aborted) result = RemoteError;
    }
    relax();
  }
  return result;
}

static int enqueue(Op it) {
  int result = begin(it.comm);
  if (result) return result;
  if (queued == MaxOps || it.dtype < 0 || it.dtype > 11 || it.peer < 0 || it.peer >= it.comm->size)
    return InvalidArgument;
  ops[queued++] = it;
  return depth ? Success : runGroup();
}

int ncclGroupStart(void) {
  LOG("GroupStart\n");
  depth++;
  return Success;
}
int ncclGroupEnd(void) {
  LOG("GroupEnd\n");
  if (depth == 0) return InvalidUsage;
  return --depth ? Success : runGroup();
}

int ncclBroadcast(const void* send, void* recv, size_t count, int dtype, int root, Comm* comm, void* stream) {
  LOG("Broadcast count=%zu dtype=%d root=%d stream=%ld\n", count, dtype, root, (long)stream);
  return enqueue((Op){'b', send, recv, count, dtype, 0, root, comm});
}
int ncclReduce(const void* send, void* recv, size_t count, int dtype, int op, int root, Comm* comm, void* stream) {
  LOG("Reduce count=%zu dtype=%d op=%d root=%d stream=%ld\n", count, dtype, op, root, (long)stream);
  return enqueue((Op){'d', send, recv, count, dtype, op, root, comm});
}
int ncclSend(const void* send, size_t count, int dtype, int peer, Comm* comm, void* stream) {
  LOG("Send count=%zu dtype=%d peer=%d stream=%ld\n", count, dtype, peer, (long)stream);
  return enqueue((Op){'s', send, NULL, count, dtype, 0, peer, comm});
}
int ncclRecv(void* recv, size_t count, int dtype, int peer, Comm* comm, void* stream) {
  LOG("Recv count=%zu dtype=%d peer=%d stream=%ld\n", count, dtype, peer, (long)stream);
  return enqueue((Op){'r', NULL, recv, count, dtype, 0, peer, comm});
}

#ifndef WITHOUT_SUSPEND
int ncclCommSuspend(Comm* comm, int flags) {
  LOG("CommSuspend flags=%d\n", flags);
  comm->suspended = 1;
  return Success;
}
int ncclCommResume(Comm* comm) {
  LOG("CommResume\n");
  comm->suspended = 0;
  return Success;
}
#endif
