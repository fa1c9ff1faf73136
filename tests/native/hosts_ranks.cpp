// Ranks of several hosts on one machine: a segment per host, and socket pairs.
//
//   hosts_ranks threads|processes SEED ROUNDS
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "call.h"
#include "connections.h"
#include "handle.h"

using namespace parallel_state;

namespace {

bool as_threads = false;
std::atomic<long> checks{0}, wrong{0};

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    ++checks;                                                                             \
    if (!(condition)) {                                                                   \
      ++wrong;                                                                            \
      std::fprintf(stderr, "rank %d, line %d: %s\n", current_rank, __LINE__, #condition); \
    }                                                                                     \
  } while (false)

thread_local int current_rank = -1;

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

struct Team {
  std::vector<int> host_of_rank;
  int connections = 1;
  bool meshed = true, rounded = false;
  double timeout_s = 60;
  int send_buffer = 0;

  int size() const { return static_cast<int>(host_of_rank.size()); }

  void run(const std::function<void(Handle&)>& program) const {
    const int count = size();
    std::vector<int> hosts = host_of_rank;
    std::vector<std::vector<int>> ranks_of(count);
    for (int rank = 0; rank < count; ++rank) ranks_of[hosts[rank]].push_back(rank);
    std::vector<void*> segments(count, nullptr);
    std::vector<int> files(count, -1);
    for (int host = 0; host < count; ++host) {
      if (ranks_of[host].size() < 2) continue;
      const std::size_t bytes = Handle::segment_bytes(static_cast<int>(ranks_of[host].size()));
      files[host] = memfd_create("host", 0);
      if (ftruncate(files[host], static_cast<off_t>(bytes)) != 0) std::abort();
      segments[host] = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, files[host], 0);
    }
    std::vector<std::vector<int>> peers(count), descriptors(count);
    for (int a = 0; a < count; ++a) {
      for (int b = a + 1; b < count; ++b) {
        const bool leads = ranks_of[hosts[a]][0] == a && ranks_of[hosts[b]][0] == b;
        if (hosts[a] == hosts[b] || !(meshed || leads)) continue;
        for (int each = 0; each < connections; ++each) {
          int pair[2];
          if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) std::abort();
          for (int end = 0; end < 2 && send_buffer != 0; ++end) {
            setsockopt(pair[end], SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof send_buffer);
          }
          peers[a].push_back(b);
          descriptors[a].push_back(pair[0]);
          peers[b].push_back(a);
          descriptors[b].push_back(pair[1]);
        }
      }
    }
    const auto body = [&](int rank) {
      current_rank = rank;
      const auto& own = ranks_of[hosts[rank]];
      const auto local = static_cast<int>(own.size());
      const auto place = static_cast<int>(std::find(own.begin(), own.end(), rank) - own.begin());
      WaitPolicy policy;
      policy.spin_ns = 3000;
      policy.yields = 5;
      void* memory = segments[hosts[rank]];
      const std::size_t bytes = Handle::segment_bytes(local);
      auto* const handle = new Handle(memory, bytes, place, local, policy, timeout_s);
      handle->span(rank, hosts,
                   std::make_unique<Connections>(count, peers[rank].data(), descriptors[rank].data(),
                                                 static_cast<int>(peers[rank].size())),
                   meshed, rounded);
      program(*handle);
      if (!as_threads || memory == nullptr) {
        delete handle;
      } else {
        handle->hosts()->connections().close();
      }
    };
    if (as_threads) {
      std::vector<std::thread> threads;
      for (int rank = 0; rank < count; ++rank) threads.emplace_back(body, rank);
      for (std::thread& thread : threads) thread.join();
    } else {
      std::vector<pid_t> children;
      for (int rank = 0; rank < count; ++rank) {
        const pid_t pid = fork();
        if (pid == 0) {
          for (int other = 0; other < count; ++other) {
            for (const int descriptor : descriptors[other]) {
              if (other != rank) close(descriptor);
            }
          }
          checks = wrong = 0;
          body(rank);
          std::_Exit(wrong != 0);
        }
        children.push_back(pid);
      }
      for (int rank = 0; rank < count; ++rank) {
        for (const int descriptor : descriptors[rank]) close(descriptor);
      }
      for (const pid_t pid : children) {
        int status = 0;
        waitpid(pid, &status, 0);
        ++checks;
        wrong += status != 0;
      }
    }
    for (int host = 0; host < count; ++host) {
      if (files[host] >= 0) close(files[host]);
      if (!as_threads && segments[host] != nullptr) {
        munmap(segments[host], Handle::segment_bytes(static_cast<int>(ranks_of[host].size())));
      }
    }
  }
};

template <typename Call>
Status run(Handle& handle, Told told, Call call) {
  return handle.run([&](Group& group, double timeout_s) {
    group.tell(told);
    return call(group, timeout_s);
  });
}

Told told(Method method, std::size_t count, int root = -1) {
  return told_of(method, std::vector<std::size_t>{count}, 6, -1, -1, root);
}

float value(int rank, std::size_t at) { return static_cast<float>((at * 7 + static_cast<std::size_t>(rank) * 5) % 13); }

char byte_of(int rank, std::size_t at) { return static_cast<char>(rank * 31 + static_cast<int>(at % 97)); }

std::vector<char> bytes_of(int rank, std::size_t count) {
  std::vector<char> made(count);
  for (std::size_t at = 0; at < count; ++at) made[at] = byte_of(rank, at);
  return made;
}

bool are_same(const void* found, const std::vector<char>& expected) {
  return expected.empty() || std::memcmp(found, expected.data(), expected.size()) == 0;
}

// Small whole numbers, so every order gives the same.
void reductions(Handle& handle, std::size_t count, std::size_t outer, bool in_place) {
  const int size = handle.size(), rank = handle.rank();
  std::vector<float> in(count), out(count);
  for (std::size_t at = 0; at < count; ++at) in[at] = value(rank, at);
  float* const to = in_place ? in.data() : out.data();
  const auto sum_at = [&](std::size_t at) {
    float sum = 0;
    for (int each = 0; each < size; ++each) sum += value(each, at);
    return sum;
  };
  CHECK(run(handle, told(Method::kAllReduce, count), [&](Group& group, double limit) {
          return group.all_reduce(to, in.data(), count, Dtype::kFloat32, ReduceOp::kSum, limit);
        }) == Status::kDone);
  bool right = true;
  for (std::size_t at = 0; at < count; ++at) right = right && to[at] == sum_at(at);
  CHECK(right);
  std::vector<std::int64_t> whole_in(count), whole_out(count);
  for (std::size_t at = 0; at < count; ++at)
    whole_in[at] = static_cast<std::int64_t>((at + static_cast<std::size_t>(rank)) % 17);
  CHECK(run(handle, told(Method::kAllReduce, count), [&](Group& group, double limit) {
          return group.all_reduce(whole_out.data(), whole_in.data(), count, Dtype::kInt64, ReduceOp::kMax, limit);
        }) == Status::kDone);
  right = true;
  for (std::size_t at = 0; at < count; ++at) {
    std::int64_t most = 0;
    for (int each = 0; each < size; ++each)
      most = std::max<std::int64_t>(most, static_cast<std::int64_t>((at + static_cast<std::size_t>(each)) % 17));
    right = right && whole_out[at] == most;
  }
  CHECK(right);
  // In bfloat16, whole numbers up to 13 times the number of ranks are exact.
  std::vector<std::uint16_t> half(count), half_out(count);
  const auto rounded = [](float number) {
    std::uint32_t bits;
    std::memcpy(&bits, &number, 4);
    return static_cast<std::uint16_t>(bits >> 16);
  };
  for (std::size_t at = 0; at < count; ++at) half[at] = rounded(value(rank, at));
  CHECK(run(handle, told(Method::kAllReduce, count), [&](Group& group, double limit) {
          return group.all_reduce(half_out.data(), half.data(), count, Dtype::kBfloat16, ReduceOp::kSum, limit);
        }) == Status::kDone);
  right = true;
  for (std::size_t at = 0; at < count; ++at) right = right && half_out[at] == rounded(sum_at(at));
  CHECK(right);
  const std::size_t inner = count / outer, ranks = static_cast<std::size_t>(size);
  std::vector<float> blocks(outer * ranks * inner), mine(outer * inner);
  for (std::size_t at = 0; at < blocks.size(); ++at) blocks[at] = value(rank, at);
  CHECK(run(handle, told(Method::kReduceScatter, inner), [&](Group& group, double limit) {
          return group.reduce_scatter(mine.data(), blocks.data(), outer, inner, Dtype::kFloat32, ReduceOp::kSum, limit);
        }) == Status::kDone);
  right = true;
  for (std::size_t row = 0; row < outer; ++row) {
    for (std::size_t column = 0; column < inner; ++column) {
      right = right &&
              mine[row * inner + column] == sum_at((row * ranks + static_cast<std::size_t>(rank)) * inner + column);
    }
  }
  CHECK(right);
}

class Places final : public Taker {
 public:
  enum class How { kTakes, kRefuses, kLeaves };
  explicit Places(How how = How::kTakes, std::uint64_t most = 1 << 20) : how_(how), most_(most) {}
  std::uint64_t most_head_bytes() const override { return most_; }
  bool wants_loans() const override { return false; }
  char* head_buffer(std::uint64_t bytes) override { return head.resize(bytes), head.data(); }
  bool take_head(const Head& found, std::vector<Piece>* pieces) override {
    if (how_ != How::kTakes) return false;
    for (std::vector<char>& place : places) pieces->push_back({place.data(), place.size()});
    return found.bytes == found.head_bytes;
  }
  bool leaves_message() const override { return how_ == How::kLeaves; }

  std::vector<char> head;
  std::vector<std::vector<char>> places;

 private:
  const How how_;
  const std::uint64_t most_;
};

Status send_message(Handle& handle, const std::vector<Piece>& pieces, int heads) {
  return run(handle, told(Method::kBroadcast, 1, handle.rank()),
             [&](Group&, double limit) { return handle.hosts()->send_message(pieces, heads, limit); });
}

Status receive_message(Handle& handle, int root, Taker& taker, HostsGroup::Taken* taken) {
  return run(handle, told(Method::kBroadcast, 1, root),
             [&](Group&, double limit) { return handle.hosts()->receive_message(root, taker, taken, limit); });
}

void message(Handle& handle, int root, std::size_t head_bytes, std::size_t bytes, std::size_t small = 0) {
  const std::vector<char> head = bytes_of(root + 1, head_bytes);
  std::vector<std::vector<char>> tensors{bytes_of(root, bytes), {}, bytes_of(root + 2, bytes / 3)};
  for (std::size_t each = 0; each < small; ++each) tensors.push_back(bytes_of(root + 3, 20'000 + each % 3));
  if (small > 0) tensors.push_back(tensors.front());
  std::uint64_t tensor_bytes = 0;
  for (const auto& each : tensors) tensor_bytes += each.size();
  if (handle.rank() == root) {
    const auto piece = [](const char* at, std::size_t size) { return Piece{const_cast<char*>(at), size}; };
    std::vector<Piece> pieces{piece(head.data(), head_bytes / 2),
                              piece(head.data() + head_bytes / 2, head_bytes - head_bytes / 2)};
    for (const auto& each : tensors) pieces.push_back(piece(each.data(), each.size()));
    CHECK(send_message(handle, pieces, 2) == Status::kDone);
    return;
  }
  HostsGroup::Taken taken;
  Places leaving{Places::How::kLeaves}, places;
  if (head_bytes % 2 == 0) {
    CHECK(receive_message(handle, root, leaving, &taken) == Status::kDone && taken.is_refused);
    CHECK(leaving.head == head);
  }
  for (const auto& each : tensors) places.places.emplace_back(each.size());
  CHECK(receive_message(handle, root, places, &taken) == Status::kDone && !taken.is_refused);
  CHECK(places.head == head && places.places == tensors);
  CHECK(taken.head_bytes == head_bytes && taken.tensor_bytes == tensor_bytes);
}

void movements(Handle& handle, std::size_t bytes, std::size_t outer, bool meshed, Draw& draw) {
  const int size = handle.size(), rank = handle.rank();
  const auto ranks = static_cast<std::size_t>(size);
  const std::size_t inner = bytes / outer;
  bytes = inner * outer;
  const std::vector<char> in = bytes_of(rank, bytes);
  std::vector<char> out(bytes * ranks);
  CHECK(run(handle, told(Method::kAllGather, bytes), [&](Group& group, double limit) {
          return group.all_gather(out.data(), in.data(), outer, inner, limit);
        }) == Status::kDone);
  bool right = true;
  for (std::size_t at = 0; at < out.size(); ++at) {
    const std::size_t row = at / (inner * ranks), from = at / inner % ranks, column = at % inner;
    right = right && out[at] == byte_of(static_cast<int>(from), row * inner + column);
  }
  CHECK(right);
  const int root = static_cast<int>(draw(ranks));
  std::vector<char> data = rank == root ? bytes_of(root, bytes) : std::vector<char>(bytes);
  CHECK(run(handle, told(Method::kBroadcast, bytes, root), [&](Group& group, double limit) {
          return group.broadcast(data.data(), bytes, root, limit);
        }) == Status::kDone);
  CHECK(data == bytes_of(root, bytes));
  for (const std::size_t tensor_bytes : {bytes, bytes * 3, std::size_t{90'000}}) {
    message(handle, root, 1 + draw(tensor_bytes > 80'000 ? 90'000 : 5000), tensor_bytes);
  }
  message(handle, root, 100, bytes, draw(3) == 0 ? 500 : 7);
  CHECK(run(handle, told(Method::kBarrier, 0), [](Group& group, double limit) { return group.barrier(limit); }) ==
        Status::kDone);
  if (!meshed) {  // refused before sending; the group stays usable
    const Status status = run(handle, told(Method::kScatter, bytes, root), [&](Group& group, double limit) {
      return group.scatter(data.data(), nullptr, bytes, root, limit);
    });
    CHECK(status == Status::kUnsupported);
    return;
  }
  std::vector<std::size_t> parts;
  std::vector<std::vector<char>> found;
  std::vector<void*> outs;
  for (int each = 0; each < size; ++each) {
    parts.push_back(each % 3 == 1 ? 0 : bytes / static_cast<std::size_t>(each + 1));
    found.emplace_back(parts.back() + 1);
    outs.push_back(found.back().data());
  }
  for (const int dst : {-1, root}) {
    for (auto& each : found) std::fill(each.begin(), each.end(), 0);
    const bool wants = dst < 0 || dst == rank;
    std::vector<void*> given(ranks, nullptr);
    CHECK(run(handle, told(dst < 0 ? Method::kAllGatherv : Method::kGather, 1, dst), [&](Group& group, double limit) {
            return group.gatherv(wants ? outs.data() : given.data(), parts.data(), in.data(), dst, limit);
          }) == Status::kDone);
    right = true;
    for (int each = 0; each < size && wants; ++each) {
      if (each == rank) continue;
      const std::vector<char> expected = bytes_of(each, parts[static_cast<std::size_t>(each)]);
      right = right && are_same(found[static_cast<std::size_t>(each)].data(), expected);
    }
    CHECK(right);
  }
  std::vector<char> blocks;
  for (int to = 0; to < size; ++to) {
    const std::vector<char> block = bytes_of(root + 3 * to, bytes);
    blocks.insert(blocks.end(), block.begin(), block.end());
  }
  std::fill(data.begin(), data.end(), 0);
  CHECK(run(handle, told(Method::kScatter, bytes, root), [&](Group& group, double limit) {
          return group.scatter(data.data(), rank == root ? blocks.data() : nullptr, bytes, root, limit);
        }) == Status::kDone);
  CHECK(data == bytes_of(root + 3 * rank, bytes));
  for (int kind = 0; kind < 3; ++kind) {
    const auto sent = [&](int from, int to) -> std::size_t {
      if (kind == 1) return bytes / (1 + static_cast<std::size_t>(from + 2 * to) % 4);
      const bool differs = kind == 2 && from == 0 && to == size - 1;
      return differs ? bytes / ranks / 2 : bytes / ranks;
    };
    std::vector<std::size_t> gives, takes;
    std::vector<char> rows, received;
    for (int each = 0; each < size; ++each) {
      gives.push_back(sent(rank, each));
      takes.push_back(sent(each, rank));
      const std::vector<char> block = bytes_of(rank * 7 + each, gives.back());
      rows.insert(rows.end(), block.begin(), block.end());
    }
    received.resize(std::accumulate(takes.begin(), takes.end(), std::size_t{0}) + 1);
    CHECK(run(handle, told(Method::kAllToAll, 1), [&](Group& group, double limit) {
            return group.all_to_all(received.data(), rows.data(), takes.data(), gives.data(), limit);
          }) == Status::kDone);
    right = true;
    const char* at = received.data();
    for (int each = 0; each < size; ++each) {
      const std::vector<char> expected = bytes_of(each * 7 + rank, takes[static_cast<std::size_t>(each)]);
      right = right && are_same(at, expected);
      at += expected.size();
    }
    CHECK(right);
  }
}

std::vector<int> draw_hosts(Draw& draw, int most) {
  const int size = 2 + static_cast<int>(draw(static_cast<std::uint64_t>(most - 1)));
  const int hosts = 2 + static_cast<int>(draw(3));
  std::vector<int> of_rank;
  for (int rank = 0; rank < size; ++rank) {
    of_rank.push_back(draw(2) == 0 ? rank * hosts / size
                                   : static_cast<int>(draw(static_cast<std::uint64_t>(std::min(hosts, size)))));
  }
  if (std::all_of(of_rank.begin(), of_rank.end(), [&](int host) { return host == of_rank[0]; })) of_rank.back() ^= 1;
  return of_rank;
}

void programs(std::uint64_t seed) {
  Draw draw(seed);
  Team team;
  const std::vector<std::vector<int>> shapes = {{0, 1},    {0, 0, 1, 1}, {0, 1, 0, 1},
                                                {0, 0, 1}, {0, 1, 2},    {1, 0, 0, 1, 2, 2}};
  team.host_of_rank = draw(2) == 0 ? shapes[draw(shapes.size())] : draw_hosts(draw, 6);
  team.connections = draw(3) == 0 ? 3 : 1;
  team.rounded = draw(4) == 0;
  team.meshed = draw(4) != 0;
  team.send_buffer = draw(3) == 0 ? 4096 : 0;
  const std::uint64_t inner_seed = draw(1 << 30);
  team.run([&](Handle& handle) {
    Draw same(inner_seed);
    for (int round = 0; round < 3; ++round) {
      static constexpr std::size_t kCounts[] = {0, 1, 5, 64, 1000, 2048, 20'000, 70'001, 300'000, 700'003};
      const std::size_t most = as_threads ? 8 : 10;
      const std::size_t outer = 1 + same(3), count = kCounts[same(most)] / outer * outer;
      reductions(handle, count, outer, same(2) == 0);
      movements(handle, kCounts[same(most)] * (same(3) == 0 ? 4 : 1), outer, team.meshed, same);
    }
  });
}

// All cuts of two messages and a failure into three parts, and single bytes.
void parser() {
  CallRecord own;
  own.history = 77;
  own.sequence = 5;
  std::string stream;
  const auto add = [&](CallRecord head, const std::string& body) {
    head.bytes = body.size();
    stream.append(reinterpret_cast<const char*>(&head), sizeof head).append(body);
  };
  add(own, "first");
  add(own, "");
  add(own, "any size");
  FailureNote note;
  note.status = 3;
  note.suspect = 9;
  CallRecord failure;
  failure.kind = CallRecord::kFailure;
  add(failure, std::string(reinterpret_cast<const char*>(&note), sizeof note));
  const std::size_t tail = stream.size() - 200;
  const auto feed = [&](const std::vector<std::size_t>& cuts, bool posts_late) {
    auto inbox = std::make_unique<Inbox>();
    char first[6] = {}, any[9] = {};
    inbox->begin(&own);
    const auto expect_rest = [&] {
      inbox->expect(nullptr, 0);
      inbox->expect_any();
    };
    inbox->expect(first, 5);
    if (!posts_late) expect_rest();
    bool is_late = posts_late;
    std::size_t at = 0;
    bool right = true;
    for (const std::size_t end : cuts) {
      while (at < end) {
        iovec pieces[2];
        const int count = inbox->room(pieces);
        if (count == 0) {
          if (is_late && inbox->done() == 1) {
            is_late = false;
            expect_rest();
            continue;
          }
          if (inbox->state() == Inbox::State::kChosen) {
            right = right && inbox->head().bytes == 8;
            inbox->take(any);
            inbox->listen();
            continue;
          }
          right = false;
          break;
        }
        std::size_t given = 0;
        for (int piece = 0; piece < count; ++piece) {
          const std::size_t size = std::min(pieces[piece].iov_len, end - at);
          std::memcpy(pieces[piece].iov_base, stream.data() + at, size);
          at += size;
          given += size;
        }
        inbox->came(given);
      }
    }
    if (is_late && inbox->done() == 1) expect_rest();
    if (inbox->state() == Inbox::State::kChosen) {
      inbox->take(any);
      inbox->listen();
      iovec pieces[2];
      inbox->room(pieces);
      inbox->came(0);
    }
    CHECK(right && inbox->done() == 3 && inbox->state() == Inbox::State::kFailed);
    CHECK(std::string(first) == "first" && std::string(any) == "any size" && inbox->failure().suspect == 9);
  };
  for (std::size_t first = 0; first <= stream.size(); first += first < tail ? 1 : 7) {
    for (std::size_t second = first; second <= stream.size(); second += second < tail / 2 ? 1 : 13) {
      feed({first, second, stream.size()}, (first + second) % 2 == 0);
    }
  }
  std::vector<std::size_t> single(stream.size());
  std::iota(single.begin(), single.end(), 1);
  feed(single, false);
  feed(single, true);
}

void mismatches() {
  for (const auto& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}, {0, 1, 2}}) {
    Team team;
    team.host_of_rank = hosts;
    team.run([&](Handle& handle) {
      float one = 1;
      const int odd = handle.size() - 1;
      const std::size_t count = handle.rank() == odd ? 2 : 1;
      float in[2] = {one, one}, out[2];
      const Status status = run(handle, told(Method::kAllReduce, count), [&](Group& group, double limit) {
        return group.all_reduce(out, in, count, Dtype::kFloat32, ReduceOp::kSum, limit);
      });
      CHECK(status == Status::kMismatch);
      const Failure failure = handle.failure();
      CHECK(failure.expected.told.word != 0 && failure.found.told.word != failure.expected.told.word);
      CHECK(failure.elapsed_s < 5);
    });
  }
  for (const auto& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}}) {  // splits that don't fit
    Team team;
    team.host_of_rank = hosts;
    team.run([&](Handle& handle) {
      const auto size = static_cast<std::size_t>(handle.size());
      std::vector<std::size_t> gives(size, 4), takes(size, 4);
      if (handle.rank() == 0) gives[size - 1] = 8;
      std::vector<char> in(100), out(100);
      const Status status = run(handle, told(Method::kAllToAll, 1), [&](Group& group, double limit) {
        return group.all_to_all(out.data(), in.data(), takes.data(), gives.data(), limit);
      });
      CHECK(status == Status::kMismatch);
      const Failure failure = handle.failure();
      if (failure.reporter < 0) {
        CHECK(failure.misfit.from == 0 && failure.misfit.to == handle.size() - 1 && failure.misfit.sent_bytes == 8);
      }
    });
  }
  // One rank has the wrong root of a broadcast: the next call detects it.
  Team team;
  team.host_of_rank = {0, 1};
  team.run([&](Handle& handle) {
    char data[8] = {};
    const int root = handle.rank();
    const Status first = run(handle, told(Method::kBroadcast, 8, root),
                             [&](Group& group, double limit) { return group.broadcast(data, 8, root, limit); });
    CHECK(first == Status::kDone);
    const Status second =
        run(handle, told(Method::kBarrier, 0), [](Group& group, double limit) { return group.barrier(limit); });
    CHECK(second == Status::kMismatch);
    const Failure failure = handle.failure();
    CHECK((failure.expected.told.word & 255) == static_cast<std::uint64_t>(Method::kBroadcast) &&
          failure.expected.told.word != failure.found.told.word);
  });
}

void absences() {
  for (const bool leaves : {false, true}) {
    Team team;
    team.host_of_rank = {0, 0, 1, 1};
    team.timeout_s = 0.5;
    team.run([&](Handle& handle) {
      if (handle.rank() == 3) {
        if (!leaves) usleep(1'500'000);
        return;
      }
      float in = 1, out = 0;
      const Status status = run(handle, told(Method::kAllReduce, 1), [&](Group& group, double limit) {
        return group.all_reduce(&out, &in, 1, Dtype::kFloat32, ReduceOp::kSum, limit);
      });
      CHECK(status != Status::kDone && status != Status::kMismatch);
      const Failure failure = handle.failure();
      CHECK(failure.elapsed_s < 5);
    });
  }
  // A rank that exceeds another's deadline also fails, although it has all data. A rank that gave up between calls, or
  // left, is reported as such.
  for (const int kind : {0, 1, 2}) {
    Team team;
    team.host_of_rank = {0, 1};
    team.timeout_s = kind == 0 ? 0.3 : 60;
    team.run([&](Handle& handle) {
      if (handle.rank() == 1 && kind == 0) usleep(800'000);
      if (handle.rank() == 0 && kind == 1) handle.fail(static_cast<int>(Status::kTimedOut), 1);
      if (handle.rank() == 0 && kind == 2) handle.leave_group();
      if (handle.rank() == 0 && kind != 0) return;
      const Status status =
          run(handle, told(Method::kBarrier, 0), [](Group& group, double limit) { return group.barrier(limit); });
      CHECK(status == (kind == 2 ? Status::kPeerDied : Status::kTimedOut));
      CHECK(handle.failure().reporter == (handle.rank() == 0 || kind == 2 ? -1 : 0));
      if (kind == 2) CHECK(handle.has_left(0));
    });
  }
  // A rank that waits for its lead also gets that a rank of another host left. Rank 2 gets it at home.
  {
    Team team;
    team.host_of_rank = {0, 0, 1, 1};
    team.run([](Handle& handle) {
      if (handle.rank() == 3) return handle.leave_group();
      float in = 1, out = 0;
      const Status status = run(handle, told(Method::kAllReduce, 1), [&](Group& group, double limit) {
        return group.all_reduce(&out, &in, 1, Dtype::kFloat32, ReduceOp::kSum, limit);
      });
      CHECK(status == Status::kPeerDied && handle.failure().suspect == 3 && handle.failure().reporter < 0);
      CHECK(handle.has_left(3) && handle.failure().elapsed_s < 5);
      usleep(1'500'000);  // leaving would end the others' waits, too
    });
  }
  // A failure note reaches all ranks of other hosts.
  Team team;
  team.host_of_rank = {0, 1};
  team.run([&](Handle& handle) {
    std::vector<char> head(70'000);
    HostsGroup::Taken taken;
    Places places{Places::How::kTakes, 10};
    if (handle.rank() == 0) CHECK(send_message(handle, {{head.data(), head.size()}}, 1) == Status::kDone);
    if (handle.rank() == 1) CHECK(receive_message(handle, 0, places, &taken) == Status::kTooLarge);
    const Status next =
        run(handle, told(Method::kBarrier, 0), [](Group& group, double limit) { return group.barrier(limit); });
    CHECK(next == Status::kTooLarge);
    const Failure failure = handle.failure();
    CHECK(failure.misfit.from == 0 && failure.misfit.to == 1 && failure.misfit.sent_bytes == 70'016);
    CHECK(failure.reporter == (handle.rank() == 0 ? 1 : -1));
  });
  // So does that of a refused message whose tensors hadn't arrived.
  team.host_of_rank = {0, 0, 1, 1};
  team.run([&](Handle& handle) {
    for (const std::size_t bytes : {std::size_t{100}, std::size_t{200'000}}) {
      const bool is_small = bytes == 100;
      std::vector<char> head(64), tensor(bytes);
      HostsGroup::Taken taken;
      Places places{handle.rank() == 2 ? Places::How::kRefuses : Places::How::kTakes};
      places.places.push_back(tensor);
      const Status status = handle.rank() == 0 ? send_message(handle, {{head.data(), 64}, {tensor.data(), bytes}}, 1)
                                               : receive_message(handle, 0, places, &taken);
      if (handle.rank() == 2) CHECK(taken.is_refused && status == (is_small ? Status::kDone : Status::kFailed));
      if (handle.rank() == 3) CHECK(status == (is_small ? Status::kDone : Status::kFailed));
    }
    const Status next =
        run(handle, told(Method::kBarrier, 0), [](Group& group, double limit) { return group.barrier(limit); });
    CHECK(next == Status::kFailed);
  });
}

// Rank 0 of two hosts. The other rank sends `forge` of the head of rank 0's call.
Status against(const std::function<std::string(CallRecord)>& forge, bool blocks, std::vector<char>* received) {
  CallRecord own;
  Status status = Status::kDone;
  for (const bool is_forged : {false, true}) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) std::abort();
    const int size = 4 << 20, peer = 1;
    setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    Handle handle(nullptr, 0, 0, 1, WaitPolicy{}, is_forged ? 5.0 : 0.01);
    handle.span(0, {0, 1}, std::make_unique<Connections>(2, &peer, &pair[0], 1), true, false);
    if (is_forged) {
      const std::string bytes = forge(own);
      CHECK(write(pair[1], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
      shutdown(pair[1], SHUT_WR);
    }
    const std::vector<char> in(16, 'a');
    received->assign(16, 0);
    const std::size_t each[2] = {8, 8};
    status = run(handle, told(blocks ? Method::kAllToAll : Method::kAllGather, 1), [&](Group& group, double limit) {
      return blocks ? group.all_to_all(received->data(), in.data(), each, each, limit)
                    : group.all_gather(received->data(), in.data(), 1, 8, limit);
    });
    if (!is_forged) CHECK(read(pair[1], &own, sizeof own) == sizeof own);
    close(pair[1]);
  }
  return status;
}

std::string as_bytes(const CallRecord& head, const std::string& body) {
  return std::string(reinterpret_cast<const char*>(&head), sizeof head) + body;
}

void hostile() {
  std::vector<char> out;
  for (const bool blocks : {false, true}) {
    const auto honest = [](const CallRecord& own) { return as_bytes(own, "12345678"); };
    CHECK(against(honest, blocks, &out) == Status::kDone && std::string(&out[8], 8) == "12345678");
    const auto foreign = [](CallRecord own) {
      own.magic ^= 1;
      return as_bytes(own, "12345678");
    };
    CHECK(against(foreign, blocks, &out) == Status::kBroken);
    const auto longer = [](CallRecord own) {
      own.bytes = 1 << 20;
      return as_bytes(own, std::string(1 << 20, 'x'));
    };
    CHECK(against(longer, blocks, &out) == (blocks ? Status::kBroken : Status::kMismatch));
    const auto leaves = [](CallRecord own) {
      own.kind = CallRecord::kLeave;
      own.bytes = 0;
      return as_bytes(own, "");
    };
    CHECK(against(leaves, blocks, &out) == Status::kPeerDied);
    for (int kind = 0; kind < 10; ++kind) {
      const auto fails = [kind](CallRecord own) {
        FailureNote note;
        note.status = kind == 0 ? 0 : kind == 1 ? 6 : kind == 2 ? 8 : kind == 3 ? 99 : 3;
        if (kind == 4) note.suspect = 77;
        if (kind == 5) note.reporter = -9;
        if (kind == 6) note.misfit.from = 2;
        if (kind == 7) note.suspect = kOutside;
        if (kind == 8) note.expected.count = kMaxRanks + 1;
        own.kind = CallRecord::kFailure;
        own.bytes = sizeof note - (kind == 9 ? 1 : 0);
        return as_bytes(own, std::string(reinterpret_cast<const char*>(&note), own.bytes));
      };
      CHECK(against(fails, blocks, &out) == Status::kBroken);
    }
    Draw draw(blocks ? 11 : 12);
    for (int round = 0; round < 300; ++round) {
      const auto garbled = [&](CallRecord own) {
        std::string bytes = as_bytes(own, "12345678");
        for (std::uint64_t flips = 1 + draw(3); flips > 0; --flips) {
          bytes[draw(sizeof own)] = static_cast<char>(draw(256));
        }
        return bytes;
      };
      const Status status = against(garbled, blocks, &out);
      CHECK(status == Status::kDone || status == Status::kMismatch || status == Status::kBroken ||
            status == Status::kPeerDied);
    }
  }
}

// A call that has all data of a rank succeeds although the rank left.
void leaves_early() {
  const int peers[2] = {1, 2}, buffer = 4096;
  int ends[2][2], own_ends[2];
  for (int each = 0; each < 2; ++each) {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends[each]) != 0) std::abort();
    setsockopt(ends[each][0], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
    own_ends[each] = ends[each][0];
  }
  Connections connections(3, peers, own_ends, 2);
  CallRecord own;
  own.history = 5;
  connections.begin(&own);
  const std::string large(100'000, 'x');
  char received[2][8];
  connections[1].send(own, large.data(), large.size());
  for (const int rank : peers) connections[rank].in.expect(received[rank - 1], 8);
  while (connections[1].is_sending()) {
    char drain[8192];
    connections.move();
    while (read(ends[0][1], drain, sizeof drain) > 0) continue;
  }
  CallRecord head = own, leaves = own;
  head.bytes = 8;
  leaves.kind = CallRecord::kLeave;
  const std::string bytes = as_bytes(head, "12345678") + as_bytes(leaves, "");
  CHECK(write(ends[0][1], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  while (connections.move()) continue;
  CHECK(connections[1].in.is_idle() && connections.trouble() == nullptr && connections.late() == 2);
  for (const auto& each : ends) close(each[1]);
}

void two_roots() {
  Team team;
  team.host_of_rank = {0, 1};
  team.send_buffer = 4096;
  team.timeout_s = 10;
  team.run([&](Handle& handle) {
    std::vector<char> data(8 << 20);
    const int root = handle.rank();
    CHECK(run(handle, told(Method::kBroadcast, 8 << 20, root), [&](Group& group, double limit) {
            return group.broadcast(data.data(), data.size(), root, limit);
          }) == Status::kMismatch);
    CHECK(handle.failure().elapsed_s < 5);
  });
}

// With one rank a host and 8 KiB: one send and receive per other rank and call.
void system_calls() {
  Team team;
  team.host_of_rank = {0, 1, 2};
  team.run([&](Handle& handle) {
    std::vector<float> data(2048, 1.0f);
    constexpr std::uint64_t kCalls = 200;
    for (std::uint64_t call = 0; call < kCalls; ++call) {
      CHECK(run(handle, told(Method::kAllReduce, data.size()), [&](Group& group, double limit) {
              return group.all_reduce(data.data(), data.data(), data.size(), Dtype::kFloat32, ReduceOp::kMax, limit);
            }) == Status::kDone);
    }
    for (const auto& link : handle.hosts()->connections().links()) {
      CHECK(link->sends == kCalls);
      CHECK(link->receives <= 3 * kCalls);
    }
  });
  team.run([&](Handle& handle) {
    std::vector<std::vector<char>> tensors(1000, bytes_of(1, 80));
    std::vector<char> head(100);
    if (handle.rank() == 0) {
      std::vector<Piece> pieces{{head.data(), head.size()}};
      for (auto& tensor : tensors) pieces.push_back({tensor.data(), tensor.size()});
      CHECK(send_message(handle, pieces, 1) == Status::kDone);
      for (const auto& link : handle.hosts()->connections().links()) CHECK(link->sends <= 2);
      return;
    }
    HostsGroup::Taken taken;
    Places places;
    places.places.assign(tensors.size(), std::vector<char>(80));
    CHECK(receive_message(handle, 0, places, &taken) == Status::kDone && places.places == tensors);
  });
}

}  // namespace

int main(int count, char** arguments) {
  as_threads = count > 1 && std::string(arguments[1]) == "threads";
  const std::uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  const std::uint64_t rounds = count > 3 ? std::strtoull(arguments[3], nullptr, 10) : 20;
  parser();
  for (std::uint64_t round = 0; round < rounds; ++round) {
    const long before = wrong.load();
    programs(seed + round);
    if (wrong.load() != before) std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed + round));
  }
  mismatches();
  absences();
  hostile();
  leaves_early();
  two_roots();
  system_calls();
  std::printf("%ld checks, %ld wrong\n", checks.load(), wrong.load());
  return wrong != 0;
}
