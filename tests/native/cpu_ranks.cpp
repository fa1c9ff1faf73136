// For sanitizers.
//
//   cpu_ranks processes   each rank is a process: for AddressSanitizer and UndefinedBehaviorSanitizer
//   cpu_ranks threads     each rank is a thread over one mapping: ThreadSanitizer sees all accesses
//   cpu_ranks calls       without sanitizers: counts the system calls of collectives of 8 KiB
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../control/csrc/end_listeners.h"
#include "../../control/csrc/machine.h"
#include "call.h"
#include "handle.h"
#include "messages.h"
#include "one_sided.h"
#include "pack.h"
#include "queue.h"
#include "unpack.h"
#include "reduce.h"

using namespace parallel_state;

extern "C" {
void* ps_liveness_of(std::uint64_t group);
void* ps_liveness_new(const std::int64_t* pids, int count);
void ps_liveness_delete(void* liveness);
std::size_t ps_queue_control_bytes(int readers);
void* ps_queue_writer_new(void*, void*, std::uint64_t, std::uint64_t, int, const int*, const void*, std::int64_t, int,
                          void*);
void* ps_queue_reader_new(void*, void*, std::uint64_t, std::uint64_t, int, const int*, int, const void*, std::int64_t,
                          int, void*);
int ps_queue_writer_delete(void*);
int ps_queue_reader_delete(void*);
void ps_queue_writer_leave(void*);
void ps_queue_reader_leave(void*);
void ps_queue_writer_serve(void*, std::uint64_t, int, std::uint64_t*);
void ps_queue_reader_serve(void*, std::uint64_t, int, int, std::uint64_t*);
int ps_queue_send(void*, const char*, std::uint64_t, const Piece*, int, int, std::uint64_t, double);
int ps_pack(void*, const void*, int, std::uint64_t, std::uint64_t, std::uint64_t, void*);
int ps_packed(Piece*, int, int*, void**);
int ps_queue_resume(void*, double);
int ps_queue_take(void*, char*, std::uint64_t, double);
int ps_queue_read(void*, const Piece*, int, double);
int ps_plain_keys(const std::uint8_t*, std::uint64_t, std::uint64_t, std::uint64_t, int);
void ps_serve(const char* key, std::uint64_t group);
void ps_stop_serving(const char* key);
void ps_served_recorded(const char* key, std::int64_t* out);
}

namespace {

constexpr int kRanks = 3;
constexpr std::size_t kArenaBytes = 64 << 20;
constexpr std::size_t kChunkBytes = 4096, kChunks = 4;
constexpr double kTimeoutS = 120;

bool as_threads = false;
std::atomic<long> calls{0}, wrong{0};

#define CHECK(condition)                                                                \
  do {                                                                                  \
    ++calls;                                                                            \
    if (!(condition)) {                                                                 \
      ++wrong;                                                                          \
      std::fprintf(stderr, "rank %d, line %d: %s\n", world.rank, __LINE__, #condition); \
    }                                                                                   \
  } while (false)

struct File {
  int descriptor;
  std::size_t bytes;
  void* shared;

  explicit File(std::size_t count) : descriptor(memfd_create("ranks", 0)), bytes(count) {
    if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) std::abort();
    shared = map();
  }
  void* map() const {
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) std::abort();
    return memory;
  }
  // Threads share one mapping, or the sanitizer sees several memories.
  void* mapping() const { return as_threads ? shared : map(); }
};

struct World {
  int rank;
  std::vector<std::int64_t> pids;
};

std::uint64_t open_group(const World& world, const File& segment, double timeout_s) {
  WaitPolicy policy;
  policy.spin_ns = 2000;
  policy.yields = 5;
  auto handle = std::make_shared<Handle>(segment.mapping(), segment.bytes, world.rank, kRanks, policy, timeout_s);
  return keep(std::move(handle));
}

void close_group(std::uint64_t number) {
  if (!as_threads) forget(number);
}

template <typename Call>
Status run(std::uint64_t number, Told told, Call call) {
  const std::shared_ptr<Handle> handle = find(number);
  if (handle == nullptr) return Status::kClosed;
  return handle->run([&](Group& group, double timeout_s) {
    group.tell(told);
    return call(group, timeout_s);
  });
}

Told told(int method, std::size_t count, int root = -1) {
  return told_of(static_cast<Method>(method), std::vector<std::size_t>{count}, 6, -1, -1, root);
}

template <typename T>
std::vector<T> made(std::size_t count, int rank) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<T>((i * 7 + static_cast<std::size_t>(rank) * 3) % 11);
  return values;
}

template <typename T>
bool is_sum(const T* found, std::size_t count, std::size_t begin = 0) {
  for (std::size_t i = 0; i < count; ++i) {
    T sum = 0;
    for (int rank = 0; rank < kRanks; ++rank)
      sum = static_cast<T>(sum + static_cast<T>(((begin + i) * 7 + rank * 3) % 11));
    if (found[i] != sum) return false;
  }
  return true;
}

template <typename T>
void reductions(const World& world, std::uint64_t group, Dtype dtype, std::size_t count, T* shared_in, T* shared_out) {
  const std::vector<T> in = made<T>(count, world.rank);
  std::vector<T> out(count), whole = made<T>(kRanks * count, world.rank);
  const Told all = told(8, count), scattered = told(24, count);
  CHECK(run(group, all,
            [&](Group& self, double limit) {
              return self.all_reduce(out.data(), in.data(), count, dtype, ReduceOp::kSum, limit);
            }) == Status::kDone &&
        is_sum(out.data(), count));
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct}) {
    CHECK(run(group, all, [&](Group& self, double limit) {
            return self.all_reduce(out.data(), in.data(), count, dtype, op, limit);
          }) == Status::kDone);
  }
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kTreeSum}) {
    std::vector<T> in_place = in;
    CHECK(run(group, all,
              [&](Group& self, double limit) {
                return self.all_reduce(in_place.data(), in_place.data(), count, dtype, op, limit);
              }) == Status::kDone &&
          is_sum(in_place.data(), count));
  }
  CHECK(run(group, scattered,
            [&](Group& self, double limit) {
              return self.reduce_scatter(out.data(), whole.data(), 1, count, dtype, ReduceOp::kSum, limit);
            }) == Status::kDone &&
        is_sum(out.data(), count, world.rank * count));
  if (shared_in == nullptr) return;
  std::copy(in.begin(), in.end(), shared_in);
  for (T* const to : {out.data(), shared_in}) {
    CHECK(run(group, all,
              [&](Group& self, double limit) {
                return self.all_reduce(to, shared_in, count, dtype, ReduceOp::kSum, limit);
              }) == Status::kDone &&
          is_sum(to, count));
  }
  std::copy(whole.begin(), whole.end(), shared_in);
  CHECK(run(group, scattered,
            [&](Group& self, double limit) {
              return self.reduce_scatter(shared_out, shared_in, 1, count, dtype, ReduceOp::kSum, limit);
            }) == Status::kDone &&
        is_sum(shared_out, count, world.rank * count));
}

void movements(const World& world, std::uint64_t group, std::size_t bytes, char* shared) {
  const auto byte_of = [](int rank, std::size_t i) { return static_cast<char>(rank * 31 + static_cast<int>(i % 97)); };
  std::vector<char> in(bytes), out(kRanks * bytes), whole(kRanks * bytes);
  for (std::size_t i = 0; i < bytes; ++i) in[i] = byte_of(world.rank, i);
  const auto gathered = [&](const std::vector<char>& found) {
    for (std::size_t at = 0; at < kRanks * bytes; ++at) {
      if (found[at] != byte_of(static_cast<int>(at / bytes), at % bytes)) return false;
    }
    return true;
  };
  std::vector<const char*> inputs{in.data()};
  if (shared != nullptr) {
    std::copy(in.begin(), in.end(), shared);
    inputs.push_back(shared);
  }
  for (const char* const from : inputs) {
    std::fill(out.begin(), out.end(), 0);
    CHECK(run(group, told(16, bytes),
              [&](Group& self, double limit) { return self.all_gather(out.data(), from, 1, bytes, limit); }) ==
              Status::kDone &&
          gathered(out));
  }
  std::size_t parts[kRanks];
  std::vector<std::vector<char>> uneven(kRanks);
  std::vector<void*> outs;
  for (int rank = 0; rank < kRanks; ++rank) {
    parts[rank] = rank == 1 ? 0 : bytes / (rank + 1);
    uneven[rank].resize(parts[rank]);
    outs.push_back(uneven[rank].data());
  }
  const int other = world.rank == 0 ? 2 : 0;
  CHECK(run(group, told(40, 1),
            [&](Group& self, double limit) { return self.gatherv(outs.data(), parts, in.data(), -1, limit); }) ==
            Status::kDone &&
        (parts[other] == 0 || uneven[other].back() == byte_of(other, parts[other] - 1)));
  for (int src = 0; src < kRanks; ++src) {
    std::vector<char> data = in;
    CHECK(run(group, told(32, bytes, src),
              [&](Group& self, double limit) { return self.broadcast(data.data(), bytes, src, limit); }) ==
              Status::kDone &&
          (bytes == 0 || data.back() == byte_of(src, bytes - 1)));
    for (int to = 0; to < kRanks; ++to) {
      for (std::size_t i = 0; i < bytes; ++i) whole[to * bytes + i] = byte_of(to + src, i);
    }
    CHECK(run(group, told(104, bytes, src),
              [&](Group& self, double limit) {
                return self.scatter(data.data(), world.rank == src ? whole.data() : nullptr, bytes, src, limit);
              }) == Status::kDone &&
          (bytes == 0 || data[0] == byte_of(world.rank + src, 0)));
  }
  std::size_t sends[kRanks], expects[kRanks], sent = 0, expected = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    sent += sends[rank] = bytes / (1 + static_cast<std::size_t>((world.rank + 2 * rank) % 3));
    expected += expects[rank] = bytes / (1 + static_cast<std::size_t>((rank + 2 * world.rank) % 3));
  }
  std::vector<char> rows(sent, static_cast<char>(world.rank + 1)), received(expected);
  const auto exchanged = [&] {
    std::size_t at = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      for (const std::size_t end = at + expects[rank]; at < end; ++at) {
        if (received[at] != rank + 1) return false;
      }
    }
    return true;
  };
  CHECK(run(group, told(56, 1),
            [&](Group& self, double limit) {
              return self.all_to_all(received.data(), rows.data(), expects, sends, limit);
            }) == Status::kDone &&
        exchanged());
}

void norms(const World& world, std::uint64_t group, std::size_t rows, std::size_t hidden) {
  const std::vector<float> in = made<float>(rows * hidden, world.rank), weight(hidden, 1.0f);
  std::vector<float> out(rows * hidden), residual(rows * hidden, 1.0f);
  const AddRmsNorm norm{out.data(), residual.data(), in.data(), residual.data(), weight.data(),
                        rows,       hidden,          1e-6f,     Dtype::kFloat32};
  CHECK(run(group, told(72, rows * hidden),
            [&](Group& self, double limit) { return self.all_reduce_add_rms_norm(norm, limit); }) == Status::kDone);
}

void use_arenas(const World& world, std::uint64_t group, const File& arenas) {
  void* pages[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    pages[rank] = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, arenas.descriptor,
                       static_cast<off_t>(rank * kArenaBytes));
  }
  find(group)->set_arenas(pages, kArenaBytes, arenas.descriptor, world.rank * kArenaBytes);
}

void collectives(const World& world, const File& segment, const File& arenas) {
  const std::uint64_t group = open_group(world, segment, kTimeoutS);
  const std::shared_ptr<Handle> handle = find(group);
  use_arenas(world, group, arenas);
  const std::string key = "group@" + std::to_string(world.rank);
  ps_serve(key.c_str(), group);
  std::atomic<bool> done{false};
  std::thread looks([&] {
    std::vector<std::int64_t> records(2 * 14 * Served::kRecords);
    while (!done.load()) {
      handle->failure();
      handle->is_busy();
      handle->liveness().has_left((world.rank + 1) % kRanks);
      ps_served_recorded(key.c_str(), records.data());
      usleep(2000);
    }
  });
  for (int round = 0; round < 2; ++round) {
    CHECK(run(group, told(64, 0), [](Group& self, double limit) { return self.barrier(limit); }) == Status::kDone);
    if (round == 1) handle->set_areas(1, 0);
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{17}, std::size_t{1000},
                                    std::size_t{9001}, std::size_t{70'001}, std::size_t{400'003}}) {
      if (as_threads && count > 80'000) continue;
      auto* const shared = static_cast<char*>(handle->arena()->allocate(kRanks * count * 8 + 64));
      auto* const other = static_cast<char*>(handle->arena()->allocate(count * 8 + 64));
      if (shared == nullptr || other == nullptr) std::abort();
      reductions<float>(world, group, Dtype::kFloat32, count, reinterpret_cast<float*>(shared),
                        reinterpret_cast<float*>(other));
      reductions<std::int64_t>(world, group, Dtype::kInt64, count, reinterpret_cast<std::int64_t*>(shared),
                               reinterpret_cast<std::int64_t*>(other));
      reductions<std::uint8_t>(world, group, Dtype::kUint8, count, nullptr, nullptr);
      movements(world, group, count, shared);
    }
    norms(world, group, 1, 64);
    norms(world, group, 37, 520);
    CHECK(run(group, told(128, 0, 1), [](Group& self, double limit) { return self.announce(1, limit, 0); }) ==
          Status::kDone);
    CHECK(run(group, told(64, 0), [](Group& self, double limit) { return self.compare(limit); }) == Status::kDone);
  }
  done = true;
  looks.join();
  ps_stop_serving(key.c_str());
  handle->liveness().leave();
  close_group(group);
}

struct List {
  std::string head;
  std::vector<char> body;

  List(const char* head, std::size_t bytes, char content = 0) : head(head), body(bytes, content) {}
  std::vector<Piece> pieces() { return {{head.data(), head.size()}, {body.data(), body.size()}}; }
  bool is(char content) const {
    return std::count(body.begin(), body.end(), content) == static_cast<std::ptrdiff_t>(body.size());
  }
};

class Body final : public Taker {
 public:
  Body(std::string head, std::vector<char>* body, std::vector<Loan>* loans = nullptr)
      : head_(std::move(head)), body_(body), loans_(loans) {}
  std::uint64_t most_head_bytes() const override { return 64; }
  bool wants_loans() const override { return loans_ != nullptr; }
  char* head_buffer(std::uint64_t bytes) override { return found_.assign(bytes, 0), found_.data(); }
  bool take_head(const Head& head, std::vector<Piece>* pieces) override {
    if (std::string(head.data, head.bytes) != head_ || head.head_bytes != head.bytes) return false;
    if (head.tensor_bytes != body_->size()) return false;
    if (loans_ != nullptr) loans_->swap(*head.loans);
    if (loans_ == nullptr || loans_->empty()) pieces->push_back({body_->data(), body_->size()});
    return true;
  }

 private:
  const std::string head_;
  std::vector<char>* const body_;
  std::vector<Loan>* const loans_;
  std::vector<char> found_;
};

bool take(void* reader, std::uint64_t number, Body body) {
  return receive_value(*static_cast<OpenReader*>(reader), number, kTimeoutS, body) == Outcome::kDone;
}

// Ranks map arenas at different addresses, so ThreadSanitizer sees the order of accesses only between two threads that
// use the rank's own part.
void windows(const World& world, const File& segment, const File& arenas) {
  const std::uint64_t group = open_group(world, segment, kTimeoutS);
  use_arenas(world, group, arenas);
  WindowPart part;
  constexpr std::int64_t kCount = 100;
  part.bytes = kCount * 8;
  part.elements = kCount;
  part.dtype = 4;
  SharedWindow window(group, find(group), part, nullptr);
  std::vector<WindowPart> parts(kRanks);
  CHECK(run(group, told(16, 16), [&](Group& self, double limit) {
          return self.all_gather(parts.data(), &window.part(), 1, sizeof(WindowPart), limit);
        }) == Status::kDone);
  SharedWindow::Refusal refusal;
  CHECK(window.open(parts.data(), &refusal) == Status::kDone);
  const int after = (world.rank + 1) % kRanks, before = (world.rank + kRanks - 1) % kRanks;
  void* found = nullptr;
  CHECK(window.memory_of(world.rank, &found, &refusal) == Status::kDone);
  const auto* const own = static_cast<const std::int64_t*>(found);
  std::vector<std::int64_t> values(kCount);
  for (std::int64_t round = 1; round <= 3000; ++round) {
    const std::int64_t count = 1 + round % kCount, first = kCount - count;
    std::fill(values.begin(), values.end(), round);
    const bool together = round % 2 == 0;
    CHECK(window.put(after, first, count, 4, values.data(), together, &refusal) == Status::kDone);
    if (!together) CHECK(window.signal(after, &refusal) == Status::kDone);
    CHECK(window.wait_signal(before, kTimeoutS, &refusal) == Status::kDone);
    CHECK(std::all_of(own + first, own + kCount, [&](std::int64_t value) { return value == round; }));
    CHECK(window.signal(before, &refusal) == Status::kDone);
    CHECK(window.wait_signal(after, kTimeoutS, &refusal) == Status::kDone);
  }
  std::atomic<std::int64_t> read{0};
  bool is_right = true;
  std::thread reads([&] {  // without CHECK, whose counter would order the threads
    SharedWindow::Refusal mine;
    for (std::int64_t round = 1; round <= 3000; ++round) {
      is_right = window.wait_signal(world.rank, kTimeoutS, &mine) == Status::kDone && is_right;
      is_right = std::all_of(own, own + kCount, [&](std::int64_t value) { return value == -round; }) && is_right;
      read.store(round, std::memory_order_release);
    }
  });
  for (std::int64_t round = 1; round <= 3000; ++round) {
    std::fill(values.begin(), values.end(), -round);
    CHECK(window.put(world.rank, 0, kCount, 4, values.data(), true, &refusal) == Status::kDone);
    while (read.load(std::memory_order_acquire) != round) sched_yield();
  }
  reads.join();
  CHECK(is_right);
  constexpr int kSignals = 500;
  const auto signals = [&] {
    SharedWindow::Refusal mine;
    for (int each = 0; each < kSignals; ++each) CHECK(window.signal(world.rank, &mine) == Status::kDone);
  };
  const auto takes = [&] {
    SharedWindow::Refusal mine;
    for (int each = 0; each < kSignals; ++each) {
      CHECK(window.wait_signal(world.rank, kTimeoutS, &mine) == Status::kDone);
    }
  };
  std::vector<std::thread> threads;
  for (int pair = 0; pair < 2; ++pair) {
    threads.emplace_back(signals);
    threads.emplace_back(takes);
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(window.wait_signal(world.rank, 0, &refusal) == Status::kTimedOut);
  CHECK(window.put(after, 1, kCount, 4, values.data(), false, &refusal) == Status::kWrongArgument);
  CHECK(window.put(after, 0, 1, 6, values.data(), false, &refusal) == Status::kWrongArgument);
  CHECK(window.put(kRanks, 0, 1, 4, values.data(), false, &refusal) == Status::kWrongArgument);
  CHECK(run(group, told(64, 0), [](Group& self, double limit) { return self.barrier(limit); }) == Status::kDone);
  CHECK(window.end(&refusal) == Status::kDone);
  CHECK(window.signal(after, &refusal) == Status::kWrongArgument);
  close_group(group);
}

void messages(const World& world, const File& segment, const File& queues, const File& arenas) {
  const std::uint64_t group = open_group(world, segment, kTimeoutS);
  use_arenas(world, group, arenas);
  void* const liveness = ps_liveness_of(group);
  std::int64_t report[12] = {};
  char* const memory = static_cast<char*>(queues.mapping());
  const auto open = [&](int queue, const std::vector<int>& ranks, int me) {
    char* const control = memory + queue * (kChunkBytes * kChunks + 8192);
    const int readers = static_cast<int>(ranks.size()) - 1;
    return me == 0 ? ps_queue_writer_new(control, control + 8192, kChunkBytes, kChunks, readers, ranks.data(), liveness,
                                         2000, 5, report)
                   : ps_queue_reader_new(control, control + 8192, kChunkBytes, kChunks, readers, ranks.data(), me,
                                         liveness, 2000, 5, report);
  };
  const auto send = [&](void* writer, std::size_t bytes) {
    const std::vector<char> body(bytes, static_cast<char>(bytes % 101));
    const Piece piece{const_cast<char*>(body.data()), body.size()};
    int status = ps_queue_send(writer, "head", 4, &piece, 1, 0, bytes, 0.0);
    if (status == 1) status = ps_queue_resume(writer, kTimeoutS);
    return status;
  };
  const auto receive = [&](void* reader, std::size_t bytes) {
    char head[8];
    std::vector<char> body(bytes);
    const Piece piece{body.data(), body.size()};
    if (bytes % 2 != 0) {
      if (!take(reader, bytes, Body("head", &body))) return false;
      return body.front() == static_cast<char>(bytes % 101) && body.back() == body.front();
    }
    if (ps_queue_take(reader, head, sizeof head, kTimeoutS) != 0) return false;
    if (report[2] != 4 || report[3] != static_cast<std::int64_t>(bytes) || std::memcmp(head, "head", 4) != 0)
      return false;
    return ps_queue_read(reader, &piece, 1, kTimeoutS) == 0 &&
           (bytes == 0 || (body.front() == static_cast<char>(bytes % 101) && body.back() == body.front()));
  };
  std::vector<int> everyone;
  for (int rank = 0; rank < kRanks; ++rank) everyone.push_back(rank);
  void* const broadcast = open(0, everyone, world.rank);
  const std::size_t sizes[] = {0, 1, 60, 4028, 4029, 5000, 100'000, 3};
  for (int round = 0; round < 20; ++round) {
    for (const std::size_t bytes : sizes) {
      if (world.rank == 0) CHECK(send(broadcast, bytes) == 0);
      else CHECK(receive(broadcast, bytes));
    }
  }
  Served served(find(group));
  std::uint64_t broadcasts = 0;
  const Told to_all = told(144, 0, 0);
  const auto send_list = [&](List& list) { return send_message(served, {0, 0}, list.pieces(), 1) == Outcome::kDone; };
  const auto receive_list = [&](int src, List& list) {
    return receive_message(served, {src, 1}, list.pieces()) == Outcome::kDone;
  };
  if (world.rank == 0) ps_queue_writer_serve(broadcast, group, -1, &broadcasts);
  else ps_queue_reader_serve(broadcast, group, 0, 1, &broadcasts);
  for (std::size_t bytes = 1; bytes < 16'000; bytes += 499) {
    const bool other = bytes % 5 == 0;
    List list(world.rank != 0 && other ? "else" : "list", bytes, static_cast<char>(world.rank == 0 ? bytes % 90 : 0));
    const auto carry = [&] {
      const Outcome outcome = world.rank == 0 ? broadcast_message(served, to_all, list.pieces(), 1)
                                              : receive_broadcast(served, to_all, 0, list.pieces());
      CHECK(outcome != Outcome::kNoRoom || world.rank == 0);
      return outcome == Outcome::kDone;
    };
    bool done = carry();
    for (; world.rank == 0 && !done; done = carry()) usleep(20);
    CHECK(done == (world.rank == 0 || !other) && report[8] == (done ? 0 : 1));
    if (!done) {
      ++broadcasts;
      CHECK(take(broadcast, broadcasts, Body("list", &list.body)));
    }
    CHECK(list.is(static_cast<char>(bytes % 90)) && broadcasts == (bytes - 1) / 499 + 1);
  }
  const auto meet = [&] {
    CHECK(run(group, told(64, 0), [](Group& self, double limit) { return self.barrier(limit); }) == Status::kDone);
  };
  constexpr std::size_t kLentBytes = Lender::kLeastBytes + 4096, kMany = 2 * kArenaBytes / kLentBytes;
  std::deque<Loan> held;
  std::size_t borrowed = 0;
  for (std::size_t round = 0; round < kMany; ++round) {
    if (world.rank != 0) find(group)->queues().reader(0, true)->end.want_loans(true);
    meet();
    if (world.rank == 0) {
      CHECK(send(broadcast, kLentBytes) == 0);
      continue;
    }
    std::vector<char> body(kLentBytes);
    std::vector<Loan> loans;
    CHECK(take(broadcast, kLentBytes, Body("head", &body, round % 5 != 0 ? &loans : nullptr)));
    if (!loans.empty()) {
      CHECK(loans.size() == 1 && loans[0].bytes == kLentBytes && loans[0].data[0] == loans[0].data[kLentBytes - 1]);
      CHECK(loans[0].data[0] == static_cast<char>(kLentBytes % 101));
      held.push_back(loans[0]);
      ++borrowed;
    } else {
      CHECK(body.front() == static_cast<char>(kLentBytes % 101) && body.back() == body.front());
    }
    if (round % 7 == 0) {
      std::thread([&] {
        for (const Loan& loan : held) loan.give_back();
      }).join();
      held.clear();
    }
  }
  CHECK(world.rank == 0 || borrowed > kMany / 4);
  for (const Loan& loan : held) loan.give_back();
  for (int rank = 1; rank < kRanks; ++rank) {
    if (world.rank != 0 && world.rank != rank) continue;
    void* const pair = open(rank, {rank, 0}, world.rank == 0 ? 1 : 0);
    if (world.rank == 0) ps_queue_reader_serve(pair, group, rank, 0, nullptr);
    else ps_queue_writer_serve(pair, group, 0, nullptr);
    for (std::size_t bytes = 1; bytes < 16'000; bytes += 499) {
      List list("list", bytes, static_cast<char>(world.rank == rank ? bytes % 90 : 0));
      const Piece piece{list.body.data(), bytes};
      if (world.rank == rank && (bytes % 2 == 0 || !send_list(list))) {
        int status = ps_queue_send(pair, "list", 4, &piece, 1, 0, 0, 0);
        CHECK(status == 0 || !send_list(list));
        if (status == 1) status = ps_queue_resume(pair, kTimeoutS);
        CHECK(status == 0);
      } else if (world.rank == 0 && (bytes % 3 == 0 || !receive_list(rank, list))) {
        CHECK(take(pair, 0, Body("list", &list.body)));
      }
      CHECK(list.is(static_cast<char>(bytes % 90)));
    }
    List unsent("list", 1);
    CHECK(send_message(served, {77, 0}, unsent.pieces(), 1) == Outcome::kLeft && !receive_list(77, unsent));
    for (const std::size_t bytes : sizes) {
      if (world.rank == rank) CHECK(send(pair, bytes) == 0);
      else CHECK(receive(pair, bytes));
    }
    if (world.rank == rank) {
      ps_queue_writer_leave(pair);
      CHECK(ps_queue_writer_delete(pair) == 1 && !send_list(unsent));
    } else if (rank == 1) {
      CHECK(ps_queue_take(pair, nullptr, 0, kTimeoutS) == 2);
      CHECK(ps_queue_reader_delete(pair) == 1);
    } else {
      std::thread waits([&] { CHECK(!receive_list(rank, unsent)); });
      ps_queue_reader_leave(pair);
      while (ps_queue_reader_delete(pair) == 0) usleep(100);
      waits.join();
    }
  }
  CHECK(run(group, told(64, 0), [](Group& self, double limit) { return self.barrier(limit); }) == Status::kDone);
  (world.rank == 0 ? ps_queue_writer_delete : ps_queue_reader_delete)(broadcast);
  ps_liveness_delete(liveness);
  find(group)->liveness().leave();
  close_group(group);
}

void failures(const World& world, const std::vector<const File*>& segments) {
  std::vector<float> x(100, 1.0f);
  const auto reduce = [&](std::uint64_t group, std::size_t count) {
    return run(group, told(8, count), [&](Group& self, double limit) {
      return self.all_reduce(x.data(), x.data(), count, Dtype::kFloat32, ReduceOp::kSum, limit);
    });
  };
  const std::uint64_t differs = open_group(world, *segments[0], kTimeoutS);
  CHECK(reduce(differs, world.rank == 1 ? 99 : 100) == Status::kMismatch);
  CHECK(reduce(differs, 100) == Status::kMismatch);
  const std::uint64_t late = open_group(world, *segments[1], 0.3);
  const Status status = world.rank == 2 ? Status::kTimedOut : reduce(late, 100);
  CHECK(status == Status::kTimedOut);
  const std::uint64_t doomed = open_group(world, *segments[2], kTimeoutS);
  std::thread tells([&] {
    usleep(100'000);
    find(doomed)->liveness().doom();
  });
  if (world.rank != 0) CHECK(reduce(doomed, 100) == Status::kPeerDied);
  tells.join();
  const std::uint64_t closed = open_group(world, *segments[3], 0.5);
  std::thread closes([&] {
    usleep(100'000);
    forget(closed);
  });
  if (world.rank != 0) CHECK(reduce(closed, 100) != Status::kDone);
  closes.join();
  CHECK(reduce(closed, 100) == Status::kClosed);
  for (const std::uint64_t group : {differs, late, doomed}) close_group(group);
}

// The last rank exits in a loop. The control plane, here a thread, informs the first. The second reads what the first
// then writes.
void death(const World& world, const File& segment) {
  const std::uint64_t group = open_group(world, segment, kTimeoutS);
  std::thread tells;
  if (world.rank == 0) {
    const auto ends = std::make_shared<control::EndListeners>();
    find(group)->liveness().listen_to(ends, {0, 1, 2}, {0, 1, 2});
    tells = std::thread([&world, ends] {
      control::ProcessWatch last;
      CHECK(last.open(static_cast<int>(world.pids[kRanks - 1]), 0) != control::ProcessWatch::kUnknown);
      while (!last.has_exited()) usleep(1000);
      ends->report(kRanks - 1, true);
    });
  }
  std::vector<float> x(5000, 1.0f);
  for (int call = 0;; ++call) {
    if (world.rank == kRanks - 1 && call == 50) _exit(0);
    // Rank 1 calls again only after the report.
    while (world.rank == 1 && call == 50 && !find(group)->liveness().is_doomed()) usleep(1000);
    const Status status = run(group, told(8, x.size()), [&](Group& self, double limit) {
      return self.all_reduce(x.data(), x.data(), x.size(), Dtype::kFloat32, ReduceOp::kMax, limit);
    });
    if (status == Status::kDone) continue;
    CHECK(status == Status::kPeerDied && find(group)->failure().suspect == kRanks - 1);
    break;
  }
  if (tells.joinable()) tells.join();
  close_group(group);
}

struct Draw {
  std::uint64_t state = 1;
  std::uint64_t operator()(std::uint64_t below) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (state >> 33) % below;
  }
};

// Each message has its own allocation, so that reads past its end are found.
void hostile_bytes() {
  const std::uint8_t heads[] = {0x81, 0x91, 0x9f, 0x8f, 0xa5, 0xc1, 0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xcb,
                                0xcf, 0xd4, 0xd8, 0xd9, 0xda, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xe0, 0x00, 0x01, 0xff};
  Draw draw;
  for (int message = 0; message < 200'000; ++message) {
    std::vector<std::uint8_t> bytes(draw(40));
    for (auto& byte : bytes) byte = draw(4) == 0 ? static_cast<std::uint8_t>(draw(256)) : heads[draw(sizeof heads)];
    bytes.shrink_to_fit();
    ps_plain_keys(bytes.data(), bytes.size(), 0x803f, 16, 101);
    ++calls;
  }
  for (const std::uint8_t head : heads) {
    const std::vector<std::uint8_t> deep(1 << 20, head);
    ps_plain_keys(deep.data(), deep.size(), 0x803f, 16, 101);
  }
}

struct Copy : Taker {
  explicit Copy(bool refuses, std::uint64_t most_head_bytes = 70) : refuses(refuses), most_bytes(most_head_bytes) {}
  const bool refuses;
  const std::uint64_t most_bytes;
  std::vector<char> head, body;
  std::uint64_t most_head_bytes() const override { return most_bytes; }
  bool wants_loans() const override { return false; }
  char* head_buffer(std::uint64_t bytes) override {
    head.resize(bytes);
    return head.data();
  }
  bool take_head(const Head& found, std::vector<Piece>* pieces) override {
    if (refuses || found.bytes != found.head_bytes || found.tensor_bytes > 1 << 16) return false;
    body.resize(found.tensor_bytes);
    const std::uint64_t first = body.size() / 3;
    pieces->push_back({body.data(), first});
    pieces->push_back({body.data() + first, body.size() - first});
    return true;
  }
};

void hostile_messages() {
  constexpr std::uint64_t kSmallChunk = 256, kFewChunks = 4;
  const World world{0, {}};
  const std::int64_t pids[] = {getpid(), getpid()};
  const int ranks[] = {0, 1};
  void* const liveness = ps_liveness_new(pids, 2);
  const File segment(Handle::segment_bytes(kRanks));
  const std::uint64_t group = open_group({0, std::vector<std::int64_t>(kRanks, getpid())}, segment, 0);
  Served served(find(group));
  Draw draw;
  for (int queue = 0; queue < 20'000; ++queue) {
    std::int64_t written[12] = {}, report[12] = {};
    std::vector<char> memory(ps_queue_control_bytes(1) + 128), ring(kSmallChunk * kFewChunks + 64);
    const auto aligned = [](std::vector<char>& bytes, std::uintptr_t to) {
      return reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(bytes.data()) + to - 1) / to * to);
    };
    char* const control = aligned(memory, 128);
    char* const data = aligned(ring, 64);
    void* const writer = ps_queue_writer_new(control, data, kSmallChunk, kFewChunks, 1, ranks, liveness, 0, 0, written);
    void* const reader =
        ps_queue_reader_new(control, data, kSmallChunk, kFewChunks, 1, ranks, 1, liveness, 0, 0, report);
    ps_queue_reader_serve(reader, group, 0, 0, nullptr);
    bool spoilt = false;
    for (std::uint64_t message = 0; message < 3; ++message) {
      const std::vector<char> head(draw(80), 'h'), body(draw(500), 'b');
      const Piece piece{const_cast<char*>(body.data()), body.size()};
      const std::uint64_t fingerprint = draw(2) * 7;
      if (ps_queue_send(writer, head.data(), head.size(), &piece, 1, 0, fingerprint, 0) != 0) break;
      const bool spoils = draw(2) == 0;
      spoilt = spoilt || spoils;
      for (std::uint64_t change = spoils ? 1 + draw(3) : 0; change > 0; --change) {
        const std::uint64_t words = kSmallChunk * kFewChunks / 8;
        const std::uint64_t word = draw(4) == 0 ? draw(words) : draw(kFewChunks) * kSmallChunk / 8 + draw(6);
        const std::uint64_t values[] = {0, 1, 64, 200, 300, std::uint64_t{1} << 59, ~std::uint64_t{0}, draw(600)};
        std::memcpy(data + word * 8, &values[draw(8)], 8);
      }
      std::vector<char> copied(draw(100)), expected = head;
      if (draw(3) == 0) expected.assign(draw(80), 'h');
      const bool is_expected = expected == head && head.size() <= kSmallChunk - 64;
      std::vector<char> room(draw(3) == 0 ? draw(500) : body.size());
      const std::uint64_t first = draw(room.size() + 1);
      const Piece pieces[] = {{room.data(), first}, {room.data() + first, room.size() - first}};
      if (draw(4) == 0) {
        Copy copy(draw(3) == 0);
        const std::uint64_t number = draw(3) == 0 ? 0 : fingerprint;
        const Outcome outcome = draw(2) == 0 && number == 0
                                    ? receive_value(served, {0, 1}, copy)
                                    : receive_value(*static_cast<OpenReader*>(reader), number, 0, copy);
        const bool done = outcome == Outcome::kDone, is_empty = head.size() + body.size() == 0;
        CHECK(spoilt || done == (fingerprint == number && !copy.refuses && head.size() <= 70 && !is_empty));
        CHECK(spoilt || !done || (copy.head == head && copy.body == body));
        CHECK(report[9] == 0 || spoilt || is_empty);
        if (report[9] != 0 || outcome == Outcome::kRaised) break;
        if (done) continue;
      }
      if (!expected.empty() && draw(2) == 0) {
        const Outcome outcome =
            receive_message(served, {0, 1}, {{expected.data(), expected.size()}, pieces[0], pieces[1]});
        const bool done = outcome == Outcome::kDone;
        const bool fits = fingerprint == 0 && is_expected && room.size() == body.size();
        CHECK(spoilt || done == (fits && head.size() + body.size() != 0));
        CHECK(spoilt || !done || std::count(room.begin(), room.end(), 'b') == static_cast<std::ptrdiff_t>(room.size()));
        CHECK(report[9] == 0 || spoilt || head.size() + body.size() == 0);
        if (report[9] != 0) break;
        if (done) continue;
      }
      const int status = ps_queue_take(reader, copied.data(), copied.size(), 0);
      CHECK(spoilt || status == 0);
      if (status != 0) break;
      std::vector<char> rest(static_cast<std::uint64_t>(report[4]) < 4096 ? static_cast<std::size_t>(report[4]) : 4096);
      const Piece left{rest.data(), rest.size()};
      if (ps_queue_read(reader, &left, 1, 0) != 0) break;
      if (rest.size() != static_cast<std::uint64_t>(report[4]) && report[4] != 0) break;
    }
    ps_queue_writer_delete(writer);
    ps_queue_reader_delete(reader);
  }
  forget(group);
  ps_liveness_delete(liveness);
}

struct Fake {
  const void* type;
  std::vector<Fake*> items;
  std::string bytes;
  long long number = 0;
  void* tensor = nullptr;
};

std::multiset<void*> held;
std::set<void*> owned;

const char kTypes[9] = {};  // list, dict, str, int, float, None, bool, bytes, Tensor
enum { kList, kDict, kStr, kInt, kFloat, kNone, kBool, kBytes, kTensor };

Fake* fake(void* object) { return static_cast<Fake*>(object); }

void* made(int kind, std::string bytes = "") {
  void* const object = new Fake{kTypes + kind, {}, std::move(bytes)};
  owned.insert(object);
  held.insert(object);
  return object;
}

void let_go(void* object) {
  const auto found = held.find(object);
  if (found == held.end()) return;
  held.erase(found);
  if (held.count(object) != 0 || owned.erase(object) == 0) return;
  for (Fake* const item : fake(object)->items) let_go(item);
  delete fake(object);
}

Python fake_python() {
  static const void* const leaves[] = {kTypes + kStr,  kTypes + kInt,  kTypes + kFloat,
                                       kTypes + kNone, kTypes + kBool, kTypes + kBytes};
  static const void* const others[] = {kTypes + kTensor};
  static const void* const texts[] = {kTypes + kStr, kTypes + kBytes};
  static const char* const names[] = {"uint8", nullptr, "bfloat16"};
  Python python{};
  python.type_of = [](void* object) { return const_cast<void*>(fake(object)->type); };
  calling.hold = [](void* object) { held.insert(object); };
  calling.let_go = let_go;
  python.list_size = [](void* object) { return static_cast<std::ptrdiff_t>(fake(object)->items.size()); };
  python.list_item = [](void* object, std::ptrdiff_t at) -> void* { return fake(object)->items[at]; };
  python.dict_size = [](void* object) { return static_cast<std::ptrdiff_t>(fake(object)->items.size() / 2); };
  python.dict_next = [](void* object, std::ptrdiff_t* at, void** key, void** value) {
    const auto& items = fake(object)->items;
    if (static_cast<std::size_t>(*at) >= items.size()) return 0;
    *key = items[*at], *value = items[*at + 1], *at += 2;
    return 1;
  };
  python.utf8 = [](void* object, std::ptrdiff_t* size) -> const char* {
    *size = static_cast<std::ptrdiff_t>(fake(object)->bytes.size());
    return fake(object)->number == 1 ? nullptr : fake(object)->bytes.data();
  };
  python.integer = [](void* object, int* overflow) {
    *overflow = fake(object)->number == 77 ? 1 : 0;
    return fake(object)->number;
  };
  python.number = [](void* object) { return static_cast<double>(fake(object)->number); };
  calling.bytes_size = [](void* object) { return static_cast<std::ptrdiff_t>(fake(object)->bytes.size()); };
  calling.as_bytes = [](void* object) -> const char* { return fake(object)->bytes.data(); };
  python.forget_error = [] {};
  python.list = kTypes + kList, python.dict = kTypes + kDict;
  python.leaves = leaves, python.leaf_count = 6, python.others = others, python.other_count = 1;
  python.texts = texts, python.text_count = 2, python.most_other_keys = 5;
  python.str_type = kTypes + kStr, python.int_type = kTypes + kInt, python.float_type = kTypes + kFloat;
  python.none_type = kTypes + kNone, python.bool_type = kTypes + kBool, python.bytes_type = kTypes + kBytes;
  python.describe = [](const void* tensor, TensorForm* form) {
    *form = *static_cast<const TensorForm*>(tensor);
    return form->dtype == 1 ? 0 : 1;
  };
  python.tuple_item = python.list_item;
  python.dict_item = [](void* object, void* key) -> void* {
    const auto& items = fake(object)->items;
    for (std::size_t at = 0; at + 1 < items.size(); at += 2) {
      if (items[at] == key) return items[at + 1];
    }
    return nullptr;
  };
  python.tensor_at = offsetof(Fake, tensor);
  python.dtype_names = names, python.dtype_count = 3;
  static const std::int64_t sizes[] = {1, 0, 2};
  static Fake none{kTypes + kNone, {}, ""}, yes{kTypes + kBool, {}, ""}, no{kTypes + kBool, {}, ""};
  python.dtype_bytes = sizes;
  python.none_object = &none, python.true_object = &yes, python.false_object = &no;
  python.make_text = [](const char* text, std::ptrdiff_t size, const char*) { return made(kStr, {text, text + size}); };
  calling.make_bytes = [](const char* data, std::ptrdiff_t size) { return made(kBytes, {data, data + size}); };
  calling.make_integer = [](long long) { return made(kInt); };
  python.make_unsigned = [](unsigned long long) { return made(kInt); };
  python.make_number = [](double) { return made(kFloat); };
  python.make_list = [](std::ptrdiff_t size) {
    void* const list = made(kList);
    fake(list)->items.resize(static_cast<std::size_t>(size));
    return list;
  };
  python.set_item = [](void* list, std::ptrdiff_t at, void* item) {
    fake(list)->items.at(static_cast<std::size_t>(at)) = fake(item);
    return 0;
  };
  python.make_dict = [] { return made(kDict); };
  python.set_key = [](void* dict, void* key, void* item) {
    for (void* const object : {key, item}) {
      held.insert(object);
      fake(dict)->items.push_back(fake(object));
    }
    return 0;
  };
  python.make_tensor = [](const void*, TensorForm*, void* (*)(const void*)) { return made(kTensor); };
  return python;
}

struct Ends {
  const std::int64_t pids[2] = {getpid(), getpid()};
  const int ranks[2] = {0, 1};
  void* const liveness = ps_liveness_new(pids, 2);
  const File memory{16 << 10};
  char* const shared = static_cast<char*>(memory.shared);
  std::int64_t written[12] = {}, report[12] = {};
  void* const writer = ps_queue_writer_new(shared, shared + 4096, 256, 8, 1, ranks, liveness, 0, 0, written);
  void* const reader = ps_queue_reader_new(shared, shared + 4096, 256, 8, 1, ranks, 1, liveness, 0, 0, report);

  Ends() = default;
  Ends(const Ends&) = delete;

  ~Ends() {
    ps_queue_writer_delete(writer);
    ps_queue_reader_delete(reader);
    ps_liveness_delete(liveness);
  }
};

void known_dicts() {
  const World world{0, {}};
  Python python = fake_python();
  Draw draw;
  static char content[600], name[] = "head";
  Packer packer;
  for (int round = 0; round < 30'000; ++round) {
    std::deque<Fake> objects;
    std::deque<TensorForm> tensors;
    std::deque<std::array<std::int64_t, 3>> shapes;
    Fake dict{kTypes + (draw(50) == 0 ? kList : kDict), {}, ""}, keys{kTypes + kList, {}, ""};
    std::vector<std::int64_t> layout;
    std::size_t bytes = 0;
    bool fits = dict.type == kTypes + kDict;
    for (std::uint64_t left = draw(5); left > 0; --left) {
      Fake* const key = &objects.emplace_back(Fake{kTypes + kStr, {}, "k"});
      Fake* const item = &objects.emplace_back(Fake{kTypes + kTensor, {}, ""});
      auto& sizes = shapes.emplace_back();
      for (auto& size : sizes) size = static_cast<std::int64_t>(draw(4));
      TensorForm& form = tensors.emplace_back(
          TensorForm{content, draw(600), draw(30) == 0 ? 1 : 2, static_cast<std::int64_t>(draw(4)), sizes.data()});
      item->tensor = &form;
      if (draw(30) == 0) item->type = kTypes + kInt;
      dict.items.insert(dict.items.end(), {key, item});
      if (draw(30) == 0) continue;
      keys.items.push_back(draw(30) == 0 ? &objects.emplace_back(Fake{kTypes + kStr, {}, "other"}) : key);
      fits = fits && keys.items.back() == key && item->type == kTypes + kTensor && form.dtype != 1;
      layout.insert(layout.end(), {form.dtype, form.dims});
      layout.insert(layout.end(), sizes.begin(), sizes.begin() + form.dims);
      bytes += form.bytes;
    }
    const std::vector<std::int64_t> of_dict = layout;
    if (!layout.empty() && draw(5) == 0) layout[draw(layout.size())] ^= static_cast<std::int64_t>(1) << draw(63);
    if (draw(20) == 0) layout.resize(draw(layout.size() + 3));
    const std::int64_t entries = static_cast<std::int64_t>(dict.items.size() / 2 + (draw(20) == 0 ? 1 : 0));
    fits = fits && layout == of_dict && entries == static_cast<std::int64_t>(dict.items.size() / 2);
    const Form form{&keys, layout.data(), static_cast<std::int64_t>(keys.items.size()),
                    static_cast<std::int64_t>(layout.size()), entries};
    python.type_at = round % 2 == 0 ? 0 : offsetof(Fake, type);
    CHECK(packer.gather(python, &dict, form, {name, 4}) == fits);
    if (!fits) continue;
    std::size_t found = 0;
    for (const Piece& piece : packer.pieces()) found += piece.bytes;
    CHECK(found == bytes + 4 && packer.tensor_bytes() == bytes && packer.pieces()[0].address == name);
  }
}

void unpack(const Python& python, Draw& draw, std::vector<char> head, std::size_t tensor_bytes, std::uint64_t slices) {
  const World world{0, {}};
  struct Made : Tensors {
    explicit Made(const Python& python, std::size_t count) : python(python), all(count, nullptr) {}
    ~Made() override {
      for (void* const each : all) {
        if (each != nullptr) let_go(each);
      }
    }
    void* at(std::size_t index, void*) override {
      if (all.at(index) == nullptr) all[index] = python.make_tensor(nullptr, nullptr, nullptr);
      return all[index];
    }
    const Python& python;
    std::vector<void*> all;
  };
  for (int change = 0; change < 4; ++change) {
    const std::vector<char> exact(head);
    {
      Unpacker unpacker;
      const bool read = unpacker.read(python, exact.data(), exact.size(), tensor_bytes, slices);
      CHECK(read || change != 0);
      Made tensors(python, read ? unpacker.count() : 0);
      void* const object = read ? unpacker.build(tensors) : nullptr;
      CHECK(object != nullptr || change != 0);
      if (object != nullptr) let_go(object);
    }
    CHECK(owned.empty() && held.empty());
    const std::uint64_t at = draw(2) == 0 ? draw(head.size()) : draw(std::min<std::size_t>(head.size(), 64));
    if (draw(5) == 0) head.resize(at);
    else head[at] = static_cast<char>(draw(3) == 0 ? draw(256) : head[at] ^ (1 << draw(8)));
    if (head.empty()) return;
  }
}

void packed_objects() {
  const World world{0, {}};
  Python python = fake_python();
  Draw draw;
  static char content[600];
  static const std::int64_t shapes[] = {2, 3, 1, 7};
  static const std::uint64_t numels[] = {1, 2, 6, 6, 42};
  Ends queue;
  for (int round = 0; round < 30'000; ++round) {
    std::deque<Fake> objects;
    std::deque<TensorForm> tensors;
    const auto make = [&](const auto& again, int depth) -> Fake* {
      Fake& made = objects.emplace_back();
      const int kind = static_cast<int>(depth == 0 ? 2 + draw(7) : draw(9));
      made.type = draw(400) == 0 ? content : kTypes + kind;
      made.number =
          draw(3) == 0 ? static_cast<long long>(draw(1ULL << 31)) << draw(33) : static_cast<long long>(draw(300)) - 100;
      if (kind == kStr || kind == kBytes)
        made.bytes.assign(draw(50) == 0 ? draw(70'000) : draw(9) == 0 ? draw(9000) : draw(300), 'x');
      if (kind == kTensor) {
        const std::uint64_t dims = draw(5);
        made.tensor = &tensors.emplace_back(
            TensorForm{content, 2 * numels[dims], draw(30) == 0 ? 1 : 2, static_cast<std::int64_t>(dims), shapes});
      }
      for (std::uint64_t item = kind == kList || kind == kDict ? draw(20) : 0; item > 0; --item) {
        if (kind == kDict) made.items.push_back(again(again, 0));
        made.items.push_back(again(again, depth - 1));
      }
      return &made;
    };
    Fake* const object = make(make, static_cast<int>(draw(4)));
    python.type_at = round % 2 == 0 ? 0 : offsetof(Fake, type);
    const std::uint64_t limit = draw(3) == 0 ? draw(2000) : 1 << 20;
    ps_packed(nullptr, 0, nullptr, nullptr);
    const int depth = static_cast<int>(draw(5));
    python.depth = depth;
    const std::uint64_t slices = draw(4);
    if (ps_pack(object, &python, depth, limit, slices, slices == 0 ? 0 : draw(slices), nullptr) == 0) continue;
    Piece pieces[200];
    int counts[2] = {};
    if (draw(5) == 0) continue;
    void* kept[128] = {};
    const int count = ps_packed(pieces, 200, counts, kept), heads = counts[0];
    for (int each = 0; each < counts[1]; ++each) let_go(kept[each]);
    CHECK(held.empty());
    CHECK(count >= heads && heads >= 2 && pieces[0].bytes >= 37);
    std::size_t head_bytes = 0;
    for (int piece = 0; piece < heads; ++piece) head_bytes += pieces[piece].bytes;
    CHECK(head_bytes - 32 <= limit);
    std::vector<char> packed, came;
    for (int piece = 0; piece < count; ++piece) {
      const auto* const from = static_cast<char*>(pieces[piece].address);
      packed.insert(packed.end(), from, from + pieces[piece].bytes);
    }
    auto& end = static_cast<OpenWriter*>(queue.writer)->end;
    if (end.fit(pieces, count, heads)) {
      end.write(0);
      Copy copy(false, 1 << 20);
      CHECK(receive_value(*static_cast<OpenReader*>(queue.reader), 0, 0, copy) == Outcome::kDone);
      came = copy.head;
      came.insert(came.end(), copy.body.begin(), copy.body.end());
      CHECK(came == packed);
    }
    unpack(python, draw, std::vector<char>(packed.begin(), packed.begin() + static_cast<std::ptrdiff_t>(head_bytes)),
           packed.size() - head_bytes, slices);
    const std::size_t body = pieces[0].bytes;
    CHECK(ps_plain_keys(reinterpret_cast<const std::uint8_t*>(packed.data()) + body, head_bytes - body, 0, 5, 1) == 1);
  }
}

std::atomic<long>* refused = nullptr;

// From here on this process counts and doesn't run system calls other than `allowed` and its exit.
void refuse_system_calls(std::vector<long> allowed) {
  struct sigaction action{};
  action.sa_handler = [](int) { ++*refused; };
  sigaction(SIGSYS, &action, nullptr);
  std::vector<sock_filter> filter{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  allowed.insert(allowed.end(), {SYS_rt_sigreturn, SYS_exit_group});
  for (const long number : allowed) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(number), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    std::abort();
  }
}

// Of two ranks with a core each there are none. Two ranks on one core only yield and sleep.
void system_calls() {
  constexpr int kPair = 2, kCalls = 100;
  constexpr std::size_t kBytes = 8192;
  const World world{-1, {}};
  cpu_set_t usable;
  sched_getaffinity(0, sizeof usable, &usable);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &usable)) cores.push_back(core);
  }
  for (std::size_t used = 1; used <= std::min<std::size_t>(cores.size(), kPair); ++used) {
    const File segment(Handle::segment_bytes(kPair)), counts(4096);
    refused = static_cast<std::atomic<long>*>(counts.shared);
    auto* const right = refused + 1;
    const auto body = [&](int rank) {
      cpu_set_t own;
      CPU_ZERO(&own);
      CPU_SET(cores[static_cast<std::size_t>(rank) % used], &own);
      sched_setaffinity(0, sizeof own, &own);
      WaitPolicy policy;
      policy.spin_ns = used == 1 ? 2000 : static_cast<std::int64_t>(kTimeoutS * 1e9);
      policy.yields = used == 1 ? 5 : 0;
      const std::uint64_t group =
          keep(std::make_shared<Handle>(segment.mapping(), segment.bytes, rank, kPair, policy, kTimeoutS));
      std::vector<char> in(kBytes, 1), out(kPair * kBytes);
      const auto call = [&] {
        const std::array<Status, 3> found{
            run(group, told(16, kBytes),
                [&](Group& self, double limit) { return self.all_gather(out.data(), in.data(), 1, kBytes, limit); }),
            run(group, told(32, kBytes, 0),
                [&](Group& self, double limit) { return self.broadcast(out.data(), kBytes, 0, limit); }),
            run(group, told(8, kBytes), [&](Group& self, double limit) {
              return self.all_reduce(out.data(), in.data(), kBytes, Dtype::kUint8, ReduceOp::kSum, limit);
            })};
        *right += found == std::array<Status, 3>{} && out[kBytes - 1] == kPair;
      };
      call();
      refuse_system_calls(used == 1 ? std::vector<long>{SYS_sched_yield, SYS_futex, SYS_membarrier}
                                    : std::vector<long>{});
      for (int number = 0; number < kCalls; ++number) call();
      _exit(0);
    };
    std::vector<pid_t> children;
    for (int rank = 0; rank < kPair; ++rank) {
      children.push_back(fork());
      if (children.back() == 0) body(rank);
    }
    for (const pid_t pid : children) {
      int status = 0;
      waitpid(pid, &status, 0);
      CHECK(status == 0);
    }
    CHECK(*right == kPair * (1 + kCalls));
    CHECK(*refused == 0);
  }
}

}  // namespace

int main(int, char** arguments) {
  if (std::string(arguments[1]) == "calls") {
    system_calls();
    std::printf("%ld checks, %ld wrong\n", calls.load(), wrong.load());
    return wrong != 0;
  }
  as_threads = std::string(arguments[1]) == "threads";
  hostile_bytes();
  const std::size_t segment_bytes = Handle::segment_bytes(kRanks);
  const File collective(segment_bytes), message(segment_bytes), dying(segment_bytes), window(segment_bytes);
  const File a(segment_bytes), b(segment_bytes), c(segment_bytes);
  const File arenas(kRanks * kArenaBytes), window_arenas(kRanks * kArenaBytes),
      queues(kRanks * (kChunkBytes * kChunks + 8192));
  std::vector<File> own;  // closing a group unmaps its mapping
  for (int rank = 0; rank < kRanks; ++rank) own.emplace_back(segment_bytes);
  const File closing(segment_bytes);
  File pids(4096);
  auto* const shared = static_cast<std::atomic<std::int64_t>*>(pids.shared);
  const auto body = [&](int rank) {
    World world{rank, {}};
    shared[rank].store(getpid());
    for (int other = 0; other < kRanks; ++other) {
      while (shared[other].load() == 0) usleep(1000);
      world.pids.push_back(shared[other].load());
    }
    collectives(world, collective, arenas);
    messages(world, message, queues, arenas);
    windows(world, window, window_arenas);
    failures(world, {&a, &b, &c, as_threads ? &own[rank] : &closing});
    if (!as_threads) death(world, dying);
  };
  if (as_threads) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  } else {
    std::vector<pid_t> children;
    for (int rank = 0; rank < kRanks; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) {
        body(rank);
        std::printf("rank %d: %ld checks\n", rank, calls.load());
        std::exit(wrong != 0);
      }
      children.push_back(pid);
    }
    for (const pid_t pid : children) {
      int status = 0;
      waitpid(pid, &status, 0);
      calls += 1;
      wrong += status != 0;
    }
  }
  hostile_messages();  // after the forks, which give up watching processes
  packed_objects();
  known_dicts();
  std::printf("%ld checks, %ld wrong\n", calls.load(), wrong.load());
  return wrong != 0;
}
