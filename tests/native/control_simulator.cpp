// A cluster of control cores in one process, under virtual time. Invariants are checked after each step.
//
//   control_simulator --replay FILE
//   control_simulator [--record FILE] --seed N --seeds COUNT --ranks R --hosts H [--fault NAME] [--trace]
//
// A failing seed prints its schedule, and the same arguments replay it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include "core.h"
#include "record.h"

using namespace parallel_state::control;

namespace {

constexpr Nanos kForEver = kNever / 2;
constexpr Nanos kLinger = 500 * kMillisecond;
// After a cut, lost bytes and dials are sent again within kResent; a dial's answer follows within kRecovers of the cut.
constexpr Nanos kResent = 200 * kMillisecond, kRecovers = 250 * kMillisecond;

struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  Nanos below(Nanos limit) { return limit <= 0 ? 0 : static_cast<Nanos>(next() % static_cast<std::uint64_t>(limit)); }
  bool chance(int percent) { return below(100) < percent; }
};

struct Process {
  Process(Proc proc, std::string token, Config config) : core(proc, std::move(token), config) {}

  Core core;
  int host = 0;
  bool alive = true;
  bool runs = true;
  bool exiting = false;
  bool large = false;
  bool joined = false;
  bool left = false;
  bool left_early = false;
  Nanos leaves_by = -1;
  bool calls = false;
  bool declared = false;  // some core took it for dead
  Nanos ran_since = 0;
  Nanos died = -1;
  Nanos woken_at = kNever;
  Nanos local_at = 0;
  std::deque<Event> backlog;
  std::unique_ptr<Record> record;
  std::vector<std::uint64_t> seen;
  long frames = 0, dials = 0, connections = 0;
};

struct Connection {
  int side[2];
  bool open[2] = {true, false};
  bool broken = false;
  Nanos arrival[2] = {0, 0};
  Nanos closes[2] = {-1, -1};
  Nanos acknowledged[2] = {0, 0};
};

struct Agreement {
  std::vector<int> members;
  std::map<int, Nanos> called;
  std::map<int, Nanos> deadline;
  struct Given {
    std::shared_ptr<const Verdict> verdict;
    std::vector<int> ranks;
  };
  std::vector<Given> given;
  std::set<int> ended;
  Nanos decided = -1;
};

const char* const kFaults[] = {"none",    "kill",      "kill_lead", "kill_host", "power_off",  "partition",
                               "one_way", "short_cut", "drop",      "pause",     "pause_lead", "pause_host",
                               "storm",   "leave",     "large",     "garbage",   "clock",      "slow",
                               "delay",   "relay",     "fail",      "pause_two", "pairs"};
constexpr int kFaultCount = sizeof(kFaults) / sizeof(*kFaults);
// By name only: "depart": each rank leaves within 1 ms of its verdict. "new_lead": a host is powered off, and another's
// leads die before the limit.

class Simulator {
 public:
  Simulator(std::uint64_t seed, int ranks, int hosts, const std::string& fault, bool trace)
      : random_{seed * 7919 + 13}, ranks_(ranks), trace_(trace) {
    static constexpr int kHosts[] = {2, 4, 8, 16, 32, 64};
    hosts_ = hosts > 0 ? hosts : std::clamp(kHosts[random_.below(6)], (ranks + 63) / 64, ranks);
    config_.beat = fault == "pause_two" || random_.chance(25) ? kSecond : kSecond / 2;
    config_.limit = 4 * config_.beat;
    make_cluster();
    const int count = fault.empty() ? 1 + static_cast<int>(random_.below(3)) : 1;
    for (int i = 0; i < count; ++i) {
      std::string name = kFaults[random_.below(kFaultCount)];
      if (!fault.empty()) name = fault;
      if (name == "storm" && count > 1) name = "drop";
      faults_.insert(name);
      plan(name);
    }
    is_counted_ = faults_ == std::set<std::string>{"none"} || storm_ >= 0;
    if (faults_.count("storm") == 0) {
      const int agreements = 1 + static_cast<int>(random_.below(3));
      for (int i = 0; i < agreements; ++i) plan_agreement();
    }
  }

  std::string run() {
    const Nanos end = 3 * kSecond + config_.limit + 3 * kSecond;
    while (failure_.empty() && !queue_.empty() && queue_.top().time <= end) {
      const Item item = queue_.top();
      queue_.pop();
      now_ = item.time;
      if (item.process < 0) {
        std::function<void()> operation = std::move(operations_[item.payload]);
        operation();
      } else {
        Event event = std::move(events_[item.payload]);
        free_.push_back(item.payload);
        deliver(item.process, std::move(event));
      }
    }
    now_ = end;
    if (failure_.empty()) check_end();
    return failure_;
  }

  void print_schedule() const {
    std::printf("%d ranks on %d hosts; schedule:\n", ranks_, hosts_);
    for (const auto& [time, text] : schedule_) std::printf("  %8.3f s  %s\n", time / 1e9, text.c_str());
  }
  long steps() const { return steps_; }

  void record(int rank) { processes_[rank].record = std::make_unique<Record>(); }
  Bytes take_record(int rank) const { return processes_[rank].record->bytes(processes_[rank].core); }

 private:
  struct Item {
    Nanos time;
    std::uint64_t order;
    int process;
    std::size_t payload;
    bool operator<(const Item& other) const { return time != other.time ? time > other.time : order > other.order; }
  };

  void make_cluster() {
    std::vector<Member> members;
    for (int rank = 0; rank < ranks_; ++rank) {
      const int host = static_cast<int>(static_cast<long>(rank) * hosts_ / ranks_);
      Member member;
      member.rank = rank;
      member.proc = proc_of(rank);
      member.domain = 1000 + static_cast<std::uint64_t>(host);
      member.endpoint = {"host", static_cast<std::uint16_t>(rank), "token" + std::to_string(rank)};
      members.push_back(member);
      processes_.emplace_back(member.proc, member.endpoint.token, config_);
      processes_.back().host = host;
    }
    roster_ = std::make_shared<const Roster>(std::move(members));
    on_host_.resize(static_cast<std::size_t>(hosts_));
    for (int rank = 0; rank < ranks_; ++rank) on_host_[static_cast<std::size_t>(processes_[rank].host)].push_back(rank);
    for (Process& process : processes_) process.seen.resize(on_host_[static_cast<std::size_t>(process.host)].size());
    beats_.resize(static_cast<std::size_t>(ranks_));
    up_.assign(static_cast<std::size_t>(hosts_), true);
    for (int host = 0; host < hosts_; ++host) clock_.push_back(kSecond + random_.below(1000 * kSecond));
    for (int rank = 0; rank < ranks_; ++rank) joins_at_.push_back(random_.below(100 * kMillisecond));
    for (int rank = 0; rank < ranks_; ++rank) {
      at(0, [this, rank] { at(joins_at_[rank], [this, rank] { join(rank); }); });
    }
  }

  static Proc proc_of(int rank) { return 100'000 + static_cast<Proc>(rank) * 7; }
  static int rank_of(Proc proc) { return static_cast<int>((proc - 100'000) / 7); }

  void join(int rank) {
    if (!processes_[rank].alive || processes_[rank].exiting) return;
    processes_[rank].joined = true;
    Event event;
    event.kind = Event::kMeet;
    event.roster = roster_;
    deliver(rank, std::move(event));
  }

  void plan(const std::string& name) {
    const Nanos when = 300 * kMillisecond + random_.below(1500 * kMillisecond);
    const int rank = static_cast<int>(random_.below(ranks_));
    const int host = processes_[rank].host;
    const int lead = on_host_[host].front();
    std::string text = name + " rank " + std::to_string(rank) + " host " + std::to_string(host);
    if (name == "none") return;
    if (name == "kill") at(when, [=] { kill(rank); });
    if (name == "kill_lead") at(when, [=] { kill(lead); });
    if (name == "relay") {  // a death, and the lead killed while it reports it
      const int other = on_host_[host].back();
      at(when, [=] { kill(other); });
      at(when + random_.below(3 * kMillisecond), [=] { kill(lead); });
    }
    if (name == "kill_host") {
      const Nanos spread = random_.chance(50) ? 0 : 20 * kMillisecond;
      for (const int each : on_host_[host]) at(when + random_.below(spread), [=] { kill(each); });
    }
    if (name == "power_off") {
      at(when, [=] {
        up_[host] = false;
        for (const int each : on_host_[host]) kill(each);
      });
    }
    if (name == "new_lead") {
      at(when, [=] {
        up_[host] = false;
        for (const int each : on_host_[host]) kill(each);
      });
      const auto& others = on_host_[static_cast<std::size_t>((host + 1) % hosts_)];
      for (std::size_t i = 0; i + 1 < others.size() && i < 3; ++i) {
        at(when + random_.below(config_.limit), [=] { kill(others[i]); });
      }
    }
    if (name == "partition" || name == "one_way" || name == "short_cut") {
      std::vector<int> side;
      if (name == "one_way") side = {host};
      else
        for (int each = 0; each < hosts_; ++each) {
          if (random_.chance(50)) side.push_back(each);
        }
      const Nanos until = name == "short_cut" ? when + random_.below(config_.limit - 2 * config_.beat) : kForEver;
      const bool both = name != "one_way";
      at(when, [=] {
        for (int one = 0; one < hosts_; ++one) {
          for (const int other : side) {
            if (std::find(side.begin(), side.end(), one) != side.end()) continue;
            cut(one, other, until);
            if (both) cut(other, one, until);
          }
        }
      });
      text += " until " + std::to_string(until / 1e9) + " of hosts";
      for (const int each : side) text += " " + std::to_string(each);
    }
    if (name == "drop") {
      const int count = 1 + static_cast<int>(random_.below(20));
      for (int i = 0; i < count; ++i) at(when + random_.below(100 * kMillisecond), [=] { break_connection(); });
    }
    const Nanos pause = random_.chance(50) ? random_.below(kSecond) : config_.limit + random_.below(3 * kSecond);
    if (name == "pause") at(when, [=] { stop(rank, pause); });
    if (name == "pause_host") {
      for (const int each : on_host_[host]) at(when, [=] { stop(each, pause); });
    }
    if (name == "pause_lead") {
      const int other = on_host_[host].back();
      at(when, [=] { stop(lead, pause); });
      if (other != lead) at(when + random_.below(kSecond), [=] { kill(other); });
    }
    if (name == "pause_two") {  // the lead stops, then the next lead, and a third is killed
      const auto& mates = on_host_[host];
      at(when, [=] { stop(lead, 3 * kSecond); });
      if (mates.size() > 3) {
        const Nanos second = when + random_.below(kSecond);
        const int acting = mates[1], victim = mates.back();
        at(second, [=] { stop(acting, 3 * kSecond); });
        at(when + random_.below(kSecond), [=] { kill(victim); });
      }
    }
    if (name == "storm") {
      storm_ = when;
      for (int each = 0; each < ranks_; ++each) at(when + random_.below(300 * kMillisecond), [=] { leave(each); });
    }
    if (name == "leave") {
      at(when, [=] { leave(rank); });
      if (random_.chance(50)) at(when + random_.below(10 * kMillisecond), [=] { leave(lead); });
      if (random_.chance(30)) {
        for (const int each : on_host_[host]) at(when + random_.below(kSecond), [=] { leave(each); });
      }
      const int other = on_host_[host].back();
      if (random_.chance(50)) at(when + 20 * kMillisecond + random_.below(kSecond), [=] { kill(other); });
    }
    if (name == "large") {
      const Nanos frees = random_.below(3 * kSecond);
      at(when, [=] {
        Process& process = processes_[rank];
        if (!process.alive || process.left) return;
        process.exiting = process.large = true;
        process.died = now_;
        expect_death(rank, now_ + (has_witness(rank) ? 0 : frees));
        at(now_ + frees, [=] { kill(rank); });
      });
    }
    if (name == "garbage") {
      for (int i = 0; i < 20; ++i) at(when + random_.below(kSecond), [=] { send_garbage(); });
    }
    if (name == "clock") {
      Nanos step = random_.below(60 * kSecond) - 30 * kSecond;
      at(when, [=] {
        clock_[host] += step;
        for (const int each : on_host_[host]) deliver(each, Event());
      });
      text += " by " + std::to_string(step / 1e9) + " s";
    }
    if (name == "slow") {
      for (int i = 0; i < 1 + ranks_ / 100; ++i) {
        joins_at_[static_cast<std::size_t>(random_.below(ranks_))] = random_.below(3 * kSecond);
      }
    }
    if (name == "pairs") {  // agreements over connections that no lead watches
      for (int i = 0; i < 10; ++i) {
        const int one = static_cast<int>(random_.below(ranks_)), other = static_cast<int>(random_.below(ranks_));
        const Nanos moment = when + random_.below(kSecond);
        if (one == other) continue;
        agreements_.push_back(std::make_shared<Agreement>());
        agreements_.back()->members = {std::min(one, other), std::max(one, other)};
        for (const int each : {one, other}) {
          processes_[each].calls = true;
          at(moment, [this, each, number = static_cast<int>(agreements_.size()) - 1] { call(number, each); });
        }
      }
    }
    if (name == "delay") slow_percent_ = 20;
    if (name == "fail") {
      at(when, [=] {
        Event event;
        event.kind = Event::kReport;
        event.flags = kFailed;
        event.bytes = "a cause";
        if (!processes_[rank].alive || processes_[rank].left) return;
        processes_[rank].declared = true;
        deliver(rank, std::move(event));
      });
    }
    schedule_.emplace_back(when, text);
  }

  void plan_agreement() {
    auto agreement = std::make_shared<Agreement>();
    const int step = random_.chance(30) ? 1 : 1 + static_cast<int>(random_.below(ranks_ / 2 + 1));
    for (int rank = static_cast<int>(random_.below(step)); rank < ranks_; rank += step)
      agreement->members.push_back(rank);
    if (ranks_ > 200 && agreement->members.size() > 200) agreement->members.resize(200);
    for (const int rank : agreement->members) processes_[rank].calls = true;
    const Nanos when = 200 * kMillisecond + random_.below(1800 * kMillisecond);
    const std::size_t number = agreements_.size();
    agreements_.push_back(agreement);
    const bool all_call = random_.chance(70);
    for (const int rank : agreement->members) {
      if (!all_call && random_.chance(20)) continue;
      const Nanos late = random_.chance(5) && !all_call ? random_.below(3 * kSecond) : random_.below(20 * kMillisecond);
      at(when + late, [=] { call(static_cast<int>(number), rank); });
    }
    schedule_.emplace_back(when, "agreement " + std::to_string(number) + " of " +
                                     std::to_string(agreement->members.size()) + " ranks, every " +
                                     std::to_string(step));
  }

  void call(int number, int rank) {
    Process& process = processes_[rank];
    Agreement& agreement = *agreements_[number];
    if (!process.alive || process.exiting || process.left || !process.runs || !process.joined) return;
    auto call = std::make_shared<Call>();
    call->purpose = std::to_string(number);
    for (const int member : agreement.members) call->members.push_back(proc_of(member));
    call->value = "value of " + std::to_string(rank);
    call->deadline = now_ + clock_[process.host] + 1500 * kMillisecond;
    agreement.called[rank] = now_;
    agreement.deadline[rank] = call->deadline;
    at(now_ + 1501 * kMillisecond, [this, number, rank] {
      const Process& caller = processes_[rank];
      const bool ran =
          caller.alive && !caller.exiting && !caller.left && caller.runs && now_ - caller.ran_since > kSecond;
      if (ran && faults_.count("clock") == 0 && agreements_[number]->ended.count(rank) == 0) {
        fail("rank " + std::to_string(rank) + ": agreement " + std::to_string(number) + " goes on after its deadline");
      }
    });
    Event event;
    event.kind = Event::kCall;
    event.call = call;
    deliver(rank, std::move(event));
  }

  void kill(int rank) {
    Process& process = processes_[rank];
    if (!process.alive) return;
    if (process.died < 0 && !process.left) {
      process.died = now_;
      expect_death(rank, now_);
    }
    process.alive = false;
    process.backlog.clear();
    for (std::size_t id = 0; id < connections_.size(); ++id) {
      for (int side = 0; side < 2; ++side) {
        if (connections_[id].side[side] == rank && connections_[id].open[side]) close_side(static_cast<int>(id), side);
      }
    }
    if (!up_[process.host]) return;
    for (const int mate : on_host_[process.host]) {
      Event event;
      event.kind = Event::kEnded;
      event.proc = proc_of(rank);
      if (mate != rank) post_local(mate, std::move(event));
    }
  }

  void leave(int rank) {
    Process& process = processes_[rank];
    if (!process.alive || process.exiting || process.left || !process.runs || !process.joined) return;
    Event event;
    event.kind = Event::kLeave;
    process.leaves_by = now_ + kLinger;
    event.deadline = process.leaves_by + clock_[process.host];
    deliver(rank, std::move(event));
  }

  void stop(int rank, Nanos pause) {
    Process& process = processes_[rank];
    if (!process.alive || process.exiting || process.left || !process.runs) return;
    process.runs = false;
    at(now_ + pause, [=] {
      Process& stopped = processes_[rank];
      stopped.runs = true;
      stopped.ran_since = now_;
      std::deque<Event> backlog = std::move(stopped.backlog);
      stopped.backlog.clear();
      if (random_.chance(50)) wake(rank);
      for (Event& event : backlog) deliver(rank, std::move(event));
      stopped.woken_at = kNever;
      wake(rank);
    });
  }

  void cut(int from, int to, Nanos until) {
    auto& times = cuts_[{from, to}];
    // No answer passes in a shorter gap between two cuts: they count as one.
    if (times.second + kRecovers <= now_) times.first = now_;
    times.second = std::max(times.second, until);
    cut_hosts_.insert(from);
    cut_hosts_.insert(to);
  }

  void break_connection() {
    if (connections_.empty()) return;
    const int id = static_cast<int>(random_.below(static_cast<Nanos>(connections_.size())));
    Connection& connection = connections_[id];
    if (connection.broken || !connection.open[0] || !connection.open[1]) return;
    if (trace_) std::printf("%.6f connection %d breaks\n", now_ / 1e9, id);
    for (int side = 0; side < 2; ++side) {
      at(now_ + random_.below(5 * kMillisecond), [=] {
        Connection& broken = connections_[id];
        if (!broken.open[side]) return;
        Event event;
        event.kind = Event::kClosed;
        event.connection = id;
        deliver(broken.side[side], std::move(event));
      });
    }
    connection.broken = true;
  }

  void send_garbage() {
    const int rank = static_cast<int>(random_.below(ranks_));
    Process& process = processes_[rank];
    if (!process.alive || process.exiting || !process.runs) return;
    Bytes junk;
    const int kind = static_cast<int>(random_.below(4));
    if (kind > 0) junk = encode(Hello{});
    if (kind == 2) {
      const Proc claimed = proc_of(static_cast<int>(random_.below(ranks_)));
      junk += encode(Frame{FrameKind::kNonce, roster_->world, claimed, Bytes(kNonceBytes, 'n')});
      junk += encode(Frame{FrameKind::kIdentity, roster_->world, claimed, Bytes(32, 'w')});
    }
    if (kind == 3) {
      Frame frame{FrameKind::kState, roster_->world, proc_of(0), Bytes(40, '\x7f')};
      junk += encode(frame);
    }
    for (int i = static_cast<int>(random_.below(100)); i >= 0; --i) junk.push_back(static_cast<char>(random_.next()));
    step(rank, Event());
    const auto ends = process.core.ends().size();
    const auto rounds = process.core.rounds();
    const int id = static_cast<int>(connections_.size());
    connections_.push_back({{-1, rank}});
    connections_[id].open[0] = false;
    connections_[id].open[1] = true;
    Event event;
    event.kind = Event::kAccepted;
    event.connection = id;
    event.nonce = nonce();
    step(rank, event);
    event.kind = Event::kBytes;
    event.bytes = junk;
    step(rank, event);
    if (process.core.ends().size() != ends || process.core.rounds() != rounds) note_garbage();
    for (int tries = 0; tries < 20; ++tries) {
      const int used = static_cast<int>(random_.below(static_cast<Nanos>(connections_.size())));
      Connection& connection = connections_[used];
      if (connection.side[0] < 0 || connection.broken || !connection.open[0] || !connection.open[1]) continue;
      Process& victim = processes_[connection.side[1]];
      if (!victim.alive || victim.exiting || !victim.runs) continue;
      step(connection.side[1], Event());
      const auto before = victim.core.ends().size();
      Event bytes;
      bytes.kind = Event::kBytes;
      bytes.connection = used;
      for (int i = 0; i < 60; ++i) bytes.bytes.push_back(static_cast<char>(random_.next() | 0x80));
      step(connection.side[1], bytes);
      if (victim.core.ends().size() != before) note_garbage();
      break;
    }
  }

  void note_garbage() {  // a lead investigates a closed connection, and may find a stopped or dead host
    const bool is_well = std::all_of(processes_.begin(), processes_.end(),
                                     [&](const Process& each) { return each.runs && !each.exiting && up_[each.host]; });
    if (is_well && cuts_.empty()) fail("garbage changed a state");
  }

  Nanos arrival(int from, int to) {
    Nanos time = now_ + (from == to ? 10'000 : 50'000) + random_.below(500'000);
    if (slow_percent_ > 0 && random_.chance(slow_percent_)) time += random_.below(30 * kMillisecond);
    const auto found = cuts_.find({from, to});
    if (found != cuts_.end() && found->second.second > now_) {
      if (found->second.second >= kForEver) return kForEver;
      time = found->second.second + random_.below(kResent);
    }
    return up_[from] && up_[to] ? time : kForEver;
  }

  bool is_cut(int from, int to) const {
    const auto found = cuts_.find({from, to});
    return !up_[from] || !up_[to] || (found != cuts_.end() && found->second.second > now_);
  }

  void on_connection(int id, int side, Event event) {
    Connection& connection = connections_[id];
    const int to = connection.side[side];
    const int from = connection.side[1 - side];
    if (from < 0 || to < 0) return;
    const Nanos time = std::max(arrival(processes_[from].host, processes_[to].host), connection.arrival[side] + 1);
    if (time >= kForEver) {
      connection.arrival[side] = kForEver;
      return;
    }
    connection.arrival[side] = time;
    event.connection = id;
    post(time, to, std::move(event));
  }

  void close_side(int id, int side) {
    Connection& connection = connections_[id];
    connection.open[side] = false;
    Event event;
    event.kind = Event::kClosed;
    if (!connection.broken) on_connection(id, 1 - side, std::move(event));
  }

  void dial(int from, Proc proc) {
    const int to = rank_of(proc);
    ++processes_[from].dials;
    const Nanos there = arrival(processes_[from].host, processes_[to].host);
    const auto answer = [=](Event::Kind kind, int id) {
      Event event;
      event.kind = kind;
      event.proc = proc;
      event.connection = id;
      if (id >= 0) event.nonce = nonce();
      return event;
    };
    if (there >= kForEver) return post(now_ + 5 * kSecond, from, answer(Event::kNoAnswer, -1));
    at(there, [=] {
      const Nanos back = arrival(processes_[to].host, processes_[from].host);
      if (back >= kForEver) return post(now_ + 5 * kSecond, from, answer(Event::kNoAnswer, -1));
      if (!processes_[to].alive) return post(back, from, answer(Event::kRefused, -1));
      const int id = static_cast<int>(connections_.size());
      connections_.push_back({{from, to}});
      connections_[id].open[1] = true;
      connections_[id].arrival[0] = back;
      connections_[id].acknowledged[0] = connections_[id].acknowledged[1] = now_;
      ++processes_[from].connections;
      ++processes_[to].connections;
      deliver(to, answer(Event::kAccepted, id));
      post(back, from, answer(Event::kDialed, id));
    });
  }

  void post_local(int rank, Event event) {
    Process& process = processes_[rank];
    process.local_at = std::max(process.local_at + 1, now_ + 5'000 + random_.below(500'000));
    post(process.local_at, rank, std::move(event));
  }

  void post(Nanos time, int rank, Event event) {
    std::size_t place = events_.size();
    if (free_.empty()) events_.emplace_back();
    else place = free_.back(), free_.pop_back();
    events_[place] = std::move(event);
    queue_.push({time, order_++, rank, place});
  }

  void at(Nanos time, std::function<void()> operation) {
    operations_.push_back(std::move(operation));
    queue_.push({time, order_++, -1, operations_.size() - 1});
  }

  Bytes nonce() { return Writer().number(++nonces_).number(std::uint64_t{7}).take(); }

  void deliver(int rank, Event event) {
    Process& process = processes_[rank];
    if (!process.alive || process.exiting) return;
    if (event.kind == Event::kTick) process.woken_at = kNever;
    if (!process.runs) {
      if (event.kind != Event::kTick) process.backlog.push_back(std::move(event));
      return;
    }
    if (event.kind == Event::kTick && faults_.count("clock") == 0 &&
        process.core.wake_at() > now_ + clock_[process.host]) {
      return wake(rank);
    }
    if (event.kind == Event::kBytes || event.kind == Event::kClosed) {
      Connection& connection = connections_[event.connection];
      const int side = connection.side[0] == rank ? 0 : 1;
      if (!connection.open[side] || (connection.broken && event.kind == Event::kBytes)) return;
      if (event.kind == Event::kClosed) connection.open[side] = false;
    }
    step(rank, event);
  }

  void step(int rank, const Event& event) {
    Process& process = processes_[rank];
    ++steps_;
    std::vector<Action> actions;
    std::swap(actions, spare_);
    actions.clear();
    if (process.record != nullptr) process.record->add(process.core, now_ + clock_[process.host], event);
    process.core.step(now_ + clock_[process.host], event, &actions);
    if (trace_) print(rank, event, actions);
    for (Action& action : actions) carry_out(rank, action);
    actions.clear();
    spare_ = std::move(actions);
    if (process.core.is_over() && !process.left) {
      process.left = true;
      process.left_early = now_ < process.leaves_by;
      at(now_ + random_.below(5 * kMillisecond), [=] { kill(rank); });
    }
    wake(rank);
  }

  void wake(int rank) {
    Process& process = processes_[rank];
    const Nanos wanted = process.core.wake_at();
    if (wanted == kNever || !process.alive) return;
    const Nanos time = std::max(now_, wanted - clock_[process.host]);
    if (time >= process.woken_at) return;
    process.woken_at = time;
    Event event;
    post(time, rank, std::move(event));
  }

  void carry_out(int rank, Action& action) {
    Process& process = processes_[rank];
    switch (action.kind) {
      case Action::kDial: dial(rank, action.proc); break;
      case Action::kClose: {
        const Connection& connection = connections_[action.connection];
        const int side = connection.side[0] == rank ? 0 : 1;
        if (connection.open[side]) close_side(action.connection, side);
        break;
      }
      case Action::kSend: {
        Connection& connection = connections_[action.connection];
        const int side = connection.side[0] == rank ? 0 : 1;
        ++process.frames;
        check_count(rank);
        Event event;
        event.kind = Event::kBytes;
        event.bytes = *action.frames;
        if (connection.open[side] && !connection.broken) on_connection(action.connection, 1 - side, std::move(event));
        break;
      }
      case Action::kProbe: {
        Connection& connection = connections_[action.connection];
        const int side = connection.side[0] == rank ? 0 : 1;
        const int peer = connection.side[1 - side];
        Nanos& acknowledged = connection.acknowledged[side];
        if (connection.arrival[1 - side] + kMillisecond < now_ && !connection.broken &&
            !is_cut(processes_[peer].host, process.host)) {
          acknowledged = connection.arrival[1 - side];
        }
        Event event;
        event.age = now_ - acknowledged;
        event.kind = Event::kAcked;
        event.connection = action.connection;
        post(now_ + 1'000, rank, std::move(event));
        break;
      }
      case Action::kBoard:
        for (const int mate : on_host_[process.host]) {
          Event event;
          event.kind = Event::kBoard;
          event.proc = proc_of(rank);
          event.bytes = action.bytes;
          if (mate != rank) post_local(mate, std::move(event));
        }
        break;
      case Action::kBeat: {
        const auto& mates = on_host_[process.host];
        ++beats_[rank];
        Event event;
        event.kind = Event::kBeats;
        event.procs.reserve(mates.size());
        for (std::size_t i = 0; i < mates.size(); ++i) {
          const std::uint64_t beats = beats_[mates[i]];
          if (mates[i] != rank && beats != process.seen[i]) event.procs.push_back(proc_of(mates[i]));
          process.seen[i] = beats;
        }
        post_local(rank, std::move(event));
        break;
      }
      case Action::kLook:
        if (processes_[rank_of(action.proc)].exiting) {
          Event event;
          event.kind = Event::kExiting;
          event.proc = action.proc;
          post(now_ + 20'000, rank, std::move(event));
        }
        break;
      case Action::kDoom: check_doom(rank, action); break;
      case Action::kVerdict: check_verdict(rank, action); break;
      case Action::kRefuse: fail("rank " + std::to_string(rank) + " refuses: " + action.bytes); break;
      default: break;
    }
  }

  void fail(const std::string& text) {
    if (failure_.empty()) failure_ = "at " + std::to_string(now_ / 1e9) + " s: " + text;
  }

  void check_doom(int rank, const Action& action) {
    Process& process = processes_[rank_of(action.proc)];
    if (process.declared) return;
    process.declared = true;
    const bool is_gone = process.died >= 0 || (process.left && !process.alive);
    const std::string text = "rank " + std::to_string(rank) + " takes rank " + std::to_string(rank_of(action.proc)) +
                             " for dead (flags " + std::to_string(action.flags) + "): " + action.bytes;
    if ((action.flags & kExited) != 0 && !is_gone) fail(text + ", which lives");
    const bool lossy = std::any_of(faults_.begin(), faults_.end(), [](const std::string& name) {
      return name == "drop" || name == "garbage" || name == "power_off" || name == "partition" || name == "one_way" ||
             name == "short_cut" || name == "pause" || name == "pause_lead" || name == "pause_two" ||
             name == "pause_host" || name == "large" || name == "depart";  // two farewells cross
    });
    if (process.left_early && !lossy) fail(text + ", which left");
    const auto cut = cuts_.find({process.host, processes_[rank].host});
    const bool was_cut = cut != cuts_.end() && cut->second.second > now_ - config_.limit;
    if ((action.flags & kStopped) != 0 && !is_gone && !was_cut) {
      const auto& mates = on_host_[process.host];
      if (std::any_of(mates.begin(), mates.end(), [&](int mate) {
            const Process& each = processes_[mate];
            return each.alive && !each.exiting && !each.left && !each.declared && each.runs &&
                   now_ - each.ran_since > kSecond / 2;
          })) {
        fail(text + ", whose host runs");
      }
    }
    if ((action.flags & kUnreachable) != 0 && !is_gone) {
      Nanos cut_for = 0;
      for (const auto& [pair, times] : cuts_) {
        const bool of_both = (pair.first == process.host && pair.second == processes_[rank].host) ||
                             (pair.second == process.host && pair.first == processes_[rank].host);
        if (of_both && times.second > now_ - kRecovers) cut_for = std::max(cut_for, now_ - times.first);
      }
      if (cut_for < config_.limit - 2 * config_.beat) fail(text + ", which is reachable");
    }
  }

  bool has_witness(int rank) const {
    const auto& mates = on_host_[processes_[rank].host];
    return std::any_of(mates.begin(), mates.end(), [&](int mate) {
      const Process& each = processes_[mate];
      return mate != rank && each.alive && !each.exiting && each.runs && each.joined && !each.left && !each.declared;
    });
  }

  void expect_death(int rank, Nanos when) {
    if (processes_[rank].left) return;
    const bool alone = !has_witness(rank);
    const auto& mates = on_host_[processes_[rank].host];
    const bool stopped = std::any_of(mates.begin(), mates.end(), [&](int mate) {
      return mate != rank && processes_[mate].alive && !processes_[mate].left;
    });
    Nanos bound = kSecond;
    // Nothing runs in its live domain: the death is found by a silent connection.
    if (alone && stopped) bound += config_.beat * 5 / 2 + config_.tick;
    if (!up_[processes_[rank].host]) bound += config_.limit;
    at(when + bound, [=] { check_known(rank, bound, when); });
  }

  void check_known(int dead, Nanos bound, Nanos when) {
    const Process& victim = processes_[dead];
    if (cut_hosts_.count(victim.host) != 0 || faults_.count("clock") != 0) return;
    if (!up_[victim.host] && bound < config_.limit) return;  // the whole host died afterwards
    if (victim.alive && !has_witness(dead)) return;          // exiting, and its witnesses are gone
    if (up_[victim.host]) {  // a witness that stopped or exited in between doesn't count
      const auto& mates = on_host_[victim.host];
      const bool steady = std::all_of(mates.begin(), mates.end(), [&](int mate) {
        const Process& each = processes_[mate];
        const bool changed = each.ran_since > when - kSecond || (each.joined && joins_at_[mate] > when - kSecond);
        return mate == dead || !each.alive || (!changed && (each.runs || bound > kSecond || each.exiting == false));
      });
      if (!steady) return;
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      const Process& process = processes_[rank];
      if (!is_survivor(rank) || !process.runs || process.ran_since > when - kSecond || !process.joined ||
          joins_at_[rank] > when - kSecond || cut_hosts_.count(process.host) != 0) {
        continue;
      }
      // Its host received nothing while two leads stopped in turn, or one failed. One such lead is enough after a large
      // process's late exit, or if the victim's whole host exited: the hunt begins again.
      const auto& mates = on_host_[process.host];
      const auto deaf = std::count_if(mates.begin(), mates.end(), [&](int mate) {
        const Process& each = processes_[mate];
        return mate < rank && (!each.runs || each.ran_since > when || each.declared || each.exiting);
      });
      const bool is_late = deaf + (victim.large || (up_[victim.host] && !has_witness(dead)) ? 1 : 0) > 1 ||
                           faults_.count("fail") * deaf > 0;
      if (process.host != victim.host && deaf > 0 && is_late && faults_.count("new_lead") == 0) continue;
      if (!knows(rank, dead)) {
        fail("rank " + std::to_string(rank) + " doesn't know after " + std::to_string((now_ - when) / 1e9) +
             " s that rank " + std::to_string(dead) + " is dead");
        return;
      }
    }
  }

  bool is_survivor(int rank) const {
    const Process& process = processes_[rank];
    return process.alive && !process.exiting && !process.left && !process.declared;
  }

  bool knows(int rank, int dead) const {
    for (const auto& [proc, end] : processes_[rank].core.ends()) {
      if (proc == proc_of(dead)) return end.is_death() || (end.flags & kLeft) != 0;
    }
    return false;
  }

  void check_verdict(int rank, const Action& action) {
    Agreement& agreement = *agreements_[std::stoul(action.key.purpose)];
    if (!agreement.ended.insert(rank).second) return fail("rank " + std::to_string(rank) + " has two verdicts");
    check_equal(&agreement, rank, action);
    if (agreement.decided < 0) agreement.decided = now_;
    const Verdict& verdict = *action.verdict;
    if (verdict.kind == Verdict::kAgreed && agreement.called.size() < agreement.members.size()) {
      fail("agreement " + action.key.purpose + " agrees though some have not called");
    }
    const bool calm = std::none_of(faults_.begin(), faults_.end(), [](const std::string& name) {
      return name == "pause" || name == "pause_lead" || name == "pause_host" || name == "partition" ||
             name == "one_way" || name == "short_cut" || name == "power_off" || name == "clock" || name == "large" ||
             name == "pause_two" || name == "slow" || name == "depart" || name == "new_lead";
    });
    if (verdict.kind == Verdict::kUndecided && calm && !processes_[rank].declared && processes_[rank].leaves_by < 0) {
      fail("rank " + std::to_string(rank) + ": agreement " + action.key.purpose + " is undecided without a reason");
    }
    for (const Proc proc : verdict.culprits) {
      const Process& culprit = processes_[rank_of(proc)];
      if (verdict.kind == Verdict::kEnded && culprit.died < 0 && culprit.leaves_by < 0 && !culprit.declared) {
        fail("agreement " + action.key.purpose + " names a rank that lives");
      }
      const auto called = agreement.called.find(rank_of(proc));
      if (verdict.kind == Verdict::kMissing && calm && called != agreement.called.end() &&
          called->second < agreement.decided - 400 * kMillisecond) {
        fail("agreement " + action.key.purpose + " misses a rank that has called");
      }
    }
  }

  // Ranks that leave early count for *agreed*, unless a member died, left at its deadline, or was cut off.
  bool counts(int rank, const Agreement& agreement) const {
    if (cut_hosts_.count(processes_[rank].host) != 0) return false;
    if (is_survivor(rank) && processes_[rank].leaves_by < 0) return true;
    const bool is_agreed = std::any_of(agreement.given.begin(), agreement.given.end(),
                                       [](const auto& each) { return each.verdict->kind == Verdict::kAgreed; });
    return is_agreed && std::all_of(agreement.members.begin(), agreement.members.end(), [&](int member) {
             const Process& each = processes_[member];
             const bool has_left_late = each.left && !each.left_early;
             return each.died < 0 && !each.declared && !has_left_late && cut_hosts_.count(each.host) == 0;
           });
  }

  void check_equal(Agreement* agreement, int rank, const Action& action) {
    if (action.verdict->kind == Verdict::kUndecided) return;
    if (faults_.count("depart") != 0) at(now_ + random_.below(kMillisecond), [this, rank] { leave(rank); });
    auto same = std::find_if(agreement->given.begin(), agreement->given.end(), [&](const Agreement::Given& each) {
      return each.verdict->kind == action.verdict->kind && each.verdict->values == action.verdict->values &&
             each.verdict->culprits == action.verdict->culprits;
    });
    if (same == agreement->given.end()) {
      same = agreement->given.insert(same, {action.verdict, {}});
    }
    same->ranks.push_back(rank);
    const auto survivors = std::count_if(agreement->given.begin(), agreement->given.end(), [&](const auto& each) {
      return std::any_of(each.ranks.begin(), each.ranks.end(), [&](int one) { return counts(one, *agreement); });
    });
    if (survivors > 1) fail("agreement " + action.key.purpose + " has two verdicts");
  }

  void check_end() {
    for (int dead = 0; dead < ranks_; ++dead) {
      if (processes_[dead].died < 0) continue;
      for (int rank = 0; rank < ranks_; ++rank) {
        const Process& process = processes_[rank];
        if (!is_survivor(rank) || !process.runs || !process.joined || cut_hosts_.count(process.host) != 0) continue;
        const Nanos sees_in = up_[processes_[dead].host] ? 2 * kSecond : config_.limit + kSecond;
        if (now_ - process.ran_since < sees_in || now_ - processes_[dead].died < config_.limit + 2 * kSecond) continue;
        if (!knows(rank, dead)) {
          return fail("rank " + std::to_string(rank) + " never learns that rank " + std::to_string(dead) + " is dead");
        }
      }
    }
  }

  // Without faults, and in a storm, only leads have connections: one to each other host.
  void check_count(int rank) {
    const Process& process = processes_[rank];
    if (!is_counted_ || process.calls) return;
    const bool lead = on_host_[process.host].front() == rank;
    const double beats =
        static_cast<double>(storm_ >= 0 ? std::min(storm_, now_) : now_) / static_cast<double>(config_.beat);
    // Four frames of greeting, the beats, and in a storm the farewell.
    const bool few = process.connections < hosts_ && static_cast<double>(process.frames) <= (hosts_ - 1) * (beats + 7);
    if (lead ? few : process.connections == 0 && process.frames == 0) return;
    fail("rank " + std::to_string(rank) + (lead ? ", a lead, has " : ", which is no lead, has ") +
         std::to_string(process.connections) + " connections, " + std::to_string(process.frames) + " frames, " +
         std::to_string(process.dials) + " dials");
  }

  void print(int rank, const Event& event, const std::vector<Action>& actions) const {
    std::printf("%.6f rank %d event %d connection %d proc %d\n", now_ / 1e9, rank, event.kind, event.connection,
                event.proc == 0 ? -1 : rank_of(event.proc));
    for (const Action& action : actions) {
      std::printf("           action %d connection %d proc %d flags %d %s\n", action.kind, action.connection,
                  action.proc == 0 ? -1 : rank_of(action.proc), action.flags,
                  action.kind == Action::kLog || action.kind == Action::kDoom ? action.bytes.c_str() : "");
      if (action.kind == Action::kSend && action.frames->size() >= kHeadBytes) {
        std::printf("             frame %d, %zu bytes\n", (*action.frames)[6], action.frames->size());
      }
    }
  }

  Random random_;
  int ranks_, hosts_ = 0;
  bool trace_;
  Config config_;
  Nanos now_ = 0, storm_ = -1;
  long steps_ = 0;
  bool is_counted_ = false;
  int slow_percent_ = 0;
  std::uint64_t order_ = 0, nonces_ = 0;
  std::shared_ptr<const Roster> roster_;
  std::deque<Process> processes_;
  std::vector<std::vector<int>> on_host_;
  std::vector<std::uint64_t> beats_;
  std::vector<bool> up_;
  std::vector<Nanos> clock_, joins_at_;
  std::map<std::pair<int, int>, std::pair<Nanos, Nanos>> cuts_;
  std::set<int> cut_hosts_;
  std::deque<Connection> connections_;
  std::vector<std::shared_ptr<Agreement>> agreements_;
  std::set<std::string> faults_;
  std::vector<std::pair<Nanos, std::string>> schedule_;
  std::priority_queue<Item> queue_;
  std::deque<std::function<void()>> operations_;
  std::deque<Event> events_;
  std::vector<std::size_t> free_;
  std::vector<Action> spare_;
  std::string failure_;
};

int replay_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const Bytes bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::string text = describe(bytes);
  std::printf("%s", text.c_str());
  return text.find("same digest") == std::string::npos ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t seed = 1, seeds = 1;
  int ranks = 16, hosts = 0;
  std::string fault, record;
  bool trace = false;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--trace") {
      trace = true;
      continue;
    }
    if (name == "--seed") seed = std::strtoull(value, nullptr, 10);
    else if (name == "--seeds") seeds = std::strtoull(value, nullptr, 10);
    else if (name == "--ranks") ranks = std::atoi(value);
    else if (name == "--hosts") hosts = std::atoi(value);
    else if (name == "--fault") fault = value;
    else if (name == "--record") record = value;
    else if (name == "--replay") return replay_file(value);
    else return std::fprintf(stderr, "unknown argument %s\n", argv[i]), 2;
    ++i;
  }
  long steps = 0;
  for (std::uint64_t each = seed; each < seed + seeds; ++each) {
    Simulator simulator(each, ranks, hosts, fault, trace);
    if (!record.empty()) simulator.record(0);
    const std::string failure = simulator.run();
    if (!record.empty()) std::ofstream(record, std::ios::binary) << simulator.take_record(0);
    steps += simulator.steps();
    if (!failure.empty()) {
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(each), failure.c_str());
      simulator.print_schedule();
      return 1;
    }
  }
  std::printf("%llu seeds, %ld steps: all holds\n", static_cast<unsigned long long>(seeds), steps);
  return 0;
}
