// Malformed and unexpected bytes and events for control cores.
//
//   control_fuzzer --seconds S [--seed N]
//
// Four cores on two hosts exchange frames, which are mutated with consistent lengths. The peers know each other's
// tokens, so that mutants get far. The state and output of a core must stay bounded.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "core.h"

using namespace parallel_state::control;

namespace {

constexpr int kRanks = 4;

struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  std::size_t below(std::size_t limit) { return limit == 0 ? 0 : next() % limit; }
  bool chance(std::size_t percent) { return below(100) < percent; }
};

Proc proc_of(std::size_t rank) { return rank + 11; }

void require(bool holds, const char* text) {
  if (holds) return;
  std::printf("%s\n", text);
  std::fflush(stdout);
  std::abort();
}

Bytes mutated(Bytes bytes, Random* random) {
  for (std::size_t count = 1 + random->below(4); count > 0; --count) {
    const std::size_t at = random->below(bytes.size() + 1);
    const std::size_t size = random->below(40);
    switch (random->below(6)) {
      case 0: bytes.insert(at, size, static_cast<char>(random->next())); break;
      case 1: bytes.erase(at, size); break;
      case 2: bytes.insert(at, bytes.substr(random->below(bytes.size() + 1), size)); break;
      case 3: bytes.resize(at); break;
      default: {
        static constexpr char kNumbers[] = "\x00\x01\x02\x03\x7f\x80\xff";
        if (at < bytes.size()) bytes[at] = random->chance(50) ? kNumbers[random->below(7)] : random->next() & 0xff;
      }
    }
  }
  return bytes;
}

struct Pipe {
  std::size_t rank[2];
  std::deque<Bytes> to[2];
  bool open[2] = {true, true};
};

class Fuzzer {
 public:
  explicit Fuzzer(std::uint64_t seed) : random_{seed} {
    std::vector<Member> members;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      members.push_back({static_cast<int>(rank), proc_of(rank), rank / 2, {"host", 1, "token"}, 0, 0});
      cores_.emplace_back(proc_of(rank), "token", Config());
    }
    roster_ = std::make_shared<const Roster>(std::move(members));
    mutants_ = random_.below(30);
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      if (random_.chance(90)) meet(rank);
    }
  }

  long run() {
    for (int i = 0; i < 400; ++i) {
      if (random_.chance(75)) deliver();
      else if (random_.chance(50)) now_ += static_cast<Nanos>(random_.below(400)) * kMillisecond;
      else surprise(random_.below(kRanks));
      for (std::size_t rank = 0; rank < kRanks; ++rank) {
        if (cores_[rank].wake_at() <= now_) step(rank, Event());
      }
    }
    return steps_;
  }

 private:
  void step(std::size_t rank, const Event& event) {
    ++steps_;
    std::vector<Action> actions;
    Core copy = cores_[rank];  // must step identically
    cores_[rank].step(now_, event, &actions);
    if (random_.chance(2)) {
      std::vector<Action> again;
      copy.step(now_, event, &again);
      require(copy.digest() == cores_[rank].digest() && again.size() == actions.size(), "a copy steps differently");
    }
    require(actions.size() < 2000, "too many actions");
    require(cores_[rank].ends().size() <= kMostMembers && cores_[rank].rounds() < 3000, "too much is kept");
    for (Action& action : actions) carry_out(rank, action);
  }

  void carry_out(std::size_t rank, Action& action) {
    if (action.kind == Action::kSend || action.kind == Action::kClose) {
      Pipe& pipe = pipes_.at(static_cast<std::size_t>(action.connection));
      const int side = pipe.rank[0] == rank ? 0 : 1;
      require(pipe.rank[side] == rank, "another's connection");
      if (pipe.open[side] && pipe.open[1 - side]) {
        pipe.to[1 - side].push_back(action.kind == Action::kSend ? *action.frames : Bytes());
      }
      if (action.kind == Action::kClose) pipe.open[side] = false;
    }
    if (action.kind == Action::kDial) dial(rank, action.proc - 11);
    Event event;
    event.connection = action.connection;
    event.proc = action.proc;
    event.bytes = Bytes(random_.below(5000), 'r');
    if (action.kind == Action::kProbe) event.kind = Event::kAcked;
    if (action.kind == Action::kBeat) event.kind = Event::kBeats;
    if (action.kind == Action::kBoard) {
      event.kind = Event::kBoard;
      event.bytes = random_.chance(20) ? mutant(action.bytes) : action.bytes;
      return local_.emplace_back(rank ^ 1, std::move(event)), void();
    }
    if (event.kind == Event::kBeats && random_.chance(80)) event.procs.push_back(proc_of(rank ^ 1));
    if (event.kind != Event::kTick) local_.emplace_back(rank, std::move(event));
  }

  void dial(std::size_t from, std::size_t to) {
    Event event;
    event.proc = proc_of(to);
    event.kind = random_.chance(10) ? Event::kNoAnswer : Event::kRefused;
    if (to >= kRanks || cores_[to].is_over() || random_.chance(10)) return local_.emplace_back(from, event), void();
    event.connection = static_cast<int>(pipes_.size());
    event.nonce = Bytes(kNonceBytes, static_cast<char>(random_.next()));
    pipes_.push_back({{from, to}, {}, {}});
    event.kind = Event::kDialed;
    local_.emplace_back(from, event);
    event.kind = Event::kAccepted;
    local_.emplace_back(to, event);
  }

  void deliver() {
    if (!local_.empty() && random_.chance(60)) {
      const auto [rank, event] = local_.front();
      local_.pop_front();
      return step(rank, event);
    }
    for (int tries = 0; tries < 10 && !pipes_.empty(); ++tries) {
      const std::size_t id = random_.below(pipes_.size());
      const std::size_t side = random_.below(2);
      Pipe& pipe = pipes_[id];
      if (pipe.to[side].empty() || !pipe.open[side]) continue;
      Event event;
      event.connection = static_cast<int>(id);
      event.bytes = std::move(pipe.to[side].front());
      pipe.to[side].pop_front();
      event.kind = event.bytes.empty() ? Event::kClosed : Event::kBytes;
      if (event.kind == Event::kClosed) pipe.open[side] = false;
      else if (random_.chance(mutants_)) event.bytes = mutant_frame(event.bytes);
      return step(pipe.rank[side], event);
    }
  }

  Bytes mutant(Bytes bytes) { return mutated(std::move(bytes), &random_); }

  Bytes mutant_frame(const Bytes& bytes) {
    if (bytes.size() <= kHeadBytes || bytes[0] == '\0' || random_.chance(10)) {
      return bytes.size() > kHelloBytes && random_.chance(90) ? bytes : mutant(bytes);
    }
    Bytes head = bytes.substr(0, kHeadBytes);
    if (random_.chance(20)) head[6] = static_cast<char>(1 + random_.below(14));
    const Bytes body = random_.chance(85) ? mutant(bytes.substr(kHeadBytes)) : Bytes();
    if (random_.chance(95)) head.replace(0, 4, Writer().number(static_cast<std::uint32_t>(body.size())).take());
    return random_.chance(20) ? bytes + head + body : head + body;
  }

  void meet(std::size_t rank) {
    Event event;
    event.kind = Event::kMeet;
    event.roster = roster_;
    step(rank, event);
  }

  void surprise(std::size_t rank) {
    Event event;
    event.proc = proc_of(random_.below(kRanks + 1));
    event.deadline = random_.chance(5) ? kNever : now_ + static_cast<Nanos>(random_.below(3000)) * kMillisecond;
    event.bytes = Bytes(random_.chance(10) ? 5000 : random_.below(50), 'b');
    event.flags = static_cast<std::uint8_t>(random_.next());
    switch (random_.below(9)) {
      case 0: return meet(rank);
      case 1: event.kind = random_.chance(10) ? Event::kReport : Event::kTick; break;
      case 2: event.kind = random_.chance(20) ? Event::kLeave : Event::kTick; break;
      case 3: event.kind = random_.chance(10) ? Event::kEnded : Event::kExiting; break;
      default: {
        auto call = std::make_shared<Call>();
        call->purpose = Bytes(random_.chance(2) ? 300 : 1, static_cast<char>('a' + random_.below(3)));
        call->attempt = static_cast<std::uint32_t>(random_.below(4));
        for (std::size_t each = random_.below(2); each < kRanks; ++each) call->members.push_back(proc_of(each));
        call->value = event.bytes;
        call->deadline = event.deadline;
        event.kind = random_.chance(10) ? Event::kCancel : Event::kCall;
        event.call = std::move(call);
      }
    }
    if (event.kind == Event::kEnded || event.kind == Event::kExiting) event.proc = proc_of(rank ^ 1);
    step(rank, event);
  }

  Random random_;
  Nanos now_ = 1000 * kSecond;
  std::size_t mutants_ = 0;
  long steps_ = 0;
  std::shared_ptr<const Roster> roster_;
  std::vector<Core> cores_;
  std::deque<Pipe> pipes_;
  std::deque<std::pair<std::size_t, Event>> local_;
};

// Calls are mutated before sealing.
class Guests {
 public:
  explicit Guests(std::uint64_t seed) : random_{seed} {
    for (int i = 0; i < 200; ++i) {
      const int id = static_cast<int>(random_.below(4));
      if (guests_.count(id) == 0) enter(id);
      else if (random_.chance(5)) drop(id);
      else ask(id);
    }
  }

 private:
  struct Guest {
    Seal out, in;
    bool waits = false;
  };

  void enter(int id) {
    const Bytes theirs(kNonceBytes, 'g'), mine(kNonceBytes, 'n');
    guests_[id] = {Seal("token", true, theirs, mine), Seal("token", false, theirs, mine), false};
    require(store_.admit(id, "token", theirs + mine, &out_), "a guest isn't admitted");
  }

  void drop(int id) {
    guests_.erase(id);
    store_.drop(id, &out_);
    take();
  }

  void ask(int id) {
    std::vector<Bytes> parts;
    for (std::size_t count = random_.below(5); count > 0; --count) {
      parts.push_back(random_.chance(90) ? Bytes(1, static_cast<char>('0' + random_.below(5))) : Bytes("gone/1"));
    }
    Bytes body = encode_store(static_cast<std::uint8_t>(random_.below(14)), parts);
    if (random_.chance(10)) body = mutated(std::move(body), &random_);
    Guest& guest = guests_[id];
    body = guest.out.seal(std::move(body));
    guest.waits = true;
    Bytes frame = encode(Frame{FrameKind::kStoreCall, 0, 0, std::move(body)});
    if (random_.chance(5)) frame = mutated(std::move(frame), &random_);
    const bool fine = store_.take(id, frame, &out_);
    take();
    if (!fine) drop(id);
    if (random_.chance(30)) {
      store_.answer(static_cast<int>(random_.below(4)), Bytes(random_.below(100), 'x'), &out_);
      take();
    }
  }

  void take() {
    for (const auto& [id, bytes, is_question] : std::exchange(out_, {})) {
      require(guests_.count(id) != 0, "a reply to nobody");
      if (is_question) continue;
      Bytes body = bytes.substr(kHeadBytes);
      std::uint8_t code = 0;
      std::vector<Bytes> parts;
      require(std::exchange(guests_[id].waits, false), "a reply without a call");
      require(guests_[id].in.open(&body) && decode_store(body, &code, &parts) && code < 3, "a malformed reply");
    }
  }

  Random random_;
  Store store_;
  std::map<int, Guest> guests_;
  std::vector<Store::Output> out_;
};

void fuzz_parser(Random* random) {
  Bytes stream = encode(Hello{});
  for (int i = 0; i < 5; ++i) {
    stream += encode(Frame{static_cast<FrameKind>(1 + random->below(14)), 7, 11, Bytes(random->below(200), 'x')});
  }
  for (std::size_t count = random->below(4); count > 0; --count) {
    stream[random->below(stream.size())] = static_cast<char>(random->next());
  }
  Parser parser;
  if (random->chance(80)) parser.trust();
  for (std::size_t at = 0; at < stream.size();) {
    const std::size_t size = 1 + random->below(stream.size() - at);
    parser.push(std::string_view(stream).substr(at, size));
    at += size;
    Hello hello;
    Frame frame;
    for (int items = 0; items < 10; ++items) {
      const Parser::Result result = parser.next(&hello, &frame);
      if (result == Parser::Result::kNeedsMore || result == Parser::Result::kMalformed) break;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 5;
  std::uint64_t seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--seconds") == 0) seconds = std::atof(argv[i + 1]);
    if (std::strcmp(argv[i], "--seed") == 0) seed = std::strtoull(argv[i + 1], nullptr, 10);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  long steps = 0, rounds = 0;
  for (; std::chrono::steady_clock::now() < end; ++rounds, ++seed) {
    if (argc > 4) std::fprintf(stderr, "%llu\n", static_cast<unsigned long long>(seed));
    steps += Fuzzer(seed * 7919).run();
    Guests guests(seed * 7919);
    Random random{seed};
    for (int i = 0; i < 50; ++i) fuzz_parser(&random);
  }
  std::printf("%ld rounds, %ld steps: all holds\n", rounds, steps);
  return 0;
}
