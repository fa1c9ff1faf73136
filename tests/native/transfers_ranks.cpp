// Transfers of ranks that are threads, for sanitizers: over rings within a host, and over socket pairs between hosts.
//
//   transfers_ranks SEED ROUNDS
//
// Two threads of each rank call at the same time, and progress threads move what nobody waits for.
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "rings.h"
#include "streams.h"

using namespace parallel_state;

namespace {

constexpr int kRanks = 3;
constexpr double kTimeoutS = 120;
constexpr std::uint64_t kEarlyBytes = 200'000, kStripedBytes = 50'000;

std::atomic<long> checks{0}, wrong{0};

// Relaxed: the counters must not order the threads.
#define CHECK(condition)                                           \
  do {                                                             \
    checks.fetch_add(1, std::memory_order_relaxed);                \
    if (!(condition)) {                                            \
      wrong.fetch_add(1, std::memory_order_relaxed);               \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
    }                                                              \
  } while (false)

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(seed * 2 + 1) {}
  std::uint64_t operator()(std::uint64_t count) {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return mixed(state_) % count;
  }

 private:
  std::uint64_t state_;
};

class NoLosses final : public Losses {
 public:
  Loss loss(int) const override { return Loss(); }
};

struct Meeting {
  Meeting() { pthread_barrier_init(&barrier, nullptr, kRanks); }
  ~Meeting() { pthread_barrier_destroy(&barrier); }
  void wait() { pthread_barrier_wait(&barrier); }
  pthread_barrier_t barrier;
};

void on_all_ranks(const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

std::size_t draw_size(Draw& draw) {
  static constexpr std::size_t kSizes[] = {0, 1, 100, 4000, 65'536, 65'537, 150'000, 300'001};
  return kSizes[draw(std::size(kSizes))];
}

std::vector<char> content(std::uint64_t seed, std::size_t bytes) {
  std::vector<char> made(bytes);
  for (std::size_t at = 0; at < bytes; ++at) made[at] = static_cast<char>(seed * 31 + at % 97);
  return made;
}

constexpr TransferUser kNobody{nullptr, nullptr, nullptr};

TransferCall call_of(int peer, bool sends, int tag, std::vector<char>& data) {
  return {peer, sends ? 1 : 0, tag, 0, data.data(), data.size(), 0, &kNobody, nullptr};
}

bool has_ended(Transfers& own, std::int64_t number) {
  return number == kDoneTransfer ||
         (number > 0 && own.wait(static_cast<Transfers::Number>(number), kTimeoutS, true) == kEndedTransfer);
}

void exchange(Transfers& own, int rank, std::uint64_t seed, int tags) {
  constexpr int kEach = 4;
  std::deque<std::vector<char>> sent, received;
  std::vector<std::int64_t> sends;
  const auto plan = [&](int src, int dst) {
    Draw draw(seed * 100 + static_cast<std::uint64_t>(src * kRanks + dst));
    std::vector<std::size_t> sizes(2 * kEach);
    std::generate(sizes.begin(), sizes.end(), [&] { return draw_size(draw); });
    return sizes;
  };
  for (int dst = 0; dst < kRanks; ++dst) {
    const std::vector<std::size_t> sizes = plan(rank, dst);
    for (int each = 0; each < 2 * kEach && dst != rank; ++each) {
      sent.push_back(content(seed + static_cast<std::uint64_t>(rank + each), sizes[static_cast<std::size_t>(each)]));
      sends.push_back(own.start(call_of(dst, true, tags + each % 2, sent.back()), false));
    }
  }
  Draw draw(seed + static_cast<std::uint64_t>(rank));
  for (int src = 0; src < kRanks; ++src) {
    if (src == rank) continue;
    const std::vector<std::size_t> sizes = plan(src, rank);
    const int first = static_cast<int>(draw(2));
    const bool waits = draw(2) == 0;
    std::vector<std::int64_t> receives;
    for (const int tag : {first, 1 - first}) {
      for (int each = tag; each < 2 * kEach; each += 2) {
        received.emplace_back(sizes[static_cast<std::size_t>(each)]);
        const std::int64_t number = own.start(call_of(src, false, tags + tag, received.back()), waits);
        if (waits) CHECK(has_ended(own, number));
        if (!waits) receives.push_back(number);
      }
    }
    for (const std::int64_t number : receives) CHECK(has_ended(own, number));
    auto found = received.end() - 2 * kEach;
    for (const int tag : {first, 1 - first}) {
      for (int each = tag; each < 2 * kEach; each += 2) {
        CHECK(*found++ ==
              content(seed + static_cast<std::uint64_t>(src + each), sizes[static_cast<std::size_t>(each)]));
      }
    }
  }
  for (const std::int64_t number : sends) CHECK(has_ended(own, number));
}

void from_any(Transfers& own, int rank, int tag) {
  std::vector<char> data = content(static_cast<std::uint64_t>(rank), 64), found(64);
  std::vector<std::int64_t> sends;
  for (int dst = 0; dst < kRanks; ++dst) {
    if (dst != rank) sends.push_back(own.start(call_of(dst, true, tag, data), false));
  }
  std::vector<int> sources;
  for (int each = 1; each < kRanks; ++each) {
    CHECK(has_ended(own, own.start(call_of(Transfers::kAnySource, false, tag, found), true)));
    for (int src = 0; src < kRanks; ++src) {
      if (found == content(static_cast<std::uint64_t>(src), 64)) sources.push_back(src);
    }
  }
  std::sort(sources.begin(), sources.end());
  CHECK(sources.size() == kRanks - 1 && std::unique(sources.begin(), sources.end()) == sources.end());
  for (const std::int64_t number : sends) CHECK(has_ended(own, number));
}

void tensors(Transfers& own, int rank, std::uint64_t seed) {
  std::thread other([&] { exchange(own, rank, seed + 1000, 10); });
  exchange(own, rank, seed, 0);
  other.join();
  from_any(own, rank, 20);
  CHECK(own.drain(kTimeoutS));
}

class Places final : public Taker {
 public:
  explicit Places(const std::vector<std::size_t>& sizes) : places(sizes.begin(), sizes.end()) {}
  std::uint64_t most_head_bytes() const override { return 1 << 20; }
  bool wants_loans() const override { return false; }
  char* head_buffer(std::uint64_t bytes) override { return head.resize(bytes), head.data(); }
  bool take_head(const Head&, std::vector<Piece>* pieces) override {
    for (std::vector<char>& place : places) pieces->push_back({place.data(), place.size()});
    return true;
  }

  std::vector<char> head;
  std::vector<std::vector<char>> places;
};

struct Sent {
  std::vector<char> head;
  std::deque<std::vector<char>> tensors;
  OutgoingMessage message;

  Sent(std::vector<char> given, const std::vector<std::size_t>& sizes, std::uint64_t seed) : head(std::move(given)) {
    message.head = {{head.data(), head.size()}};
    message.head_bytes = head.size();
    for (const std::size_t size : sizes) {
      tensors.push_back(content(seed + tensors.size(), size));
      message.tensors.push_back({tensors.back().data(), size});
    }
  }
  TransferCall to(int dst, int tag) const {
    std::uint64_t bytes = message.head_bytes;
    for (const Piece& piece : message.tensors) bytes += piece.bytes;
    return {dst, 1, tag, kMessageDtype, nullptr, bytes, 0, &kNobody, nullptr, &message};
  }
};

void messages(Transfers& own, int rank, std::uint64_t seed) {
  constexpr int kTag = 30, kEach = 6;
  const auto sizes_of = [&](int src, int number) {
    Draw draw(seed * 1000 + static_cast<std::uint64_t>(10 * src + number));
    std::vector<std::size_t> sizes(draw(4));
    std::generate(sizes.begin(), sizes.end(), [&] { return draw_size(draw); });
    if (draw(3) == 0) sizes.assign(3000, 1 + draw(40));
    return sizes;
  };
  const auto seed_of = [&](int src, int number) { return seed + static_cast<std::uint64_t>(100 * src + number); };
  const auto head_of = [&](int src, int number) {
    return content(seed_of(src, number), 40 + seed_of(src, number) % 900);
  };
  std::deque<Sent> sent;
  std::vector<std::int64_t> sends;
  for (int number = 0; number < kEach; ++number) {
    for (int dst = 0; dst < kRanks; ++dst) {
      if (dst == rank) continue;
      sent.emplace_back(head_of(rank, number), sizes_of(rank, number), seed_of(rank, number));
      sends.push_back(own.start(sent.back().to(dst, kTag), false));
    }
  }
  for (int number = 0; number < kEach; ++number) {
    for (int src = 0; src < kRanks; ++src) {
      if (src == rank) continue;
      Places places(sizes_of(src, number));
      CHECK(own.receive_message(src, kTag, kTimeoutS, places).how == kEndedTransfer);
      const Sent expected(head_of(src, number), sizes_of(src, number), seed_of(src, number));
      CHECK(places.head == expected.head);
      CHECK(std::equal(places.places.begin(), places.places.end(), expected.tensors.begin(), expected.tensors.end()));
    }
  }
  for (const std::int64_t number : sends) CHECK(has_ended(own, number));
}

void windows(Streams& own, int rank, std::vector<std::uint32_t>& numbers, Meeting& meeting) {
  constexpr std::size_t kBytes = 150'000;
  constexpr int kRounds = 40;
  std::shared_ptr<char> memory(new char[kRanks * kBytes](), std::default_delete<char[]>());
  numbers[static_cast<std::size_t>(rank)] = own.open_window(memory, kRanks * kBytes);
  meeting.wait();
  for (int round = 0; round < kRounds; ++round) {
    const std::size_t bytes = round % 4 == 0 ? kBytes : 1 + static_cast<std::size_t>(round) * 300;
    const auto data_of = [&](int src) { return content(static_cast<std::uint64_t>(src * kRounds + round), bytes); };
    const std::vector<char> data = data_of(rank);
    for (int dst = 0; dst < kRanks; ++dst) {
      if (dst == rank) continue;
      const std::uint32_t number = numbers[static_cast<std::size_t>(dst)];
      const bool together = round % 3 != 0;
      const auto offset = static_cast<std::uint64_t>(rank) * kBytes;
      CHECK(own.put(dst, number, offset, data.data(), bytes, together, kTimeoutS) == kEndedTransfer);
      if (!together) CHECK(own.put(dst, number, 0, nullptr, 0, true, kTimeoutS) == kEndedTransfer);
    }
    const std::uint32_t number = numbers[static_cast<std::size_t>(rank)];
    for (int src = 0; src < kRanks; ++src) {
      if (src == rank) continue;
      CHECK(own.take_signal(src, number, kTimeoutS) == kEndedTransfer);
      CHECK(std::memcmp(memory.get() + static_cast<std::size_t>(src) * kBytes, data_of(src).data(), bytes) == 0);
      CHECK(own.put(src, numbers[static_cast<std::size_t>(src)], 0, nullptr, 0, true, kTimeoutS) == kEndedTransfer);
    }
    for (int src = 0; src < kRanks; ++src) {
      if (src != rank) CHECK(own.take_signal(src, number, kTimeoutS) == kEndedTransfer);
    }
  }
  const int after = (rank + 1) % kRanks, before = (rank + kRanks - 1) % kRanks;
  const auto own_number = numbers[static_cast<std::size_t>(rank)], next = numbers[static_cast<std::size_t>(after)];
  CHECK(own.take_signal(before, own_number, 0) == kLateTransfer);
  meeting.wait();
  constexpr int kSignals = 200;
  std::vector<std::thread> threads;
  for (int each = 0; each < 2; ++each) {
    threads.emplace_back([&] {
      for (int signal = 0; signal < kSignals; ++signal) {
        CHECK(own.put(after, next, 0, nullptr, 0, true, kTimeoutS) == kEndedTransfer);
      }
    });
    threads.emplace_back([&] {
      for (int signal = 0; signal < kSignals; ++signal) {
        CHECK(own.take_signal(before, own_number, kTimeoutS) == kEndedTransfer);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::uint32_t> others = numbers;
  others[static_cast<std::size_t>(rank)] = 0;
  CHECK(own.await_puts(own_number, others, kTimeoutS) == kEndedTransfer);
  own.close_window(own_number);
}

void within_a_host(std::uint64_t seed) {
  constexpr RingShape kShape{4096, 4, 1};
  const std::size_t pairs = kRanks * kRanks, data_bytes = (pairs * kShape.data_bytes() + kPage - 1) / kPage * kPage;
  const std::size_t control_bytes = (pairs * kShape.control_bytes() + kPage - 1) / kPage * kPage;
  const int file = memfd_create("rings", 0);
  if (ftruncate(file, static_cast<off_t>(control_bytes + data_bytes)) != 0) std::abort();
  const auto map = [file](std::size_t offset, std::size_t bytes) {
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(offset));
    if (at == MAP_FAILED) std::abort();
    return at;
  };
  // All ranks use one mapping, or ThreadSanitizer sees several memories.
  auto* const control = static_cast<char*>(map(0, control_bytes));
  {
    Windows data(map(control_bytes, kPage), data_bytes, data_bytes);
    const TransferPlaces places{control,          &data,       file, control_bytes, kShape.chunk_bytes,
                                kShape.chunks,    1,
                                /*spin_ns=*/3000, /*yields=*/5};
    std::vector<std::shared_ptr<Transfers>> all;
    for (int rank = 0; rank < kRanks; ++rank) {
      all.push_back(std::make_shared<Rings>(std::make_shared<NoLosses>(), rank, kRanks, places));
    }
    on_all_ranks([&](int rank) { tensors(*all[static_cast<std::size_t>(rank)], rank, seed); });
    for (const auto& each : all) CHECK(each->close());
    for (const auto& each : all) {
      while (each.use_count() > 1) usleep(1000);
    }
  }
  munmap(control, control_bytes);
  close(file);
}

void between_hosts(std::uint64_t seed, int connections, int buffer) {
  std::vector<std::shared_ptr<Streams>> all;
  std::vector<int> descriptors;
  for (int rank = 0; rank < kRanks; ++rank) {
    all.push_back(
        std::make_shared<Streams>(std::make_shared<NoLosses>(), rank, kRanks, kEarlyBytes, 3000, kStripedBytes));
  }
  for (int pair = 0; pair < kRanks * connections; ++pair) {
    const int a = pair % kRanks, b = (pair + 1) % kRanks;
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) std::abort();
    for (const int end : ends) {
      if (buffer != 0) setsockopt(end, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
      descriptors.push_back(end);
    }
    all[static_cast<std::size_t>(a)]->add(b, ends[0], kEarlyBytes);
    all[static_cast<std::size_t>(b)]->add(a, ends[1], kEarlyBytes);
  }
  Meeting meeting;
  std::vector<std::uint32_t> numbers(kRanks);
  on_all_ranks([&](int rank) {
    Streams& own = *all[static_cast<std::size_t>(rank)];
    tensors(own, rank, seed);
    messages(own, rank, seed);
    windows(own, rank, numbers, meeting);
    std::thread beside([&] { exchange(own, rank, seed + 2000, 40); });
    messages(own, rank, seed + 1);
    beside.join();
    CHECK(own.drain(kTimeoutS));
    meeting.wait();
    std::vector<char> data(300'001);
    const std::int64_t number = own.start(call_of((rank + 1) % kRanks, false, 50, data), false);
    CHECK(number > 0);
    if (rank == 0) own.abandon();
    CHECK(own.wait(static_cast<Transfers::Number>(number), kTimeoutS, true) == kFailedTransfer);
  });
  for (const auto& each : all) CHECK(each->close());
  for (const auto& each : all) {
    while (each.use_count() > 1) usleep(1000);
  }
  for (const int each : descriptors) close(each);
}

// A socket that keeps records shows what one system call sent.
void system_calls() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, ends) != 0) std::abort();
  auto own = std::make_shared<Streams>(std::make_shared<NoLosses>(), 0, 2, kEarlyBytes, 0, kStripedBytes);
  own->add(1, ends[0], kEarlyBytes);
  constexpr ssize_t kFrame = 40;
  std::vector<char> found(1 << 20), data = content(1, 8192);
  const auto next = [&] { return read(ends[1], found.data(), found.size()); };
  CHECK(own->put(1, 7, 0, data.data(), data.size(), true, kTimeoutS) == kEndedTransfer);
  CHECK(next() == kFrame + 8192 && next() < 0);
  const Sent sent(content(2, 100), std::vector<std::size_t>(1000, 16), 3);
  CHECK(has_ended(*own, own->start(sent.to(1, 30), false)));
  CHECK(next() == kFrame + 100 + 16'000 && next() < 0);
  CHECK(own->close());
  for (const int end : ends) close(end);
}

}  // namespace

int main(int count, char** arguments) {
  const std::uint64_t seed = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1;
  const std::uint64_t rounds = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 3;
  system_calls();
  for (std::uint64_t round = seed; round < seed + rounds; ++round) {
    within_a_host(round);
    between_hosts(round, round % 3 == 1 ? 3 : 1, round % 2 == 0 ? 4096 : 0);
  }
  std::printf("%ld checks, %ld wrong\n", checks.load(), wrong.load());
  return wrong != 0;
}
