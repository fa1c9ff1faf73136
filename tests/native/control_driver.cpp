#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"

using namespace parallel_state::control;

extern "C" {
std::int64_t ps_store_client(const char* addresses, int port, const char* token);
std::int64_t ps_store_ask(std::int64_t client, const char* content, std::uint64_t size, double timeout_s,
                          double connect_s);
int ps_store_wait(std::int64_t handle, double slice_s);
std::uint64_t ps_store_take(std::int64_t handle, char* buffer, std::uint64_t capacity);
void ps_store_end(std::int64_t handle);
}

std::atomic<bool> memory_is_out{false};

void* operator new(std::size_t size) {
  if (memory_is_out.load(std::memory_order_relaxed)) {
    char name[16] = {};
    prctl(PR_GET_NAME, name);
    if (std::strcmp(name, "ps-control") == 0) throw std::bad_alloc();
  }
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

struct Opened {
  std::int64_t handle = 0;
  std::shared_ptr<Stay> stay;
};

Opened open_one() {
  Opened one;
  one.handle = open_stay("127.0.0.1", 0, 0, "", Config{}, &one.stay);
  check(one.handle > 0, "a stay can't be opened");
  return one;
}

bool is_over(const Opened& one) {
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  return one.stay->over;
}

std::vector<std::string> news_until(const Opened& one, Inbox::Kind kind) {
  std::vector<std::string> news;
  std::vector<char> buffer(1 << 20);
  const Nanos until = monotonic_now() + 10 * kSecond;
  while (monotonic_now() < until) {
    const std::size_t size = one.stay->inbox.take(buffer.data(), buffer.size());
    if (size == 0) {
      pollfd ready{one.stay->inbox.number(), POLLIN, 0};
      poll(&ready, 1, 100);
    } else {
      news.emplace_back(buffer.data(), size);
      if (buffer[0] == static_cast<char>(kind)) return news;
    }
  }
  check(false, "news that was due is missing after 10 s");
  return {};
}

std::string await(const Opened& one, Inbox::Kind kind) { return news_until(one, kind).back(); }

long count_warnings(const std::vector<std::string>& news) {
  return std::count_if(news.begin(), news.end(),
                       [](const auto& each) { return each[0] == Inbox::kLog && each[1] == 1; });
}

void meet(const std::vector<Opened>& all) {
  std::vector<Member> members;
  std::vector<int> boards;
  for (const Opened& one : all) {
    const std::uint64_t domain = std::min(members.size(), all.size() - 2);
    members.push_back({static_cast<int>(members.size()),
                       one.stay->proc,
                       domain + 1,
                       {"127.0.0.1", static_cast<std::uint16_t>(one.stay->port), one.stay->token},
                       getpid(),
                       0});
    boards.push_back(one.stay->board.number());
  }
  for (const Opened& one : all) {
    Event event;
    event.kind = Event::kMeet;
    event.roster = std::make_shared<const Roster>(members);
    check(post(one.stay, std::move(event), boards), "a stay can't meet");
  }
}

void call(const std::vector<Opened>& all, std::uint32_t attempt) {
  std::vector<Proc> members;
  for (const Opened& one : all) members.push_back(one.stay->proc);
  for (const Opened& one : all) {
    auto call = std::make_shared<Call>();
    call->purpose = "test";
    call->attempt = attempt;
    call->members = members;
    call->value = Bytes(100, 'x');
    call->deadline = monotonic_now() + 10 * kSecond;
    Event event;
    event.kind = Event::kCall;
    event.call = std::move(call);
    check(one.stay->inbox.expect({digest_of(members), "test", attempt}), "a call is under way already");
    check(post(one.stay, std::move(event)), "a stay takes no call");
  }
}

void await_verdicts(const std::vector<Opened>& all, std::uint32_t attempt) {
  std::vector<Proc> members;
  for (const Opened& one : all) members.push_back(one.stay->proc);
  const AgreementKey key{digest_of(members), "test", attempt};
  std::vector<char> buffer(1 << 16);
  for (const Opened& one : all) {
    const std::int64_t size = one.stay->inbox.await(key, 10 * kSecond, buffer.data(), buffer.size());
    check(size > 0 && size < static_cast<std::int64_t>(buffer.size()), "a verdict that was due is missing after 10 s");
    one.stay->inbox.forget(key);
  }
}

#ifdef __SANITIZE_ADDRESS__
constexpr bool kForks = false;  // in a child, its allocator's locks can stay locked
#else
constexpr bool kForks = true;
#endif

int run_child(std::int64_t handle) {
  if (find_stay(handle) != nullptr) return 1;
  const Opened own = open_one();
  leave_stay(own.stay, monotonic_now() + kSecond);
  close_stay(own.handle);
  return is_over(own) ? 0 : 2;
}

void run_worlds(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    std::vector<Opened> all;
    for (int i = 0; i < 4; ++i) all.push_back(open_one());
    meet(all);
    for (std::uint32_t attempt = 0; attempt < 5; ++attempt) {
      call(all, attempt);
      const pid_t child = attempt == 2 && kForks ? fork() : -1;
      if (child == 0) _exit(run_child(all[0].handle));
      await_verdicts(all, attempt);
      int status = 0;
      if (child > 0) check(waitpid(child, &status, 0) == child && status == 0, "a forked child failed");
    }
    std::vector<std::thread> leavers;
    for (const Opened& one : all) {
      leavers.emplace_back([&one] { leave_stay(one.stay, monotonic_now() + 5 * kSecond); });
    }
    for (std::thread& leaver : leavers) leaver.join();
    for (const Opened& one : all) {
      await(one, Inbox::kOver);
      close_stay(one.handle);
    }
  }
}

void run_throws() {
  std::vector<Opened> all;
  for (int i = 0; i < 3; ++i) all.push_back(open_one());
  meet(all);
  call(all, 0);
  await_verdicts(all, 0);
  memory_is_out = true;
  post(all[0].stay, Event{});
  const Nanos until = monotonic_now() + 5 * kSecond;
  for (const Opened& one : all) {
    while (!is_over(one) && monotonic_now() < until) usleep(1000);
    check(is_over(one), "a stay goes on without memory");
    check(!post(one.stay, Event{}), "a stay that is over takes events");
  }
  memory_is_out = false;
  for (const Opened& one : all) {
    check(await(one, Inbox::kOver)[1] == 1, "a stay that broke down is told as left");
    close_stay(one.handle);
  }
  run_worlds(1);
}

pid_t start_process() {
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  while (true) pause();
}

void meet_process(const Opened& one, pid_t pid, std::uint64_t began) {
  Event event;
  event.kind = Event::kMeet;
  event.roster = std::make_shared<const Roster>(std::vector<Member>{
      {0, one.stay->proc, 1, {"127.0.0.1", static_cast<std::uint16_t>(one.stay->port), one.stay->token}, getpid(), 0},
      {1, 12344, 1, {"127.0.0.1", 1, "token"}, pid, began}});
  check(post(one.stay, std::move(event), {one.stay->board.number(), 0}), "a stay can't meet");
}

void leave(const Opened& one) {
  leave_stay(one.stay, monotonic_now() + kSecond);
  close_stay(one.handle);
}

int next_descriptor() {
  const int number = dup(0);
  close(number);
  return number;
}

void run_neighbours() {
  const pid_t unwatched = start_process(), reused = start_process();
  Opened one = open_one();
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit none{static_cast<rlim_t>(next_descriptor()), limit.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  meet_process(one, unwatched, 0);
  check(count_warnings(news_until(one, Inbox::kLog)) == 1, "a process that isn't watched is no warning");
  usleep(1'500'000);
  setrlimit(RLIMIT_NOFILE, &limit);
  kill(unwatched, SIGKILL);
  waitpid(unwatched, nullptr, 0);
  check(count_warnings(news_until(one, Inbox::kDied)) == 0, "a process is warned of twice");
  leave(one);

  one = open_one();
  meet_process(one, reused, 1);
  await(one, Inbox::kDied);
  kill(reused, SIGKILL);
  usleep(1'500'000);
  const clock_t before = clock();
  usleep(500'000);
  check(clock() - before < CLOCKS_PER_SEC / 5, "the thread spins on a process that exited");
  waitpid(reused, nullptr, 0);
  leave(one);
}

// The listening stay closes first, so its port is in TIME_WAIT.
void run_ports() {
  const Opened first = open_one();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(first.stay->port));
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  check(connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0, "can't connect to a stay");
  char bytes[4096];
  check(read(socket, bytes, sizeof(bytes)) > 0, "a stay doesn't greet");
  std::thread reader([&] {
    while (read(socket, bytes, sizeof(bytes)) > 0) continue;
    close(socket);
  });
  const int port = first.stay->port;
  leave(first);
  reader.join();
  std::shared_ptr<Stay> again;
  const std::int64_t handle = open_stay("127.0.0.1", port, port, "", Config{}, &again);
  check(handle > 0, "the port of a stay that was left can't be used again");
  std::shared_ptr<Stay> other;
  check(open_stay("127.0.0.1", port, port, "", Config{}, &other) == -EADDRINUSE, "two stays listen at one port");
  leave({handle, again});
}

// Leaves the request open if `held` is given.
Bytes asked(std::int64_t client, StoreCall call, const std::vector<Bytes>& parts, int* code,
            std::int64_t* held = nullptr) {
  const Bytes content = encode_store(static_cast<std::uint8_t>(call), parts);
  const std::int64_t request = ps_store_ask(client, content.data(), content.size(), 20, 2);
  check(request > 0, "a request isn't taken");
  while ((*code = -ps_store_wait(request, 0.02)) == EAGAIN) continue;
  Bytes reply(ps_store_take(request, nullptr, 0), '\0');
  ps_store_take(request, reply.data(), reply.size());
  if (held != nullptr) *held = request;
  else ps_store_end(request);
  return *code == 0 ? reply : Bytes();
}

void run_guests() {
  const Opened one = open_one();
  const Bytes done = encode_store(0, {});
  int code = 0;
  asked(ps_store_client("127.0.0.1", one.stay->port, "another"), StoreCall::kCount, {}, &code);
  check(code == EKEYREJECTED, "a guest believes a listener that holds another token");
  const std::int64_t client = ps_store_client("127.0.0.1", one.stay->port, one.stay->token.c_str());
  std::int64_t holder = 0;
  check(asked(client, StoreCall::kHold, {"held", "1"}, &code, &holder) == done, "a key can't be held");
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      const Bytes key = std::to_string(thread), next = std::to_string((thread + 1) % 4), large(3 << 20, 'x');
      int mine = 0;
      for (int i = 0; i < 50; ++i) asked(client, StoreCall::kAdd, {"sum", "1"}, &mine);
      check(asked(client, StoreCall::kSet, {key, large}, &mine) == done, "a value can't be set");
      check(asked(client, StoreCall::kGet, {next}, &mine) == encode_store(0, {large}), "a wrong value");
      check(asked(client, StoreCall::kSet, {"ready" + key, ""}, &mine) == done, "a value can't be set");
      asked(client, StoreCall::kGet, {"never"}, &mine);
      check(mine == ECONNRESET || mine == ECONNREFUSED, "a guest doesn't notice that the stay is left");
    });
  }
  ps_store_end(holder);
  check(asked(client, StoreCall::kWait, {"gone/held", "ready0", "ready1", "ready2", "ready3"}, &code) == done,
        "a held key stays");
  check(asked(client, StoreCall::kGet, {"sum"}, &code) == encode_store(0, {"200"}), "a wrong sum");
  leave(one);
  for (std::thread& thread : threads) thread.join();
  asked(client, StoreCall::kCount, {}, &code);
  check(code == ECONNREFUSED, "a kept connection to a stay that was left isn't replaced");
}

}  // namespace

int main(int count, char** words) {
  const std::string word = count > 1 ? words[1] : "";
  if (word == "throws") run_throws();
  else if (word == "neighbours") run_neighbours();
  else if (word == "ports") run_ports();
  else if (word == "guests") run_guests();
  else run_worlds(count > 2 ? std::atoi(words[2]) : 10);
  std::printf("all holds\n");
  return 0;
}
