// The driver without Python, for sanitizers: worlds of several stays in this process, and a step that throws.
//
//   control_driver worlds ROUNDS      stays of one process agree, fork meanwhile, and leave
//   control_driver throws             memory runs out in the thread: its worlds end, and another one can be opened
//
// Prints "all holds", or what doesn't, and returns 1.
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"

using namespace parallel_state::control;

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
  one.handle = open_stay("127.0.0.1", 0, 0, Config{}, &one.stay);
  check(one.handle > 0, "a stay can't be opened");
  return one;
}

bool is_over(const Opened& one) {
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  return one.stay->over;
}

// Returns the first news of this kind; others are taken and dropped.
std::string await(const Opened& one, Inbox::Kind kind) {
  std::vector<char> buffer(1 << 20);
  const Nanos until = monotonic_now() + 10 * kSecond;
  while (monotonic_now() < until) {
    const std::size_t size = one.stay->inbox.take(buffer.data(), buffer.size());
    if (size == 0) {
      pollfd ready{one.stay->inbox.number(), POLLIN, 0};
      poll(&ready, 1, 100);
    } else if (buffer[0] == static_cast<char>(kind)) {
      return std::string(buffer.data(), size);
    }
  }
  check(false, "news that was due is missing after 10 s");
  return "";
}

void meet(const std::vector<Opened>& all) {
  std::vector<Member> members;
  std::vector<int> boards;
  for (const Opened& one : all) {
    // The last two can watch each other.
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
    event.epoch = 1;
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
    check(post(one.stay, std::move(event)), "a stay takes no call");
  }
}

// Like a child of a program: it has none of its parent's stays, and may have one of its own.
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
      const pid_t child = attempt == 2 ? fork() : -1;
      if (child == 0) _exit(run_child(all[0].handle));
      for (const Opened& one : all) await(one, Inbox::kVerdict);
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
  for (const Opened& one : all) await(one, Inbox::kVerdict);
  memory_is_out = true;
  post(all[0].stay, Event{});
  const Nanos until = monotonic_now() + 5 * kSecond;
  for (const Opened& one : all) {
    while (!is_over(one) && monotonic_now() < until) usleep(1000);
    check(is_over(one), "a stay goes on without memory");
    check(!post(one.stay, Event{}), "a stay that is over takes events");
  }
  memory_is_out = false;
  run_worlds(1);
}

}  // namespace

int main(int count, char** words) {
  if (count > 1 && std::strcmp(words[1], "throws") == 0) run_throws();
  else run_worlds(count > 2 ? std::atoi(words[2]) : 10);
  std::printf("all holds\n");
  return 0;
}
