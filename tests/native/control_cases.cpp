// Single cases of the control core: a real core, and peers made of frames.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core.h"
#include "hmac.h"

using namespace parallel_state::control;

namespace {

int failures = 0;

void check(bool holds, const char* text, int line) {
  if (holds) return;
  ++failures;
  std::printf("  line %d: %s\n", line, text);
}
#define CHECK(holds) check(holds, #holds, __LINE__)

Event event_of(Event::Kind kind, int connection = -1, Proc proc = 0) {
  Event event;
  event.kind = kind;
  event.connection = connection;
  event.proc = proc;
  event.nonce = Bytes(kNonceBytes, 'n');
  return event;
}

Proc proc_of(int rank) { return static_cast<Proc>(rank) + 11; }

struct World {
  explicit World(const std::vector<int>& hosts, int me = 0, bool meets = true, Config config = Config())
      : core(proc_of(me), "token" + std::to_string(me), config) {
    std::vector<Member> members;
    for (std::size_t host = 0; host < hosts.size(); ++host) {
      for (int i = 0; i < hosts[host]; ++i) {
        const int rank = static_cast<int>(members.size());
        members.push_back({rank, proc_of(rank), host, {"host", 1, "token" + std::to_string(rank)}, 0, 0});
      }
    }
    self = me;
    roster = std::make_shared<const Roster>(std::move(members));
    if (meets) meet();
  }

  void meet() {
    Event event = event_of(Event::kMeet);
    event.roster = roster;
    step(event);
  }

  void step(const Event& event) {
    actions.clear();
    core.step(now, event, &actions);
    auto asked = std::count_if(actions.begin(), actions.end(), [](const auto& a) { return a.kind == Action::kBeat; });
    for (; asked > 0; --asked) core.step(now, event_of(Event::kBeats), &actions);
  }

  void pass(Nanos time, const std::vector<Proc>& beats = {}) {
    std::vector<Action> all;
    for (const Nanos end = now + time; now < end;) {
      now = std::min(end, std::max(now + 1, core.wake_at()));
      step(Event());
      all.insert(all.end(), actions.begin(), actions.end());
      Event event = event_of(Event::kBeats);
      event.procs = beats;
      step(event);
      all.insert(all.end(), actions.begin(), actions.end());
    }
    actions = std::move(all);
  }

  Bytes frame(FrameKind kind, int from, Bytes body) {
    return encode(Frame{kind, roster->world, proc_of(from), std::move(body)});
  }

  Bytes proof(int from, bool dialer) {
    const int dialed = dialer ? self : from;
    Writer writer;
    writer.number(static_cast<std::uint8_t>(dialer)).text(Bytes(kNonceBytes, dialer ? 'p' : 'n'));
    writer.text(Bytes(kNonceBytes, dialer ? 'n' : 'p'));
    writer.number(proc_of(dialer ? from : self)).number(proc_of(dialed));
    return hmac_sha256("token" + std::to_string(dialed), writer.take());
  }

  void identify(int connection, int from, bool dialer) {
    bytes(connection, encode(Hello{}) + frame(FrameKind::kNonce, from, Bytes(kNonceBytes, 'p')) +
                          frame(FrameKind::kIdentity, from, proof(from, dialer)));
  }

  void accept(int connection, int from) {
    step(event_of(Event::kAccepted, connection));
    identify(connection, from, true);
  }

  void answer(int connection, int to) {
    step(event_of(Event::kDialed, connection, proc_of(to)));
    identify(connection, to, false);
  }

  void bytes(int connection, Bytes bytes) {
    Event event = event_of(Event::kBytes, connection);
    event.bytes = std::move(bytes);
    step(event);
  }

  void beat(int connection, int from) {
    bytes(connection, frame(FrameKind::kBeat, from, Writer().number(kEmptyDigest).take()));
  }

  void leave() {
    Event event = event_of(Event::kLeave);
    event.deadline = now + kSecond;
    step(event);
  }

  void read_board(int from, const Bytes& bytes) {
    Event event = event_of(Event::kBoard, -1, proc_of(from));
    event.bytes = bytes;
    step(event);
  }

  void board(int from, const std::vector<int>& left, const std::vector<std::pair<Nanos, bool>>& silences = {}) {
    Writer writer;
    writer.number(static_cast<std::uint32_t>(left.size()));
    for (const int rank : left) writer.number(proc_of(rank)).number(std::uint8_t{kLeft}).number(proc_of(rank)).text("");
    put(&writer, silences);
    read_board(from, writer.take());
  }

  void state(int connection, int from, Proc proc, std::uint8_t flags) {
    Writer writer;
    writer.number(1U).number(proc).number(flags).number(proc_of(from)).text("");
    bytes(connection, frame(FrameKind::kState, from, writer.take()));
  }

  void call(std::vector<int> members, const std::string& purpose, Nanos timeout, Bytes value = "v") {
    auto call = std::make_shared<Call>();
    call->purpose = purpose;
    for (const int member : members) call->members.push_back(proc_of(member));
    call->value = std::move(value);
    call->deadline = timeout == kNever ? kNever : now + timeout;
    Event event = event_of(Event::kCall);
    event.call = call;
    step(event);
  }

  Bytes value(int from, const std::vector<int>& members, const std::string& purpose, const Bytes& value,
              std::uint32_t seat, FrameKind kind = FrameKind::kValue, bool lists_members = true) {
    std::vector<Proc> procs;
    for (const int member : members) procs.push_back(proc_of(member));
    Writer writer;
    writer.number(digest_of(procs)).text(purpose).number(0U).number(seat).number(0U);
    if (!lists_members) procs.clear();
    writer.number(Nanos{kSecond}).text(value).number(static_cast<std::uint32_t>(procs.size()));
    for (const Proc proc : procs) writer.number(proc);
    writer.number(std::uint8_t{0});
    return frame(kind, from, writer.take());
  }

  Bytes without_verdict(int from, const std::vector<int>& members, std::uint32_t seat, std::uint32_t ballot) {
    std::vector<Proc> procs;
    for (const int member : members) procs.push_back(proc_of(member));
    Writer writer;
    writer.number(digest_of(procs)).text("p").number(0U).number(seat).number(ballot).number(Nanos{0}).text("");
    writer.number(0U).number(std::uint8_t{0});
    return frame(FrameKind::kAnswer, from, writer.take());
  }

  const Action* find(Action::Kind kind, int connection = -1) const {
    for (const Action& action : actions) {
      if (action.kind == kind && (connection < 0 || action.connection == connection)) return &action;
    }
    return nullptr;
  }

  const Action* sent(int connection, FrameKind kind) const {
    for (const Action& action : actions) {
      const bool is_frame = action.kind == Action::kSend && action.frames->size() >= kHeadBytes;
      if (is_frame && action.connection == connection && (*action.frames)[6] == static_cast<char>(kind)) return &action;
    }
    return nullptr;
  }

  bool knows(int rank, std::uint8_t flags) const {
    for (const auto& [proc, end] : core.ends()) {
      if (proc == proc_of(rank)) return end.flags == flags;
    }
    return false;
  }

  Core core;
  int self = 0;
  Nanos now = 1000 * kSecond;
  std::shared_ptr<const Roster> roster;
  std::vector<Action> actions;
};

void vectors_of_hmac() {
  const auto hex = [](const std::string& bytes) {
    std::string text;
    char two[3];
    for (const unsigned char each : bytes) std::snprintf(two, sizeof(two), "%02x", each), text += two;
    return text;
  };
  // RFC 6234, 8.5: tests 1 and 2; RFC 4231: cases 1, 2, 3 and 6.
  CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

void a_token_is_proved() {
  World world({1, 1});
  world.accept(3, 1);
  CHECK(world.find(Action::kClose) == nullptr);
  world.step(event_of(Event::kAccepted, 4));
  world.bytes(4, encode(Hello{}) + world.frame(FrameKind::kNonce, 1, Bytes(kNonceBytes, 'p')) +
                     world.frame(FrameKind::kIdentity, 1, world.proof(1, false)));
  CHECK(world.find(Action::kClose, 4) != nullptr);
}

void a_stranger_of_another_version_is_only_logged() {
  World world({1, 1});
  world.step(event_of(Event::kAccepted, 3));
  world.bytes(3, encode(Hello{9, 9, 1}));
  CHECK(world.find(Action::kRefuse) == nullptr && world.find(Action::kLog) != nullptr);
  CHECK(world.find(Action::kClose, 3) != nullptr);
  world.step(event_of(Event::kDialed, 4, proc_of(1)));
  world.bytes(4, encode(Hello{9, 9, 1}));
  CHECK(world.find(Action::kRefuse) != nullptr);
}

void flags_that_nobody_has_are_malformed() {
  for (const int flags : {0, 64, 128}) {
    World world({1, 1});
    world.accept(3, 1);
    world.state(3, 1, proc_of(1), static_cast<std::uint8_t>(flags));
    CHECK(world.find(Action::kClose, 3) != nullptr && world.core.ends().empty());
  }
}

void ends_of_no_member_are_not_kept() {
  World world({1, 1});
  world.accept(3, 1);
  world.state(3, 1, 999, kExited);
  CHECK(world.core.ends().empty() && world.find(Action::kClose) == nullptr);
}

void a_state_is_not_starved_by_other_frames() {
  World world({2, 1});
  world.accept(3, 2);
  world.beat(3, 2);
  world.board(1, {1});
  bool told = false;
  for (int i = 0; i < 30 && !told; ++i) {
    world.bytes(3, world.value(2, {0, 2}, "p", "x", 1));
    world.pass(100 * kMillisecond);
    told = world.sent(3, FrameKind::kState) != nullptr;
  }
  CHECK(told);
}

void a_leaver_answers_all_its_calls() {
  World world({1, 1});
  world.call({0, 1}, "first", 10 * kSecond);
  Event leave = event_of(Event::kLeave);
  leave.deadline = world.now;
  world.step(leave);
  CHECK(world.find(Action::kVerdict) != nullptr && world.find(Action::kVerdict)->key.purpose == "first");
  CHECK(world.core.is_over());
  world.call({0, 1}, "second", 10 * kSecond);
  CHECK(world.find(Action::kVerdict) != nullptr && world.find(Action::kVerdict)->key.purpose == "second");
}

void a_lead_waits_for_its_domain() {
  World world({2, 1});
  world.accept(3, 2);
  world.beat(3, 2);
  world.leave();
  CHECK(!world.core.is_over() && world.sent(3, FrameKind::kState) == nullptr);
  world.board(1, {1});
  CHECK(world.core.is_over() && world.sent(3, FrameKind::kState) != nullptr);
}

void a_last_leaver_connects_to_those_that_never_heard_of_it() {
  World world({1, 1}, 0);
  world.leave();
  CHECK(!world.core.is_over() && world.find(Action::kDial) != nullptr);
  world.answer(3, 1);
  CHECK(world.core.is_over() && world.sent(3, FrameKind::kState) != nullptr);
}

// The rest of its domain may exit before the next lead connects.
void a_lead_that_leaves_first_connects_to_those_that_never_heard_of_it() {
  World world({2, 1}, 0);
  world.leave();
  world.pass(400 * kMillisecond, {proc_of(1)});
  CHECK(!world.core.is_over() && world.find(Action::kDial) != nullptr);
  world.answer(3, 2);
  CHECK(world.core.is_over() && world.sent(3, FrameKind::kState) != nullptr);
}

void a_leaver_that_its_leads_farewell_reports_dials_nobody() {
  for (const bool is_reported : {true, false}) {
    World world({2, 1}, 1);
    Event leave = event_of(Event::kLeave);
    leave.deadline = world.now + kSecond;
    world.core.step(world.now, leave, &world.actions);
    world.board(0, is_reported ? std::vector<int>{0, 1} : std::vector<int>{0});
    for (int i = 0; i < 2; ++i) world.core.step(world.now, event_of(Event::kBeats), &world.actions);
    CHECK((world.find(Action::kDial) == nullptr) == is_reported);
    CHECK(world.core.is_over() == is_reported);
  }
}

void a_leaver_publishes_a_farewell_that_arrives_meanwhile() {
  World world({2, 1}, 1);
  world.accept(3, 2);
  Event leave = event_of(Event::kLeave);
  leave.deadline = world.now + kSecond;
  world.actions.clear();
  world.core.step(world.now, leave, &world.actions);
  Event farewell = event_of(Event::kBytes, 3);
  farewell.bytes = world.frame(
      FrameKind::kState, 2,
      Writer().number(1U).number(proc_of(2)).number(std::uint8_t{kLeft}).number(proc_of(2)).text("").take());
  world.core.step(world.now, farewell, &world.actions);
  world.actions.clear();
  for (int i = 0; i < 2; ++i) world.core.step(world.now, event_of(Event::kBeats), &world.actions);
  CHECK(world.core.is_over() && world.find(Action::kBoard) != nullptr);
}

// Else the next decider might decide before a caller received the verdict.
void a_decider_that_leaves_waits_until_its_callers_have_the_verdict() {
  for (const bool is_done : {true, false}) {
    World world({1, 1});
    world.accept(3, 1);
    world.call({0, 1}, "p", 10 * kSecond);
    world.bytes(3, world.value(1, {0, 1}, "p", "x", 1));
    CHECK(world.sent(3, FrameKind::kVerdict) != nullptr);
    world.leave();
    CHECK(!world.core.is_over());
    if (is_done) world.bytes(3, world.value(1, {0, 1}, "p", "", 1, FrameKind::kDone));
    else world.pass(kSecond);
    CHECK(world.core.is_over());
  }
  World missing({2});  // rank 1 hasn't called
  missing.accept(3, 1);
  missing.call({0, 1}, "p", 2 * kSecond);
  missing.pass(2 * kSecond);
  missing.leave();
  CHECK(missing.core.is_over());
}

void a_refused_call_names_its_key() {
  World world({1, 1});
  for (const auto& [members, size] :
       std::vector<std::pair<std::vector<int>, std::size_t>>{{{1}, 1}, {{0, 9}, 1}, {{0, 1}, 4097}}) {
    world.call(members, "p", kSecond, Bytes(size, 'x'));
    CHECK(world.find(Action::kRefuse) != nullptr && world.find(Action::kRefuse)->key.purpose == "p");
    CHECK(world.core.rounds() == 0);
  }
  world.call({0, 1}, "p", kSecond);
  world.call({0, 1}, "p", kSecond);
  CHECK(world.find(Action::kRefuse) != nullptr);
}

void a_call_without_a_deadline() {
  World world({1, 1});
  world.now -= 10 * kSecond;
  world.call({0, 1}, "p", kNever);
  world.pass(5 * kSecond);
  CHECK(world.find(Action::kVerdict) == nullptr);
}

void a_cancelled_call_that_was_forgotten_leaves_nothing() {
  World world({1, 1});
  auto call = std::make_shared<Call>();
  call->purpose = "p";
  call->members = {proc_of(0), proc_of(1)};
  Event cancel = event_of(Event::kCancel);
  cancel.call = call;
  world.step(cancel);
  CHECK(world.core.rounds() == 0);
}

void a_cancelled_call_ends_soon_though_the_decider_is_silent() {
  World world({1, 1}, 1);
  world.call({0, 1}, "p", 100 * kSecond);
  auto call = std::make_shared<Call>();
  call->purpose = "p";
  call->members = {proc_of(0), proc_of(1)};
  Event cancel = event_of(Event::kCancel);
  cancel.call = call;
  world.step(cancel);
  world.pass(kSecond);
  CHECK(world.find(Action::kVerdict) != nullptr);
}

void agreements_of_others_take_bounded_memory() {
  World world({1, 1});
  world.accept(3, 1);
  std::vector<int> members{0, 1};
  for (int i = 0; i < 12'000; ++i) {
    world.bytes(3, world.value(1, members, "p" + std::to_string(i), Bytes(4096, 'x'), 1));
  }
  CHECK(world.core.rounds() < 10'000 && world.core.rounds() > 1000);
  world.pass(3 * kSecond);
  world.bytes(3, world.value(1, members, "next", "x", 1));
  CHECK(world.core.rounds() <= 300);
}

void a_value_of_a_round_that_expired() {
  World world({1, 1, 1}, 1);  // rank 2 wrongly takes this one for the decider
  world.accept(3, 2);
  world.bytes(3, world.value(2, {0, 1, 2}, "p", "x", 2));
  CHECK(world.core.rounds() == 1);
  world.pass(3 * kSecond);
  world.bytes(3, world.value(2, {0, 1, 2}, "p", "y", 2, FrameKind::kValue, false));
  CHECK(world.core.rounds() == 0);  // its members are unknown now
  world.bytes(3, world.value(2, {0, 1, 2}, "p", "y", 2));
  CHECK(world.core.rounds() == 1 && world.find(Action::kClose, 3) == nullptr);
}

void an_agreement_that_was_only_asked_about_is_forgotten() {
  World world({4}, 3);
  world.accept(3, 1);
  world.bytes(3, world.value(1, {0, 1, 2, 3}, "p", "", 1, FrameKind::kAsk));
  CHECK(world.find(Action::kSend, 3) != nullptr);
  for (const int rank : {0, 1}) world.step(event_of(Event::kEnded, -1, proc_of(rank)));
  world.pass(700 * kSecond, {proc_of(2)});
  world.accept(4, 2);
  world.bytes(4, world.value(2, {2, 3}, "q", "x", 0));
  CHECK(world.core.rounds() == 1);
}

void a_seat_of_another_opens_nothing() {
  World world({1, 1, 1});
  world.accept(3, 1);
  world.bytes(3, world.value(1, {0, 1, 2}, "p", "x", 2));
  CHECK(world.core.rounds() == 0 && world.find(Action::kClose, 3) != nullptr);
}

void a_verdict_of_wrong_size_is_malformed() {
  World world({1, 1}, 1);
  world.accept(3, 0);
  world.call({0, 1}, "p", kSecond);
  Writer writer;
  writer.number(digest_of(std::vector<Proc>{proc_of(0), proc_of(1)}))
      .text("p")
      .number(0U)
      .number(0U)
      .number(0U)
      .number(Nanos{0});
  writer.text("")
      .number(0U)
      .number(std::uint8_t{1})
      .number(std::uint8_t{Verdict::kAgreed})
      .number(1U)
      .text("x")
      .number(0U);
  world.bytes(3, world.frame(FrameKind::kVerdict, 0, writer.take()));
  CHECK(world.find(Action::kVerdict) == nullptr && world.find(Action::kClose, 3) != nullptr);
}

void a_verdict_goes_where_the_value_came_from() {
  // Rank 0 exited, so rank 1 dials rank 2 to ask it, while rank 2's value arrives over another connection.
  World decider({1, 1, 1}, 1);
  decider.accept(3, 2);
  decider.call({0, 1, 2}, "p", kSecond);
  decider.bytes(3, decider.value(2, {0, 1, 2}, "p", "x", 2));
  decider.state(3, 2, proc_of(0), kExited);
  CHECK(decider.sent(3, FrameKind::kAsk) != nullptr);
  decider.answer(4, 2);
  decider.bytes(4, decider.without_verdict(2, {0, 1, 2}, 2, 1));
  CHECK(decider.sent(3, FrameKind::kVerdict) != nullptr);
}

void undecided_names_whom_the_decider_waits_for() {
  // Rank 0 exited. Rank 1 decides and waits for rank 2, so rank 3 must name rank 2.
  World decider({1, 1, 1, 1}, 1);
  decider.accept(3, 3);
  decider.state(3, 3, proc_of(0), kExited);
  decider.call({0, 1, 2, 3}, "p", 4 * kSecond);
  decider.bytes(3, decider.value(3, {0, 1, 2, 3}, "p", "x", 3));
  decider.bytes(3, decider.without_verdict(3, {0, 1, 2, 3}, 3, 1));
  decider.pass(1200 * kMillisecond);
  const Action* hint = decider.sent(3, FrameKind::kVerdict);
  CHECK(hint != nullptr);
  if (hint == nullptr) return;
  World member({1, 1, 1, 1}, 3);
  member.accept(5, 1);
  member.state(5, 1, proc_of(0), kExited);
  member.call({0, 1, 2, 3}, "p", 2 * kSecond);
  member.bytes(5, *hint->frames);
  member.pass(3 * kSecond);
  const Action* verdict = member.find(Action::kVerdict);
  CHECK(verdict != nullptr && verdict->verdict->kind == Verdict::kUndecided);
  if (verdict != nullptr) CHECK(verdict->verdict->culprits == std::vector<Proc>{proc_of(2)});
}

void a_refused_call_does_not_delay_the_watch() {
  World world({2, 1}, 2);
  world.answer(3, 0);
  world.beat(3, 0);
  world.call({1, 2}, "p", kSecond);
  CHECK(world.find(Action::kDial) != nullptr);
  world.step(event_of(Event::kRefused, -1, proc_of(1)));
  world.step(event_of(Event::kClosed, 3));
  const auto dials = [](const Action& action) { return action.kind == Action::kDial && action.proc == proc_of(1); };
  CHECK(std::any_of(world.actions.begin(), world.actions.end(), dials));
}

// Connected to a stopped process, the only one of another domain.
World with_stopped_peer() {
  World world({1, 1});
  world.accept(3, 1);
  world.beat(3, 1);
  return world;
}

void a_stopped_process_whose_kernel_answers_is_stopped() {
  World world = with_stopped_peer();
  bool stopped = false, dialed_in_time = true;
  for (int i = 0; i < 250 && !stopped; ++i) {
    world.pass(100 * kMillisecond);
    stopped = world.knows(1, kStopped);
    if (world.find(Action::kClose, 3) != nullptr && i < 190) dialed_in_time = false;
    if (world.find(Action::kProbe) == nullptr) continue;
    Event acked = event_of(Event::kAcked, 3);
    acked.age = 50 * kMillisecond;
    world.step(acked);
  }
  CHECK(stopped && dialed_in_time);
}

void a_full_window_is_replaced_by_a_dial() {
  World world = with_stopped_peer();
  bool ended = false;
  int connection = 3, dials = 0;
  for (int i = 0; i < 300 && !ended; ++i) {  // acknowledgments end, but its kernel accepts connections
    world.pass(100 * kMillisecond);
    ended = !world.core.ends().empty();
    if (ended || world.find(Action::kDial) == nullptr) continue;
    ++dials;
    world.step(event_of(Event::kDialed, ++connection, proc_of(1)));
  }
  CHECK(world.knows(1, kStopped) && dials > 0 && dials < 40);
}

void a_pause_of_this_process_ends_no_call_at_once() {
  World world({1, 1});
  world.accept(3, 1);
  world.call({0, 1}, "p", 2 * kSecond);
  world.now += 10 * kSecond;  // paused, with the value in its receive buffer
  world.step(Event());
  CHECK(world.find(Action::kVerdict) == nullptr);
  world.bytes(3, world.value(1, {0, 1}, "p", "x", 1));
  CHECK(world.find(Action::kVerdict) != nullptr && world.find(Action::kVerdict)->verdict->kind == Verdict::kAgreed);
}

void short_pauses_put_off_a_verdict_by_their_length() {
  World world({1, 1});
  world.accept(3, 1);
  world.beat(3, 1);
  const Nanos start = world.now;
  while (world.core.ends().empty() && world.now - start < 60 * kSecond) {  // the peer's host is cut off
    world.pass(4 * kSecond);
    world.now += kSecond;
    world.step(Event());
  }
  CHECK(world.knows(1, kUnreachable));
  CHECK(world.now - start >= 20 * kSecond && world.now - start <= 31 * kSecond);
}

void a_pause_of_any_length_judges_nobody_at_once() {
  for (const Nanos pause : {kSecond, 15 * kSecond, 500 * kSecond}) {
    World world({1, 1});
    world.accept(3, 1);
    world.beat(3, 1);
    world.pass(19'800 * kMillisecond);
    CHECK(world.core.ends().empty());
    world.now += pause;
    world.step(Event());
    world.pass(250 * kMillisecond);
    CHECK(world.core.ends().empty());
  }
}

void a_limit_has_several_beats() {
  Config config;
  config.beat = 12 * kSecond;
  World world({1, 1}, 0, true, config);
  world.accept(3, 1);
  for (int i = 0; i < 10; ++i) {
    world.beat(3, 1);
    world.pass(config.beat);
    CHECK(world.find(Action::kClose, 3) == nullptr && world.core.ends().empty());
  }
}

void a_clock_that_goes_back_ends_nothing() {
  World world({1, 1});
  world.accept(3, 1);
  world.now -= 100 * kSecond;
  for (int i = 0; i < 100; ++i) {
    world.beat(3, 1);
    world.pass(kSecond / 2);
  }
  CHECK(world.core.ends().empty());
}

void a_death_before_the_farewell_of_the_lead() {
  // Rank 1, the next lead, dials without the pause after a farewell.
  World world({3, 1}, 1);
  world.step(event_of(Event::kEnded, -1, proc_of(2)));
  world.board(0, {0});
  world.pass(300 * kMillisecond);
  CHECK(world.find(Action::kDial) != nullptr);
}

void a_new_lead_goes_on_with_the_silence_that_the_old_one_published() {
  for (const bool is_published : {true, false}) {
    World world({2, 1}, 1);
    if (is_published) world.board(0, {}, {{0, false}, {world.now, true}});
    world.pass(15 * kSecond, {proc_of(0)});
    world.step(event_of(Event::kEnded, -1, proc_of(0)));
    world.pass(4 * kSecond);
    CHECK(!world.knows(2, kUnreachable));
    world.pass(2 * kSecond);
    CHECK(world.knows(2, kUnreachable) == is_published);
  }
}

void a_lead_publishes_that_a_domain_is_silent() {
  World world({2, 1});
  const auto published = [&](const char* instead) {
    const Action* board = world.find(Action::kBoard);
    return board == nullptr ? instead : board->bytes.back() != 0 ? "silent" : "answers";
  };
  world.accept(3, 2);
  world.beat(3, 2);
  world.pass(kSecond, {proc_of(1)});
  CHECK(world.find(Action::kBoard) == nullptr);
  world.pass(kSecond, {proc_of(1)});
  CHECK(published("nothing") == Bytes("silent"));
  world.beat(3, 2);
  world.pass(kSecond / 2, {proc_of(1)});
  CHECK(published("nothing") == Bytes("answers"));
}

// The processes of a domain, which read each other's boards. Those that don't run read them once they run again.
struct Host {
  explicit Host(int ranks) : boards(ranks), runs(ranks, true) {
    for (int rank = 0; rank < ranks; ++rank) worlds.emplace_back(std::vector<int>{ranks, 1}, rank);
  }
  void pass(Nanos time) {
    for (const Nanos end = worlds.front().now + time; worlds.front().now < end;) {
      std::vector<Proc> beats;
      for (std::size_t rank = 0; rank < runs.size(); ++rank) {
        if (runs[rank]) beats.push_back(proc_of(static_cast<int>(rank)));
      }
      for (std::size_t rank = 0; rank < runs.size(); ++rank) {
        if (!runs[rank]) worlds[rank].now += 50 * kMillisecond;
        else worlds[rank].pass(50 * kMillisecond, beats);
        for (const Action& action : std::exchange(worlds[rank].actions, {})) {
          if (action.kind == Action::kBoard) boards[rank] = action.bytes;
        }
      }
      for (std::size_t rank = 0; rank < runs.size(); ++rank) {
        for (std::size_t each = 0; each < runs.size() && runs[rank]; ++each) {
          if (each != rank && !boards[each].empty()) worlds[rank].read_board(static_cast<int>(each), boards[each]);
        }
      }
    }
  }
  void kill(int rank) {
    runs[rank] = false;
    for (World& world : worlds) world.step(event_of(Event::kEnded, -1, proc_of(rank)));
  }
  void answer(int rank) {
    const int peer = static_cast<int>(runs.size());
    worlds[rank].accept(++connection, peer);
    worlds[rank].beat(connection, peer);
  }
  std::vector<World> worlds;
  std::vector<Bytes> boards;
  std::vector<bool> runs;
  int connection = 2;
};

void leads_that_die_in_turn_go_on_with_one_silence() {
  Host host(4);
  host.answer(0);
  for (int rank = 0; rank < 3; ++rank) {
    host.pass(1200 * kMillisecond);
    host.kill(rank);
  }
  host.pass(14'500 * kMillisecond);
  CHECK(!host.worlds[3].knows(4, kUnreachable));
  host.pass(2500 * kMillisecond);  // the limit + 1 s
  CHECK(host.worlds[3].knows(4, kUnreachable));
}

// Rank 1 acts for rank 0 and publishes a silence. Then the peer answers both.
void a_silence_that_ended_does_not_shorten_the_next_leads_limit() {
  Host host(3);
  host.answer(0);
  host.pass(kSecond);
  host.runs[0] = false;
  host.pass(15 * kSecond);
  host.runs[0] = true;
  host.answer(0);
  host.pass(300 * kMillisecond);
  for (int i = 0; i < 2; ++i) host.answer(1);  // it yields before its next tick
  host.pass(kSecond);
  for (const int rank : {0, 1}) host.kill(rank);
  host.pass(10 * kSecond);
  CHECK(!host.worlds[2].knows(3, kUnreachable));
  host.pass(10 * kSecond);
  CHECK(host.worlds[2].knows(3, kUnreachable));
}

void a_stranger_that_holds_the_token_is_closed() {
  World world({1, 1});
  world.accept(3, 8);
  world.pass(6 * kSecond);
  CHECK(world.find(Action::kClose, 3) != nullptr);
}

void a_leaver_whose_farewell_comes_over_another() {
  // Rank 1's connection breaks and its port refuses before rank 2's state arrives.
  World world({1, 1, 1});
  for (int peer : {1, 2}) {
    world.accept(2 + peer, peer);
    world.beat(2 + peer, peer);
  }
  world.step(event_of(Event::kClosed, 3));
  world.pass(30 * kMillisecond);
  world.step(event_of(Event::kRefused, -1, proc_of(1)));
  world.pass(100 * kMillisecond);
  CHECK(world.core.ends().empty());
  world.state(4, 2, proc_of(1), kLeft);
  world.pass(kSecond);
  CHECK(world.knows(1, kLeft));
}

void dials_that_are_refused_once_the_connection_broke_are_exits() {
  World world = with_stopped_peer();
  world.pass(15 * kSecond);
  CHECK(world.core.ends().empty());
  world.answer(4, 1);
  world.step(event_of(Event::kClosed, 4));
  world.pass(30 * kMillisecond);
  world.step(event_of(Event::kRefused, -1, proc_of(1)));
  world.pass(500 * kMillisecond);
  CHECK(world.knows(1, kExited));
}

// Closed, it would delay the knowledge of its process's exit by 0.6 s.
void a_hunt_keeps_a_connection_that_was_idle() {
  World world({1, 2});
  world.accept(3, 1);
  world.accept(4, 2);
  for (int second = 0; second < 15; ++second) {
    world.beat(3, 1);
    world.pass(kSecond);
    CHECK(world.find(Action::kClose) == nullptr);
  }
  world.step(event_of(Event::kClosed, 3));
  CHECK(world.find(Action::kClose, 4) == nullptr);
  world.step(event_of(Event::kRefused, -1, proc_of(1)));
  world.pass(10 * kMillisecond);
  world.step(event_of(Event::kClosed, 4));
  for (int i = 0; i < 50; ++i) {
    for (const Action& action : std::vector<Action>(world.actions)) {
      if (action.kind == Action::kDial) world.step(event_of(Event::kRefused, -1, action.proc));
    }
    world.pass(10 * kMillisecond);
  }
  CHECK(world.knows(1, kExited) && world.knows(2, kExited));
}

struct Visits {
  struct Guest {
    Seal out, in;
    Bytes reply;
    bool closed = false;
  };
  explicit Visits(int count) {
    const Bytes theirs(kNonceBytes, 'g'), mine(kNonceBytes, 'n');
    for (int id = 0; id < count; ++id) {
      guests.push_back({Seal("token", true, theirs, mine), Seal("token", false, theirs, mine), {}, false});
      CHECK(store.admit(id, "token", theirs + mine, &out));
    }
  }
  void bytes(int id, const Bytes& bytes) {
    for (Guest& guest : guests) guest.reply.clear();
    guests[id].closed = !store.take(id, bytes, &out);
    if (guests[id].closed) store.drop(id, &out);
    take();
  }
  void drop(int id) {
    for (Guest& guest : guests) guest.reply.clear();
    store.drop(id, &out);
    take();
  }
  void take() {
    for (const auto& [id, bytes, is_question] : std::exchange(out, {})) {
      if (is_question) questions += std::to_string(id) + " " + bytes;
      else guests[id].reply += bytes;
    }
  }
  static Bytes raw(FrameKind kind, Bytes body) { return encode(Frame{kind, 0, 0, std::move(body)}); }
  static Bytes call(StoreCall call, const std::vector<Bytes>& parts) {
    return encode_store(static_cast<std::uint8_t>(call), parts);
  }
  std::string reply(int id) {
    if (guests[id].reply.empty()) return "-";
    Bytes body = guests[id].reply.substr(kHeadBytes);
    std::uint8_t code = 0;
    std::vector<Bytes> parts;
    if (!guests[id].in.open(&body) || !decode_store(body, &code, &parts)) return "malformed";
    std::string text = code == 0 ? "" : "problem:";
    for (const Bytes& part : parts) text += (&part == parts.data() ? "" : ",") + part;
    return text;
  }
  std::string ask(int id, StoreCall kind, const std::vector<Bytes>& parts) {
    bytes(id, raw(FrameKind::kStoreCall, guests[id].out.seal(call(kind, parts))));
    return reply(id);
  }

  Store store;
  std::vector<Guest> guests;
  std::vector<Store::Output> out;
  Bytes questions;
};

void a_guest_uses_the_store() {
  Visits visits(2);
  const auto ask = [&](StoreCall call, const std::vector<Bytes>& parts) { return visits.ask(0, call, parts); };
  CHECK(ask(StoreCall::kSet, {"a", "1", "b", ""}) == "");
  CHECK(visits.ask(1, StoreCall::kGet, {"b", "a"}) == ",1");
  CHECK(visits.ask(1, StoreCall::kAdd, {"a", "-3"}) == "-2" && ask(StoreCall::kAdd, {"n", "5"}) == "5");
  CHECK(ask(StoreCall::kAdd, {"n", "9223372036854775807"}).find("problem:") == 0);
  CHECK(ask(StoreCall::kAdd, {"n", "1x"}).find("problem:") == 0);
  CHECK(ask(StoreCall::kCheck, {"a", "none"}) == "0" && ask(StoreCall::kCheck, {"a", "b"}) == "1");
  CHECK(ask(StoreCall::kCompareSet, {"c", "", "x"}) == "x" && ask(StoreCall::kCompareSet, {"c", "", "y"}) == "x");
  CHECK(ask(StoreCall::kCompareSet, {"d", "z", "y"}) == "z" && ask(StoreCall::kCheck, {"d"}) == "0");
  CHECK(ask(StoreCall::kAppend, {"c", "x"}) == "" && ask(StoreCall::kGet, {"c"}) == "xx");
  CHECK(ask(StoreCall::kDelete, {"c"}) == "1" && ask(StoreCall::kDelete, {"c"}) == "0");
  CHECK(ask(StoreCall::kCount, {}) == "3" && ask(StoreCall::kCount, {"a"}).find("problem:") == 0);
  CHECK(ask(static_cast<StoreCall>(99), {}).find("problem:") == 0);
}

void a_guest_asks_the_program() {
  Visits visits(2);
  const auto answer = [&](int id, const Bytes& bytes) {
    for (Visits::Guest& guest : visits.guests) guest.reply.clear();
    visits.store.answer(id, bytes, &visits.out);
    visits.take();
    return visits.reply(id);
  };
  CHECK(visits.ask(0, StoreCall::kQuestion, {"what?"}) == "-" && visits.questions == Bytes("0 what?"));
  CHECK(visits.ask(1, StoreCall::kSet, {"a", "1"}) == "" && answer(1, "nobody asked") == "-");
  CHECK(answer(0, Bytes(100'000, 'x')) == Bytes(100'000, 'x') && answer(0, "again") == "-");
  CHECK(visits.ask(0, StoreCall::kGet, {"a"}) == "1");
  CHECK(visits.ask(0, StoreCall::kQuestion, {"first"}) == "-" && visits.ask(0, StoreCall::kCount, {}) == "-");
  CHECK(visits.guests[0].closed && answer(0, "too late") == "-");
  CHECK(visits.ask(1, StoreCall::kQuestion, {"two", "parts"}) == "-" && visits.guests[1].closed);
  Visits waiting(1);
  CHECK(waiting.ask(0, StoreCall::kGet, {"never"}) == "-" && waiting.ask(0, StoreCall::kQuestion, {"what?"}) == "-");
  CHECK(waiting.guests[0].closed && waiting.questions.empty());
}

void a_guest_is_woken_once_all_its_keys_are_set() {
  Visits visits(3);
  CHECK(visits.ask(0, StoreCall::kGet, {"a", "b"}) == "-" && visits.ask(2, StoreCall::kWait, {"b"}) == "-");
  CHECK(visits.ask(1, StoreCall::kSet, {"a", "1"}) == "" && visits.reply(0) == "-");
  CHECK(visits.ask(1, StoreCall::kDelete, {"a"}) == "1");
  CHECK(visits.ask(1, StoreCall::kSet, {"b", "2"}) == "" && visits.reply(0) == "-" && visits.reply(2) == "");
  CHECK(visits.ask(1, StoreCall::kSet, {"a", "3"}) == "" && visits.reply(0) == "3,2");
  CHECK(visits.ask(0, StoreCall::kWait, {"never"}) == "-");
  visits.drop(0);
  CHECK(visits.ask(1, StoreCall::kSet, {"never", "1"}) == "" && visits.reply(0) == "-");
}

void a_guest_cancels_its_wait() {
  Visits visits(2);
  CHECK(visits.ask(0, StoreCall::kGet, {"a", "b"}) == "-" && visits.ask(0, StoreCall::kCancel, {}) == "problem:");
  CHECK(visits.ask(1, StoreCall::kSet, {"a", "1", "b", "2"}) == "" && visits.reply(0) == "-");
  CHECK(visits.ask(0, StoreCall::kGet, {"a"}) == "1");
  CHECK(visits.ask(0, StoreCall::kCancel, {}) == "-" && visits.ask(0, StoreCall::kGet, {"b"}) == "2");
  CHECK(visits.ask(0, StoreCall::kCancel, {"a"}) == "-" && visits.guests[0].closed);
}

void a_held_key_ends_with_its_connection() {
  Visits visits(3);
  CHECK(visits.ask(0, StoreCall::kHold, {"a", "1"}) == "" && visits.ask(1, StoreCall::kGet, {"a"}) == "1");
  CHECK(visits.ask(0, StoreCall::kHold, {"b", "2"}) == "" && visits.ask(0, StoreCall::kDelete, {"b"}) == "1");
  CHECK(visits.ask(0, StoreCall::kHold, {"c", "3"}) == "" && visits.ask(2, StoreCall::kHold, {"c", "4"}) == "");
  CHECK(visits.ask(1, StoreCall::kGet, {"gone/a"}) == "-");
  visits.drop(0);
  CHECK(visits.reply(1) == "1");
  CHECK(visits.ask(1, StoreCall::kCheck, {"a"}) == "0" && visits.ask(1, StoreCall::kCheck, {"gone/b"}) == "0");
  CHECK(visits.ask(1, StoreCall::kGet, {"c"}) == "4" && visits.ask(1, StoreCall::kCheck, {"gone/c"}) == "0");
  CHECK(visits.ask(1, StoreCall::kHold, {"d", Bytes(70'000, 'x')}).find("problem:") == 0);
}

void a_held_value_that_grew_too_large_is_dropped() {
  Visits visits(2);
  CHECK(visits.ask(0, StoreCall::kHold, {"a", "1"}) == "");
  CHECK(visits.ask(0, StoreCall::kSet, {"a", Bytes(kMostStoreBytes - 9, 'x')}) == "");
  visits.drop(0);
  CHECK(visits.ask(1, StoreCall::kGet, {"gone/a"}) == "" && visits.ask(1, StoreCall::kCheck, {"a"}) == "0");
}

void a_guest_is_closed_for_what_it_must_not_send() {
  const auto refused = [](FrameKind kind, Bytes body, bool sealed) {
    Visits visits(1);
    if (sealed) body = visits.guests[0].out.seal(body);
    visits.bytes(0, Visits::raw(kind, body));
    return visits.guests[0].closed;
  };
  const Bytes count = Visits::call(StoreCall::kCount, {});
  CHECK(!refused(FrameKind::kStoreCall, count, true));
  CHECK(refused(FrameKind::kStoreCall, count + Bytes(kSealBytes, 'x'), false));
  CHECK(refused(FrameKind::kStoreCall, "", false));
  CHECK(refused(FrameKind::kStoreCall, count + "x", true));
  CHECK(refused(FrameKind::kStoreCall, Visits::call(StoreCall::kGet, {"a"}).substr(0, 8), true));
  for (int kind = 1; kind <= static_cast<int>(FrameKind::kStoreReply); ++kind) {
    if (kind != static_cast<int>(FrameKind::kStoreCall)) CHECK(refused(static_cast<FrameKind>(kind), count, true));
  }
  Visits visits(2);
  CHECK(visits.ask(0, StoreCall::kGet, {"a"}) == "-");
  visits.ask(0, StoreCall::kCount, {});
  CHECK(visits.guests[0].closed);
  const Bytes frame = Visits::raw(FrameKind::kStoreCall, visits.guests[1].out.seal(count));
  visits.bytes(1, frame);
  CHECK(visits.reply(1) == "0");
  visits.bytes(1, frame);
  CHECK(visits.guests[1].closed);
}

void a_guest_is_handed_to_the_store() {
  for (const bool meets : {false, true}) {
    World world({1, 1}, 0, meets);
    const auto come = [&](int connection, const std::string& token, const Bytes& then) {
      const Bytes mine(kNonceBytes, 'g');
      world.step(event_of(Event::kAccepted, connection));
      world.bytes(connection, encode(Hello{}) + Visits::raw(FrameKind::kNonce, mine) +
                                  Visits::raw(FrameKind::kIdentity,
                                              prove(token, true, mine, Bytes(kNonceBytes, 'n'), 0, proc_of(0))) +
                                  then);
    };
    come(3, "token0", "then");
    const Action* guest = world.find(Action::kGuest, 3);
    CHECK(guest != nullptr && guest->bytes == Bytes(kNonceBytes, 'g') + Bytes(kNonceBytes, 'n') + "then");
    CHECK(world.find(Action::kClose) == nullptr);
    world.bytes(3, "not the core's");
    world.pass(10 * kSecond);
    CHECK(world.find(Action::kClose, 3) == nullptr);
    come(4, "another", "");
    CHECK(world.find(Action::kGuest) == nullptr && world.find(Action::kClose, 4) != nullptr);
    world.accept(5, 1);
    world.bytes(5, world.frame(FrameKind::kStoreCall, 1, ""));
    CHECK(world.find(Action::kClose, 5) != nullptr);
  }
}

void the_oldest_stranger_makes_room() {
  World world({1, 1});
  int logs = 0;
  for (int i = 0; i < 300; ++i) {
    world.now += kMillisecond;
    world.step(event_of(Event::kAccepted, 1000 - i));
    logs += world.find(Action::kLog) != nullptr ? 1 : 0;
    const bool is_full = i >= 258;
    CHECK((world.find(Action::kClose) != nullptr) == is_full);
    if (is_full) CHECK(world.find(Action::kClose, 1000 - (i - 258)) != nullptr);
  }
  CHECK(logs == 2);
  World early({1, 1}, 0, false);
  for (int i = 0; i < 1025; ++i) {
    early.now += kMillisecond;
    early.step(event_of(Event::kAccepted, i));
    CHECK((early.find(Action::kClose, 0) != nullptr) == (i == 1024));
  }
}

#define CASE(name) {#name, name}
const std::vector<std::pair<const char*, std::function<void()>>> kCases = {
    CASE(vectors_of_hmac),
    CASE(a_token_is_proved),
    CASE(a_stranger_of_another_version_is_only_logged),
    CASE(flags_that_nobody_has_are_malformed),
    CASE(ends_of_no_member_are_not_kept),
    CASE(a_state_is_not_starved_by_other_frames),
    CASE(a_leaver_answers_all_its_calls),
    CASE(a_lead_waits_for_its_domain),
    CASE(a_last_leaver_connects_to_those_that_never_heard_of_it),
    CASE(a_lead_that_leaves_first_connects_to_those_that_never_heard_of_it),
    CASE(a_leaver_that_its_leads_farewell_reports_dials_nobody),
    CASE(a_leaver_publishes_a_farewell_that_arrives_meanwhile),
    CASE(a_decider_that_leaves_waits_until_its_callers_have_the_verdict),
    CASE(a_refused_call_names_its_key),
    CASE(a_call_without_a_deadline),
    CASE(a_cancelled_call_that_was_forgotten_leaves_nothing),
    CASE(a_cancelled_call_ends_soon_though_the_decider_is_silent),
    CASE(agreements_of_others_take_bounded_memory),
    CASE(a_value_of_a_round_that_expired),
    CASE(an_agreement_that_was_only_asked_about_is_forgotten),
    CASE(a_seat_of_another_opens_nothing),
    CASE(a_verdict_of_wrong_size_is_malformed),
    CASE(a_verdict_goes_where_the_value_came_from),
    CASE(undecided_names_whom_the_decider_waits_for),
    CASE(a_refused_call_does_not_delay_the_watch),
    CASE(a_stopped_process_whose_kernel_answers_is_stopped),
    CASE(a_full_window_is_replaced_by_a_dial),
    CASE(a_pause_of_this_process_ends_no_call_at_once),
    CASE(short_pauses_put_off_a_verdict_by_their_length),
    CASE(a_pause_of_any_length_judges_nobody_at_once),
    CASE(a_limit_has_several_beats),
    CASE(a_clock_that_goes_back_ends_nothing),
    CASE(a_death_before_the_farewell_of_the_lead),
    CASE(a_new_lead_goes_on_with_the_silence_that_the_old_one_published),
    CASE(a_lead_publishes_that_a_domain_is_silent),
    CASE(leads_that_die_in_turn_go_on_with_one_silence),
    CASE(a_silence_that_ended_does_not_shorten_the_next_leads_limit),
    CASE(a_stranger_that_holds_the_token_is_closed),
    CASE(a_leaver_whose_farewell_comes_over_another),
    CASE(dials_that_are_refused_once_the_connection_broke_are_exits),
    CASE(a_hunt_keeps_a_connection_that_was_idle),
    CASE(a_guest_uses_the_store),
    CASE(a_guest_asks_the_program),
    CASE(a_guest_is_woken_once_all_its_keys_are_set),
    CASE(a_guest_cancels_its_wait),
    CASE(a_held_key_ends_with_its_connection),
    CASE(a_held_value_that_grew_too_large_is_dropped),
    CASE(a_guest_is_closed_for_what_it_must_not_send),
    CASE(a_guest_is_handed_to_the_store),
    CASE(the_oldest_stranger_makes_room),
};

}  // namespace

int main(int argc, char** argv) {
  for (const auto& [name, run] : kCases) {
    if (argc > 1 && std::strcmp(argv[1], name) != 0) continue;
    std::printf("%s\n", name);
    run();
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
