// All orders of an agreement among a few control cores: every delivery, dial, call, crash and broken connection.
//
//   control_explorer --hosts 1,1,1 --crashes C --drops D --first R
//
// A state is not entered twice. Time passes only if nothing else can happen.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <unordered_set>
#include <vector>

#include "core.h"

using namespace parallel_state::control;

namespace {

constexpr Nanos kTimeout = 2 * kSecond;

Proc proc_of(int rank) { return static_cast<Proc>(rank) + 11; }
int rank_of(Proc proc) { return static_cast<int>(proc) - 11; }

struct Connection {
  int side[2] = {-1, -1};
  bool open[2] = {false, false};
  std::deque<Bytes> to[2];  // empty bytes: the end
};

struct State {
  std::vector<Core> cores;
  std::vector<bool> alive, called;
  std::vector<std::shared_ptr<const Verdict>> verdicts;
  std::vector<Connection> connections;
  std::vector<std::pair<int, int>> dials;
  std::vector<std::deque<Event>> local;
  Nanos now = 1000 * kSecond;
  int crashes = 0, drops = 0;
};

class Explorer {
 public:
  Explorer(const std::vector<int>& hosts, int crashes, int drops, int first)
      : crashes_(crashes), drops_(drops), first_(first) {
    config_.tick = kTimeout / 4;
    config_.beat = config_.limit = 100'000 * kSecond;
    std::vector<Member> members;
    for (std::size_t host = 0; host < hosts.size(); ++host) {
      for (int i = 0; i < hosts[host]; ++i) {
        const int rank = static_cast<int>(members.size());
        members.push_back({rank, proc_of(rank), host, {"host", static_cast<std::uint16_t>(rank), "token"}, 0, 0});
        host_.push_back(static_cast<int>(host));
      }
    }
    ranks_ = static_cast<int>(members.size());
    config_.stale = 100'000 * kSecond;
    roster_ = std::make_shared<const Roster>(std::move(members));
  }

  bool run() {
    State state;
    for (int rank = 0; rank < ranks_; ++rank) state.cores.emplace_back(proc_of(rank), "token", config_);
    state.alive.assign(ranks_, true);
    state.called.assign(ranks_, false);
    state.verdicts.resize(ranks_);
    state.local.resize(ranks_);
    for (int rank = 0; rank < ranks_; ++rank) {
      Event event;
      event.kind = Event::kMeet;
      event.roster = roster_;
      step(&state, rank, event);
    }
    settle(&state);
    for (int rank = 0; rank < ranks_; ++rank) {
      for (int other = rank + 1; other < ranks_; ++other) {
        Event event;
        event.kind = Event::kCall;
        event.call =
            std::make_shared<const Call>(Call{"connects", 0, {proc_of(rank), proc_of(other)}, "", state.now + kSecond});
        for (const int caller : {rank, other}) step(&state, caller, event);
      }
    }
    settle(&state);
    state.verdicts.assign(ranks_, nullptr);
    return visit(state);
  }

  void settle(State* state) {
    while (is_busy(*state)) {
      std::vector<State> next;
      std::vector<std::string> names;
      deliveries(*state, &next, &names);
      *state = State(std::move(next.front()));
    }
  }

  std::size_t states() const { return seen_.size(); }
  void print() const {
    std::printf("%s\n", failure_.c_str());
    for (const std::string& step : path_) std::printf("  %s\n", step.c_str());
  }

 private:
  void step(State* state, int rank, const Event& event) {
    std::vector<Action> actions;
    state->cores[rank].step(state->now, event, &actions);
    bool beats = false;
    std::vector<std::pair<int, int>> joined;
    for (const Action& action : actions) {
      const int id = action.connection;
      if (action.kind == Action::kDial) state->dials.emplace_back(rank, rank_of(action.proc));
      if (action.kind == Action::kVerdict) state->verdicts[rank] = action.verdict;
      if (action.kind == Action::kBoard) {
        for (int mate = 0; mate < ranks_; ++mate) {
          if (mate == rank || host_[mate] != host_[rank] || !state->alive[mate]) continue;
          Event board;
          board.kind = Event::kBoard;
          board.bytes = action.bytes;
          state->local[mate].push_back(board);
        }
      }
      beats = beats || action.kind == Action::kBeat;
      if (action.kind != Action::kSend && action.kind != Action::kClose) continue;
      Connection& connection = state->connections[id];
      const int side = connection.side[0] == rank ? 0 : 1;
      if (!connection.open[side]) continue;
      const bool arrives = connection.open[1 - side] && !is_broken(connection);
      auto& queue = connection.to[1 - side];
      if (action.kind == Action::kClose) {
        connection.open[side] = false;
        connection.to[side].clear();
        if (arrives) queue.emplace_back();
      } else if (arrives) {
        const auto place = std::make_pair(id, static_cast<int>(queue.size()) - 1);
        if (std::find(joined.begin(), joined.end(), place) != joined.end()) queue.back() += *action.frames;
        else {
          queue.push_back(*action.frames);
          joined.emplace_back(id, static_cast<int>(queue.size()) - 1);
        }
      }
    }
    Event answer;
    answer.kind = Event::kBeats;
    if (beats) step(state, rank, answer);
  }

  static bool is_broken(const Connection& connection) {
    return (!connection.to[0].empty() && connection.to[0].back().empty()) ||
           (!connection.to[1].empty() && connection.to[1].back().empty());
  }

  bool is_busy(const State& state) const {
    if (!state.dials.empty()) return true;
    for (const Connection& connection : state.connections) {
      if (!connection.to[0].empty() || !connection.to[1].empty()) return true;
    }
    return std::any_of(state.local.begin(), state.local.end(), [](const auto& queue) { return !queue.empty(); });
  }

  void deliveries(const State& state, std::vector<State>* next, std::vector<std::string>* names) {
    for (std::size_t i = 0; i < state.dials.size(); ++i) {
      State after = state;
      const auto [from, to] = state.dials[i];
      after.dials.erase(after.dials.begin() + static_cast<std::ptrdiff_t>(i));
      dial(&after, from, to);
      next->push_back(std::move(after));
      names->push_back("dial " + std::to_string(from) + " -> " + std::to_string(to));
    }
    for (std::size_t id = 0; id < state.connections.size(); ++id) {
      for (int side = 0; side < 2; ++side) {
        if (state.connections[id].to[side].empty()) continue;
        State after = state;
        Connection& connection = after.connections[id];
        Event event;
        event.bytes = std::move(connection.to[side].front());
        connection.to[side].pop_front();
        event.kind = event.bytes.empty() ? Event::kClosed : Event::kBytes;
        event.connection = static_cast<int>(id);
        if (event.kind == Event::kClosed) connection.open[side] = false;
        const int rank = connection.side[side];
        names->push_back("deliver " + std::to_string(event.bytes.size()) + " bytes on " + std::to_string(id) + " to " +
                         std::to_string(rank) + describe(event.bytes));
        step(&after, rank, event);
        next->push_back(std::move(after));
      }
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      if (state.local[rank].empty()) continue;
      State after = state;
      const Event event = after.local[rank].front();
      after.local[rank].pop_front();
      step(&after, rank, event);
      next->push_back(std::move(after));
      names->push_back("local event " + std::to_string(event.kind) + " to " + std::to_string(rank));
    }
  }

  static std::string describe(const Bytes& bytes) {
    std::string text;
    for (std::size_t at = bytes.empty() || bytes[0] == 0 ? kHelloBytes : 0; at + kHeadBytes <= bytes.size();) {
      text += " frame " + std::to_string(bytes[at + 6]);
      at += kHeadBytes + static_cast<unsigned char>(bytes[at]) + 256 * static_cast<unsigned char>(bytes[at + 1]);
    }
    return text;
  }

  void dial(State* state, int from, int to) {
    Event event;
    event.proc = proc_of(to);
    if (!state->alive[to]) {
      event.kind = Event::kRefused;
      return step(state, from, event);
    }
    std::size_t id = 0;
    while (id < state->connections.size() && (state->connections[id].open[0] || state->connections[id].open[1])) ++id;
    if (id == state->connections.size()) state->connections.emplace_back();
    state->connections[id] = Connection{{from, to}, {true, true}, {}};
    event.connection = static_cast<int>(id);
    event.nonce = Bytes(kNonceBytes, 'n');  // equal states have equal digests
    event.kind = Event::kAccepted;
    step(state, to, event);
    event.kind = Event::kDialed;
    step(state, from, event);
    for (int part = 0; part < 2; ++part) {
      for (const int side : {1, 0}) {
        auto& queue = state->connections[id].to[side];
        if (queue.empty() || queue.front().empty()) continue;
        event.kind = Event::kBytes;
        event.bytes = std::move(queue.front());
        queue.pop_front();
        step(state, state->connections[id].side[side], event);
      }
    }
  }

  void call(State* state, int rank) {
    state->called[rank] = true;
    auto call = std::make_shared<Call>();
    call->purpose = "group";
    for (int member = first_; member < ranks_; ++member) call->members.push_back(proc_of(member));
    call->value = std::to_string(rank);
    call->deadline = state->now + kTimeout;
    Event event;
    event.kind = Event::kCall;
    event.call = call;
    step(state, rank, event);
  }

  void crash(State* state, int rank) {
    state->alive[rank] = false;
    ++state->crashes;
    state->local[rank].clear();
    auto& dials = state->dials;
    dials.erase(std::remove_if(dials.begin(), dials.end(), [&](const auto& each) { return each.first == rank; }),
                dials.end());
    for (Connection& connection : state->connections) {
      for (int side = 0; side < 2; ++side) {
        if (connection.side[side] != rank || !connection.open[side]) continue;
        const bool arrives = connection.open[1 - side] && !is_broken(connection);
        connection.open[side] = false;
        connection.to[side].clear();
        if (arrives) connection.to[1 - side].emplace_back();
      }
    }
    for (int mate = 0; mate < ranks_; ++mate) {
      if (mate == rank || host_[mate] != host_[rank] || !state->alive[mate]) continue;
      Event event;
      event.kind = Event::kEnded;
      event.proc = proc_of(rank);
      state->local[mate].push_back(event);
    }
  }

  std::uint64_t digest(const State& state) const {
    std::uint64_t digest = 0;
    const auto mix = [&](std::uint64_t value) {
      digest = (digest ^ value) * 0x9e3779b97f4a7c15;
      digest ^= digest >> 31;
    };
    const auto mix_text = [&](const Bytes& text) { mix(std::hash<std::string>()(text)); };
    mix(static_cast<std::uint64_t>(state.now));
    mix(static_cast<std::uint64_t>(state.crashes * 16 + state.drops));
    for (int rank = 0; rank < ranks_; ++rank) {
      mix(state.alive[rank] ? state.cores[rank].digest() : 0);
      mix(static_cast<std::uint64_t>(state.alive[rank] ? state.cores[rank].wake_at() : 0));
      const Verdict* verdict = state.verdicts[rank].get();
      mix(state.called[rank] + 2 * static_cast<std::uint64_t>(verdict == nullptr ? 9 : verdict->kind));
      if (verdict != nullptr) {
        for (const Proc proc : verdict->culprits) mix(proc);
      }
      for (const Event& event : state.local[rank]) mix(event.kind), mix(event.proc), mix_text(event.bytes);
      mix(77);
    }
    for (const auto& [from, to] : state.dials) mix(static_cast<std::uint64_t>(from * 16 + to));
    for (const Connection& connection : state.connections) {
      for (int side = 0; side < 2; ++side) {
        mix(connection.open[side] ? static_cast<std::uint64_t>(connection.side[side]) : 99);
        for (const Bytes& bytes : connection.to[side]) mix_text(bytes);
        mix(78);
      }
    }
    return digest;
  }

  bool visit(const State& state) {
    if (!seen_.insert(digest(state)).second) return true;
    std::vector<State> next;
    std::vector<std::string> names;
    deliveries(state, &next, &names);
    const bool quiet = next.empty();
    for (int rank = 0; rank < ranks_; ++rank) {
      if (!state.alive[rank]) continue;
      if (!state.called[rank] && rank >= first_) {
        next.push_back(state);
        call(&next.back(), rank);
        names.push_back("call of " + std::to_string(rank));
      }
      if (state.crashes < crashes_ && state.crashes + 1 < ranks_) {
        next.push_back(state);
        crash(&next.back(), rank);
        names.push_back("crash of " + std::to_string(rank));
      }
    }
    for (std::size_t id = 0; state.drops < drops_ && id < state.connections.size(); ++id) {
      const Connection& connection = state.connections[id];
      if (!connection.open[0] || !connection.open[1] || is_broken(connection)) continue;
      next.push_back(state);
      Connection& dropped = next.back().connections[id];
      for (auto& queue : dropped.to) queue.assign(1, Bytes());
      ++next.back().drops;
      names.push_back("connection " + std::to_string(id) + " breaks");
    }
    if (quiet && !check(state)) return false;
    if (quiet && wait(state, &next)) names.push_back("time passes");
    for (std::size_t i = 0; i < next.size(); ++i) {
      path_.push_back(names[i]);
      if (!visit(next[i])) return false;
      path_.pop_back();
    }
    return true;
  }

  bool wait(const State& state, std::vector<State>* next) {
    if (is_settled(state)) return false;
    Nanos wake = kNever;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (state.alive[rank]) wake = std::min(wake, state.cores[rank].wake_at());
    }
    if (wake == kNever || wake > 1000 * kSecond + 3 * kTimeout) return false;
    next->push_back(state);
    State& after = next->back();
    after.now = std::max(wake, state.now);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (after.alive[rank] && after.cores[rank].wake_at() <= after.now) step(&after, rank, Event());
    }
    return true;
  }

  bool is_settled(const State& state) const {
    for (int rank = 0; rank < ranks_; ++rank) {
      if (!state.alive[rank]) continue;
      if (state.called[rank] && state.verdicts[rank] == nullptr) return false;
      for (int dead = 0; dead < ranks_; ++dead) {
        if (!state.alive[dead] && !knows(state, rank, dead)) return false;
      }
    }
    return true;
  }

  static bool knows(const State& state, int rank, int dead) {
    const Ends& ends = state.cores[rank].ends();
    return std::any_of(ends.begin(), ends.end(), [&](const auto& entry) { return entry.first == proc_of(dead); });
  }

  bool check(const State& state) {
    const Verdict* first = nullptr;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (!state.alive[rank]) continue;
      for (const auto& [proc, end] : state.cores[rank].ends()) {
        if (state.alive[rank_of(proc)]) return fail("a process that lives is taken for dead");
      }
      const Verdict* verdict = state.verdicts[rank].get();
      if (state.called[rank] && verdict == nullptr && state.now > 1000 * kSecond + kTimeout) {
        return fail("a call goes on after its deadline");
      }
      if (verdict == nullptr) continue;
      if (verdict->kind == Verdict::kUndecided) return fail("a call is undecided, though all run");
      if (first == nullptr) first = verdict;
      if (first->kind != verdict->kind || first->values != verdict->values) return fail("two verdicts among survivors");
      if (verdict->kind == Verdict::kAgreed && verdict->values.size() != static_cast<std::size_t>(ranks_ - first_)) {
        return fail("a value is missing");
      }
    }
    if (state.now > 1000 * kSecond + 2 * kTimeout && !is_settled(state)) return fail("an end never becomes known");
    return true;
  }

  bool fail(const std::string& text) {
    failure_ = text;
    return false;
  }

  Config config_;
  int ranks_ = 0, crashes_, drops_, first_;
  std::vector<int> host_;
  std::shared_ptr<const Roster> roster_;
  std::unordered_set<std::uint64_t> seen_;
  std::vector<std::string> path_;
  std::string failure_;
};

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> hosts = {1, 1, 1};
  int crashes = 1, drops = 0, first = 0;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--crashes") crashes = std::atoi(argv[i + 1]);
    else if (name == "--drops") drops = std::atoi(argv[i + 1]);
    else if (name == "--first") first = std::atoi(argv[i + 1]);
    else if (name == "--hosts") {
      hosts.clear();
      for (const char each : std::string(argv[i + 1])) {
        if (each != ',') hosts.push_back(each - '0');
      }
    } else return std::fprintf(stderr, "unknown argument %s\n", argv[i]), 2;
  }
  Explorer explorer(hosts, crashes, drops, first);
  const bool holds = explorer.run();
  if (!holds) explorer.print();
  std::printf("%zu states%s\n", explorer.states(), holds ? ": all holds" : "");
  return holds ? 0 : 1;
}
