#include "core.h"

#include <algorithm>

namespace parallel_state::control {
namespace {

constexpr std::size_t kEntryBytes = 21;  // of an end without a text
constexpr std::size_t kMostEnds = 1U << 16;
constexpr std::size_t kMostStrangers = 256;  // accepted connections without an identity, beside one per member

std::uint64_t mixed(std::uint64_t digest, std::uint64_t value) {
  digest = (digest ^ value) * 0x9e3779b97f4a7c15;
  return digest ^ digest >> 29;
}

std::uint64_t mixed(std::uint64_t digest, std::string_view text) {
  digest = mixed(digest, text.size());
  for (const char each : text) digest = mixed(digest, static_cast<unsigned char>(each));
  return digest;
}

std::uint64_t state_digest(const Ends& ends) {
  std::uint64_t digest = kEmptyDigest;
  for (const auto& [proc, end] : ends) {
    digest = mixed(mixed(mixed(mixed(digest, proc), end.flags), end.reporter), end.text);
  }
  return digest;
}

Bytes encode(const Ends& ends) {
  Writer writer;
  writer.number(static_cast<std::uint32_t>(ends.size()));
  for (const auto& [proc, end] : ends) writer.number(proc).number(end.flags).number(end.reporter).text(end.text);
  return writer.take();
}

bool decode(const Bytes& bytes, Ends* ends) {
  Reader reader(bytes);
  const std::size_t count = reader.count(kMostEnds, kEntryBytes);
  for (std::size_t i = 0; i < count && reader.ok(); ++i) {
    std::pair<Proc, End> entry{reader.number<Proc>(), {}};
    entry.second.flags = reader.number<std::uint8_t>();
    entry.second.reporter = reader.number<Proc>();
    entry.second.text = reader.text(kMostTextBytes);
    if (!ends->empty() && ends->back().first >= entry.first) return false;
    ends->push_back(std::move(entry));
  }
  return reader.finished();
}

End joined(const End& one, const End& other) {
  return {static_cast<std::uint8_t>(one.flags | other.flags), std::min(one.reporter, other.reporter),
          std::max(one.text, other.text)};
}

Ends merged(const Ends& one, const Ends& other) {
  Ends result;
  result.reserve(one.size() + other.size());
  auto left = one.begin(), right = other.begin();
  while (left != one.end() || right != other.end()) {
    if (right == other.end() || (left != one.end() && left->first < right->first)) result.push_back(*left++);
    else if (left == one.end() || right->first < left->first) result.push_back(*right++);
    else result.emplace_back(left->first, joined(left->second, right->second)), ++left, ++right;
  }
  return result;
}

// Compares in a time that doesn't depend on where the texts differ.
bool equal_tokens(std::string_view one, std::string_view other) {
  unsigned difference = one.size() == other.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(one.size(), other.size()); ++i) {
    difference |= static_cast<unsigned char>(one[i] ^ other[i]);
  }
  return difference == 0;
}

}  // namespace

Roster::Roster(std::vector<Member> all) : members(std::move(all)) {
  std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) { return a.rank < b.rank; });
  std::map<std::uint64_t, int> numbers;  // domains are numbered by their first rank
  for (const Member& member : members) {
    const int index = static_cast<int>(domain_of.size());
    const int domain = numbers.emplace(member.domain, static_cast<int>(numbers.size())).first->second;
    if (domain == static_cast<int>(domains.size())) domains.emplace_back();
    domains[domain].push_back(index);
    domain_of.push_back(domain);
    indices[member.proc] = index;
  }
}

int Roster::index_of(Proc proc) const {
  const auto found = indices.find(proc);
  return found == indices.end() ? -1 : found->second;
}

// The way in.

void Core::step(Nanos now, const Event& event, std::vector<Action>* actions) {
  if (left_) return;
  out_ = actions;
  skew_ = std::max(skew_, now_ - now);
  now_ = now + skew_;
  // Whatever this process would hold against others, it was not there to see.
  if (alarm_ != kNever && now_ > alarm_ + config_.pause) excuse();
  handle(event);
  for (int round = 0; round < 4 && !left_ && (dirty_ || urgent_ || now_ >= alarm_); ++round) {
    flood();
    dirty_ = false;
    tend();
  }
  if (!left_) publish();
  if (routed_ && !left_) advance_all();
  out_ = nullptr;
}

void Core::handle(const Event& event) {
  switch (event.kind) {
    case Event::kTick: break;
    case Event::kMeet: meet(event); break;
    case Event::kDialed: on_dialed(event); break;
    case Event::kRefused:
    case Event::kNoAnswer: on_no_dial(event); break;
    case Event::kAccepted: {
      std::size_t strangers = 0;
      for (const auto& [connection, link] : links_) strangers += link.proc == 0 ? 1 : 0;
      std::size_t most = kMostStrangers;
      for (const auto& [id, world] : worlds_) most += world.roster->members.size();
      if (strangers >= most) {
        act(Action::kClose).connection = event.connection;
        break;
      }
      Link& link = links_[event.connection];
      link.heard = link.sign = now_;
      wake_by(now_ + config_.stranger);
      break;
    }
    case Event::kClosed: drop(event.connection, true); break;
    case Event::kBytes: on_bytes(event); break;
    case Event::kAcked: {
      const auto found = links_.find(event.connection);
      if (found != links_.end()) found->second.sign = std::max(found->second.sign, found->second.sent);
      break;
    }
    case Event::kBoard: {
      Ends ends;
      if (!decode(event.bytes, &ends)) break;
      board_ = merged(board_, ends);
      join(ends, false);
      break;
    }
    case Event::kBeats:
      for (const Proc proc : event.procs) {
        const auto found = seen_.find(proc);
        if (found != seen_.end()) found->second = now_;
      }
      break;
    case Event::kEnded: {  // each process of the domain sees it: nothing to publish, and nobody in particular reports
                           // it
      const Ends ends{{event.proc, {kExited, event.proc, ""}}};
      board_ = merged(board_, ends);
      join(ends, false);
      break;
    }
    case Event::kExiting: report(event.proc, kExited, "exiting"); break;
    case Event::kCall: on_call(*event.call, false); break;
    case Event::kCancel: on_call(*event.call, true); break;
    case Event::kReport: report(self_, event.flags & (kFailed | kRevoked), event.bytes); break;
    case Event::kAsk:
      questions_.push_back({event.proc, event.id, event.deadline + skew_, event.bytes, -1});
      advance_questions();
      break;
    case Event::kReply: {
      const auto peer = peers_.find(event.proc);
      if (peer == peers_.end() || peer->second.link() < 0) break;  // the asker asks again on its next connection
      send(peer->second.link(), FrameKind::kReply, Writer().number(event.id).text(event.bytes).take());
      break;
    }
    case Event::kLeave: leave(); break;
  }
}

Action& Core::act(Action::Kind kind) {
  out_->emplace_back();
  out_->back().kind = kind;
  return out_->back();
}

// State of ends.

const End* Core::end_of(Proc proc) const {
  const auto at = std::lower_bound(ends_.begin(), ends_.end(), proc,
                                   [](const std::pair<Proc, End>& entry, Proc value) { return entry.first < value; });
  return at != ends_.end() && at->first == proc ? &at->second : nullptr;
}

void Core::report(Proc proc, std::uint8_t flags, const std::string& text) {
  if (flags != 0) join({{proc, {flags, self_, text.substr(0, kMostTextBytes)}}}, false);
}

// `from_link`: another lead said so, and says it to all leads itself.
void Core::join(const Ends& other, bool from_link) {
  const Ends before = std::exchange(ends_, merged(ends_, other));
  ends_digest_ = state_digest(ends_);
  bool changed = false;
  auto at = before.begin();
  for (const auto& entry : ends_) {
    while (at != before.end() && at->first < entry.first) ++at;
    const bool known = at != before.end() && at->first == entry.first;
    if (known && at->second.flags == entry.second.flags) continue;
    changed = true;
    announce(entry, known ? at->second : End{});
    if (!from_link && entry.second.is_death() && !(known && at->second.is_death())) urgent_ = true;
  }
  dirty_ = dirty_ || changed;
  routed_ = routed_ || changed;
}

void Core::announce(const std::pair<Proc, End>& entry, const End& before) {
  const auto& [proc, end] = entry;
  const bool died = end.is_death() && !before.is_death();
  const bool left = (end.flags & kLeft) != 0 && (before.flags & kLeft) == 0;
  if (!died && !left) return;
  for (auto& [id, world] : worlds_) {
    const int index = world.roster->index_of(proc);
    if (index < 0) continue;
    const auto peer = peers_.find(proc);
    if (!died && world.leading && peer != peers_.end() &&
        peer->second.link() >= 0) {  // its successor dials; if all leave now, nobody does
      Watch& watch = world.watches[world.roster->domain_of[index]];
      watch.sign = now_;
      watch.dial_at = std::max(watch.dial_at, now_ + config_.patience);
    }
    Action& action = act(died ? Action::kDoom : Action::kLeft);
    action.world = id;
    action.proc = proc;
    action.flags = end.flags;
    action.bytes = end.text;
  }
}

// Gives this domain what it lacks.
void Core::publish() {
  if (seen_.empty() || state_digest(board_) == ends_digest_ || ends_.empty()) return;
  board_ = ends_;
  act(Action::kBoard).bytes = encode(ends_);
}

// Says a death of this domain to all that are watched, at once.
void Core::flood() {
  if (!urgent_) return;
  urgent_ = false;
  for (const auto& [connection, link] : links_) {
    if (link.beating && link.peer_digest != ends_digest_) send_state(connection);
  }
  for (auto& [id, world] : worlds_) {
    // Leads that notice the loss of this domain's lead dial; this process dials those that have not.
    for (Watch& watch : world.watches) watch.dial_at = std::min(watch.dial_at, now_ + config_.tick);
  }
}

// Connections.

const Member* Core::find_member(Proc proc) const {
  for (const auto& [id, world] : worlds_) {
    const int index = world.roster->index_of(proc);
    if (index >= 0) return &world.roster->members[index];
  }
  return nullptr;
}

void Core::dial(Proc proc, Peer* peer, bool for_watch) {
  peer->for_watch = for_watch || (peer->dialing && peer->for_watch);
  if (peer->dialing) return;
  const Member* member = find_member(proc);
  if (member == nullptr) return;
  peer->dialing = true;
  peer->next_dial = now_ + config_.redial;
  Action& action = act(Action::kDial);
  action.proc = proc;
  action.endpoint = &member->endpoint;
}

// Returns a connection to `proc`, or -1 after dialing it.
int Core::connect(Proc proc) {
  Peer& peer = peers_[proc];
  if (peer.link() >= 0) {
    links_[peer.link()].for_watch = false;
    return peer.link();
  }
  if (now_ >= peer.next_dial) dial(proc, &peer, false);
  else wake_by(peer.next_dial);
  return -1;
}

void Core::send(int connection, FrameKind kind, Bytes body, const AgreementKey* key) {
  Frame frame{kind, 0, 0, 0, self_, std::move(body)};
  if (key != nullptr) {
    frame.world = key->world;
    frame.epoch = key->epoch;
    const auto world = worlds_.find(key->world);
    frame.term = world == worlds_.end() ? 0 : world->second.term;
  }
  Action& action = act(Action::kSend);
  action.connection = connection;
  action.bytes = control::encode(frame);
  links_[connection].sent = now_;
}

void Core::send_state(int connection) {
  links_[connection].peer_digest = ends_digest_;
  send(connection, FrameKind::kState, encode(ends_));
}

// Begins this side of a connection: the hello, who this is, all that it knows.
void Core::greet(int connection) {
  const Link& link = links_[connection];
  const Member* member = find_member(link.proc);
  Action& action = act(Action::kSend);
  action.connection = connection;
  action.bytes = control::encode(Hello{kVersion, kOldestVersion, config_.build});
  const std::string token = link.dialed ? (member == nullptr ? "" : member->endpoint.token) : token_;
  send(connection, FrameKind::kIdentity, Writer().text(token).number(link.proc).take());
  if (!ends_.empty()) send_state(connection);
  if (link.beating) send(connection, FrameKind::kBeat, Writer().number(ends_digest_).take());
}

void Core::on_dialed(const Event& event) {
  Peer& peer = peers_[event.proc];
  peer.dialing = peer.refused = peer.suspect = false;
  if (is_gone(event.proc) || peer.out >= 0) {
    act(Action::kClose).connection = event.connection;
    return;
  }
  peer.out = event.connection;
  Link& link = links_[event.connection];
  link.proc = event.proc;
  link.dialed = true;
  link.beating = link.for_watch = peer.for_watch;
  link.heard = link.sign = now_;
  link.peer_digest = kEmptyDigest;
  greet(event.connection);
  routed_ = true;
}

void Core::on_no_dial(const Event& event) {
  Peer& peer = peers_[event.proc];
  peer.dialing = false;
  peer.next_dial = now_ + config_.tick;
  wake_by(peer.next_dial);
  if (is_gone(event.proc) || event.kind == Event::kNoAnswer) return;
  if (peer.suspect) {
    report(event.proc, kExited, "its connections broke, and its port is closed");
    return;
  }
  // A call that is refused judges nobody: the process may have left, and its domain says which of both.
  if (!peer.for_watch) return;
  for (auto& [id, world] : worlds_) {
    const int index = world.roster->index_of(event.proc);
    if (!world.leading || index < 0) continue;
    const int domain = world.roster->domain_of[index];
    if (world.watches[domain].hunt < 0) start_hunt(&world, domain);
    dirty_ = true;
  }
  peer.refused = true;
}

void Core::on_bytes(const Event& event) {
  const int connection = event.connection;
  auto found = links_.find(connection);
  if (found == links_.end()) return;
  found->second.parser.push(event.bytes);
  while (found != links_.end()) {
    Hello hello;
    Frame frame;
    const Parser::Result result = found->second.parser.next(&hello, &frame);
    if (result == Parser::Result::kNeedsMore) return;
    const bool fine = result == Parser::Result::kHello   ? on_hello(connection, hello)
                      : result == Parser::Result::kFrame ? on_frame(connection, &frame)
                                                         : false;
    found = links_.find(connection);  // it may have been closed
    if (fine || found == links_.end()) continue;
    Action& action = act(Action::kLog);
    action.proc = found->second.proc;
    action.bytes = "closed a connection: malformed bytes";
    act(Action::kClose).connection = connection;
    drop(connection, true);
    return;
  }
}

bool Core::on_hello(int connection, const Hello& hello) {
  Link& link = links_[connection];
  link.greeted = true;
  if (hello.version >= kOldestVersion && kVersion >= hello.oldest) return true;
  if (!link.dialed) {  // so that the other side can say the same
    Action& action = act(Action::kSend);
    action.connection = connection;
    action.bytes = control::encode(Hello{kVersion, kOldestVersion, config_.build});
  }
  Action& action = act(Action::kRefuse);
  action.proc = link.proc;
  action.bytes = "the control plane here has version " + std::to_string(kVersion) + " (build " +
                 std::to_string(config_.build) + "), a peer has version " + std::to_string(hello.version) + " (build " +
                 std::to_string(hello.build) + ", which accepts " + std::to_string(hello.oldest) +
                 " and later): install the same package on all hosts";
  close(connection);
  return true;
}

bool Core::on_identity(int connection, const Frame& frame) {
  Link& link = links_[connection];
  Reader reader(frame.body);
  const std::string token = reader.text(64);
  const Proc to = reader.number<Proc>();
  if (!reader.finished() || frame.from == 0 || frame.from == self_) return false;
  if (link.dialed) {
    const Member* member = find_member(link.proc);
    if (frame.from != link.proc || member == nullptr || !equal_tokens(token, member->endpoint.token)) return false;
  } else {
    if (to != self_ || !equal_tokens(token, token_)) return false;
    link.proc = frame.from;
    Peer& peer = peers_[frame.from];
    // The newest connection of a dialer replaces its older one: what is still in flight there is void.
    if (peer.in >= 0) close(peer.in);
    peer.in = connection;
    link.peer_digest = kEmptyDigest;
    greet(connection);
  }
  link.identified = true;
  link.heard = link.sign = now_;
  link.parser.trust();
  peers_[frame.from].suspect = false;
  if (const End* end = end_of(frame.from); end != nullptr && end->is_death()) close(connection);  // it knows why now
  routed_ = true;
  return true;
}

bool Core::on_frame(int connection, Frame* frame) {
  Link& link = links_[connection];
  if (!link.identified) return frame->kind == FrameKind::kIdentity && on_identity(connection, *frame);
  if (frame->from != link.proc) return false;
  link.heard = link.sign = now_;
  if (link.stopped) {
    link.stopped = false;
    act(Action::kStopped).proc = link.proc;
  }
  switch (frame->kind) {
    case FrameKind::kIdentity: return false;
    case FrameKind::kBeat: {
      Reader reader(frame->body);
      link.peer_digest = reader.number<std::uint64_t>();
      if (!link.beating) watch_link(connection);  // answers at once: the peer wants to know whether this process runs
      return reader.finished();
    }
    case FrameKind::kState: return on_state(connection, frame->body);
    case FrameKind::kQuestion:
    case FrameKind::kReply: return on_question(connection, *frame);
    default: return on_round(connection, *frame);
  }
}

bool Core::on_state(int connection, const Bytes& body) {
  Ends ends;
  if (!decode(body, &ends)) return false;
  links_[connection].peer_digest = state_digest(ends);
  join(ends, true);
  return true;
}

// Forgets a connection. `by_peer`: not closed by this process.
void Core::drop(int connection, bool by_peer) {
  const auto found = links_.find(connection);
  if (found == links_.end()) return;
  const Link link = std::move(found->second);
  links_.erase(found);
  if (link.proc == 0) return;
  Peer& peer = peers_[link.proc];
  if (peer.out == connection) peer.out = -1;
  if (peer.in == connection) peer.in = -1;
  for (auto& [key, round] : rounds_) {
    if (round.sent_on == connection) round.sent_on = -1;
    for (Round::Seat& seat : round.seats) {
      if (seat.connection == connection) seat.connection = -1;
      if (seat.asked_on == connection) seat.asked_on = -1;
    }
  }
  for (Question& question : questions_) {
    if (question.sent_on == connection) question.sent_on = -1;
  }
  routed_ = true;
  if (by_peer && !is_gone(link.proc)) hunt(link.proc, link.beating);
}

void Core::close(int connection) {
  act(Action::kClose).connection = connection;
  drop(connection, false);
}

// Membership and liveness.

void Core::meet(const Event& event) {
  const int me = event.roster->index_of(self_);
  const auto known = worlds_.find(event.world);
  if (known != worlds_.end() && known->second.epoch >= event.epoch) return;
  if (me < 0 || event.roster->domains.size() > kMostDomains || event.roster->members.size() > kMostMembers) {
    act(Action::kRefuse).bytes = me < 0 ? "this process is no member of its world"
                                        : "a world of " + std::to_string(event.roster->members.size()) + " ranks on " +
                                              std::to_string(event.roster->domains.size()) +
                                              " hosts is too large: at most " + std::to_string(kMostMembers) +
                                              " ranks on " + std::to_string(kMostDomains) + " hosts";
    return;
  }
  World& world = worlds_[event.world] = World{event.epoch, event.term, event.roster, me, false, {}};
  for (const int index : world.roster->domains[world.domain()]) {
    if (index != me) seen_.emplace(world.roster->members[index].proc, now_);
  }
  for (const auto& entry : ends_) announce(entry, {});
  dirty_ = true;
}

void Core::leave() {
  report(self_, kLeft, "");
  publish();
  for (const auto& [connection, link] : links_) {
    if (link.beating) send_state(connection);
    act(Action::kClose).connection = connection;
  }
  links_.clear();
  rounds_.clear();
  questions_.clear();
  alarm_ = kNever;
  left_ = true;
}

// Judges nobody by the time in which this process didn't run.
void Core::excuse() {
  for (auto& [connection, link] : links_) link.heard = link.sign = now_;
  for (auto& [proc, seen] : seen_) seen = now_;
  for (auto& [id, world] : worlds_) {
    for (Watch& watch : world.watches) {
      watch.sign = now_;
      if (watch.hunt >= 0) watch.hunt = now_;
    }
  }
}

// Returns true for the lowest living process of the domain, and where all lower ones have stale beats.
bool Core::is_lead(const World& world) const {
  for (const int index : world.roster->domains[world.domain()]) {
    if (index == world.me) return true;
    const Proc proc = world.roster->members[index].proc;
    if (!is_gone(proc) && now_ - seen_.at(proc) <= config_.stale) return false;
  }
  return true;
}

void Core::start_leading(World* world) {
  bool acts = false, after_death = false, after_farewell = false;
  for (const int index : world->roster->domains[world->domain()]) {
    if (index >= world->me) break;
    const End* end = end_of(world->roster->members[index].proc);
    acts = acts || end == nullptr;
    after_death = after_death || (end != nullptr && end->is_death());
    after_farewell = after_farewell || end != nullptr;
  }
  world->watches.assign(world->roster->domains.size(), Watch{});
  for (std::size_t domain = 0; domain < world->watches.size(); ++domain) {
    const bool dials = world->roster->domains[domain].front() < world->me;  // else it is dialed
    Watch& watch = world->watches[domain];
    watch.dial_at = acts             ? now_
                    : after_death    ? now_ + config_.tick
                    : after_farewell ? now_ + config_.patience
                    : dials          ? now_
                                     : now_ + config_.patience;
    watch.sign = now_;
  }
}

// A connection to `proc` broke without a farewell. If it was watched, or its domain is hunted already, all of its
// domain are dialed at once. A process that leaves closes the connections of its calls without a word: these make no
// suspect.
void Core::hunt(Proc proc, bool was_watched) {
  for (auto& [id, world] : worlds_) {
    const int index = world.roster->index_of(proc);
    if (!world.leading || index < 0) continue;
    const int domain = world.roster->domain_of[index];
    if (!was_watched && world.watches[domain].hunt < 0) continue;
    start_hunt(&world, domain);
    if (was_watched) peers_[proc].suspect = true;
    dirty_ = true;
  }
}

// Uses a connection for liveness from now on; it is silent unless the peer answers soon.
void Core::watch_link(int connection) {
  Link& link = links_[connection];
  link.beating = true;
  link.heard = std::min(link.heard, now_ - config_.beat * 5 / 2 + config_.settle);
  if (link.peer_digest != ends_digest_) send_state(connection);
  send(connection, FrameKind::kBeat, Writer().number(ends_digest_).take());
}

void Core::start_hunt(World* world, int domain) {
  for (const int index : world->roster->domains[domain]) {
    const auto peer = peers_.find(world->roster->members[index].proc);
    if (peer == peers_.end()) continue;
    peer->second.refused = false;
    peer->second.next_dial = std::min(peer->second.next_dial, now_ + config_.redial);
    const int connection = peer->second.link();
    if (connection >= 0 && !links_[connection].beating && links_[connection].identified) watch_link(connection);
  }
  world->watches[domain].hunt = world->watches[domain].dial_at = now_;
}

// Looks at everything that depends on time, on the ends and on watched connections.
void Core::tend() {
  alarm_ = kNever;
  const bool ticked = now_ >= next_tick_;
  if (ticked) next_tick_ = now_ + config_.tick;
  if (!worlds_.empty() || !links_.empty()) wake_by(next_tick_);
  if (ticked && !seen_.empty()) act(Action::kBeat);
  for (auto& [id, world] : worlds_) tend_world(&world, ticked);
  if (ticked || dirty_) tend_links();
  advance_all();
}

void Core::tend_world(World* world, bool ticked) {
  const End* own = end_of(self_);
  const bool leads = (own == nullptr || !own->is_death()) && is_lead(*world);
  if (leads && !world->leading) start_leading(world);
  world->leading = leads;
  if (!leads) return;
  const Roster& roster = *world->roster;
  for (const int index : roster.domains[world->domain()]) {
    const Proc proc = roster.members[index].proc;
    if (ticked && index != world->me && !is_gone(proc) && now_ - seen_.at(proc) > config_.stale) {
      act(Action::kLook).proc = proc;  // a large process frees its memory for seconds before its descriptors close
    }
  }
  std::vector<int> fresh(roster.domains.size(), -1), first(roster.domains.size(), -1);
  std::vector<char> linked(roster.domains.size(), 0);
  std::vector<int> surplus;
  for (const auto& [connection, link] : links_) {
    const int index = link.proc == 0 ? -1 : roster.index_of(link.proc);
    if (index < 0 || is_gone(link.proc)) continue;
    const int domain = roster.domain_of[index];
    Watch& watch = world->watches[domain];
    watch.sign = std::max(watch.sign, link.sign);
    linked[domain] = 1;
    if (!link.identified || (link.beating && now_ - link.heard > config_.beat * 5 / 2)) continue;
    if (fresh[domain] < 0 || index < first[domain]) {
      std::swap(fresh[domain], first[domain]);
      fresh[domain] = connection;
      first[domain] = index;
    }
  }
  for (const auto& [connection, link] : links_) {  // of a hunt the lowest that answered is kept
    const int index = link.proc == 0 || !link.for_watch ? -1 : roster.index_of(link.proc);
    const int domain = index < 0 ? world->domain() : roster.domain_of[index];
    if (domain != world->domain() && first[domain] >= 0 && first[domain] < index) surplus.push_back(connection);
  }
  for (const int connection : surplus) close(connection);
  for (std::size_t domain = 0; domain < roster.domains.size(); ++domain) {
    if (static_cast<int>(domain) != world->domain()) {
      tend_domain(world, static_cast<int>(domain), fresh[domain], linked[domain] != 0);
    }
  }
}

void Core::tend_domain(World* world, int domain, int fresh, bool linked) {
  const Roster& roster = *world->roster;
  Watch& watch = world->watches[domain];
  const auto& indices = roster.domains[domain];
  if (std::all_of(indices.begin(), indices.end(), [&](int index) { return is_gone(roster.members[index].proc); })) {
    return;
  }
  if (now_ - watch.sign > config_.limit) {
    for (const int index : indices) {
      if (!is_gone(roster.members[index].proc)) report(roster.members[index].proc, kUnreachable, "");
    }
    return;
  }
  if (fresh >= 0) {
    watch.hunt = -1;
    if (!links_[fresh].beating) watch_link(fresh);
    return;
  }
  if (watch.hunt >= 0) judge_refused(world, domain);
  if (now_ >= watch.dial_at) {
    if (linked && watch.hunt < 0) start_hunt(world, domain);  // connected, and silent
    dial_domain(world, domain);
  }
  wake_by(watch.dial_at);
}

// Refused dials are exits if nobody of the domain answers, who would know better: a process may also have left.
void Core::judge_refused(World* world, int domain) {
  const Watch& watch = world->watches[domain];
  std::vector<Proc> refused;
  bool all = true;
  for (const int index : world->roster->domains[domain]) {
    const Proc proc = world->roster->members[index].proc;
    if (is_gone(proc)) continue;
    if (peers_[proc].refused) refused.push_back(proc);
    else all = false;
  }
  if (refused.empty()) return;
  if (!all && now_ - watch.hunt < config_.settle) return wake_by(watch.hunt + config_.settle);
  for (const Proc proc : refused) report(proc, kExited, "its port is closed");
}

// Dials the lowest living process of a domain; in a hunt all of them.
void Core::dial_domain(World* world, int domain) {
  Watch& watch = world->watches[domain];
  watch.dial_at = now_ + config_.patience;
  for (const int index : world->roster->domains[domain]) {
    const Proc proc = world->roster->members[index].proc;
    if (is_gone(proc)) continue;
    Peer& peer = peers_[proc];
    if (peer.link() < 0 && !peer.refused) {
      if (now_ >= peer.next_dial) dial(proc, &peer, true);
      else watch.dial_at = std::min(watch.dial_at, peer.next_dial);
    }
    if (watch.hunt < 0) break;
  }
}

// Beats on watched connections, probes silent ones, and closes those that lead nowhere.
void Core::tend_links() {
  std::vector<int> useless;
  for (auto& [connection, link] : links_) {
    const End* end = link.proc == 0 ? nullptr : end_of(link.proc);
    if ((link.proc == 0 && now_ - link.heard >= config_.stranger) || (end != nullptr && end->is_death())) {
      useless.push_back(connection);
      continue;
    }
    if (!link.beating) continue;
    const Nanos silent = now_ - link.heard;
    if (silent > config_.beat * 3 / 2) act(Action::kProbe).connection = connection;
    if (silent > config_.limit && !link.stopped) {
      link.stopped = true;
      Action& action = act(Action::kStopped);
      action.proc = link.proc;
      action.flags = 1;
    }
    if (now_ - link.sent < config_.beat) continue;
    if (link.peer_digest != ends_digest_) send_state(connection);
    else send(connection, FrameKind::kBeat, Writer().number(ends_digest_).take());
  }
  for (const int connection : useless) {
    if (links_[connection].identified) send_state(connection);  // it may live, and is to know what it is taken for
    close(connection);
  }
}

std::uint64_t Core::digest() const {
  std::uint64_t digest = mixed(mixed(mixed(ends_digest_, self_), left_), state_digest(board_));
  const auto mix = [&](auto value) { digest = mixed(digest, static_cast<std::uint64_t>(value)); };
  const auto mix_text = [&](std::string_view text) { digest = mixed(digest, text); };
  const auto mix_verdict = [&](const std::shared_ptr<const Verdict>& verdict) {
    mix(verdict == nullptr ? 99 : verdict->kind);
    if (verdict == nullptr) return;
    for (const Bytes& value : verdict->values) mix_text(value);
    for (const Proc proc : verdict->culprits) mix(proc);
  };
  const auto mix_time = [&](Nanos time) { mix(time == kNever ? -1 : time - now_); };
  mix_time(alarm_);
  mix_time(next_tick_);
  for (const auto& [id, world] : worlds_) {
    mix(id);
    mix(world.epoch);
    mix(world.term);
    mix(world.leading);
    for (const Watch& watch : world.watches) {
      mix_time(watch.sign);
      mix_time(watch.dial_at);
      mix(watch.hunt < 0 ? -1 : now_ - watch.hunt);
    }
  }
  for (const auto& [connection, link] : links_) {
    mix(connection);
    mix(link.proc);
    mix(link.dialed | link.for_watch << 1 | link.greeted << 2 | link.identified << 3 | link.beating << 4 |
        link.stopped << 5);
    mix_time(link.heard);
    mix_time(link.sign);
    mix_time(link.sent);
    mix(link.peer_digest);
    mix_text(link.parser.rest());
  }
  for (const auto& [proc, peer] : peers_) {
    mix(proc);
    mix(peer.dialing | peer.for_watch << 1 | peer.suspect << 2 | peer.refused << 3);
    mix_time(std::max(peer.next_dial, now_));
  }
  for (const auto& [proc, seen] : seen_) mix(proc), mix_time(seen);
  for (const auto& [key, round] : rounds_) {
    mix_text(key.purpose);
    mix(key.attempt);
    mix(key.members);
    mix(round.called | round.delivered << 1 | round.answered << 2 | round.canceled << 3 | round.sent_done << 4);
    mix(round.promised);
    mix_time(round.deadline);
    mix_time(round.expires);
    mix_verdict(round.verdict);
    mix(round.sent_on);
    mix(round.sent_to);
    for (const Round::Seat& seat : round.seats) {
      mix(seat.has_value | seat.answered << 1 | seat.done << 2 | seat.told << 3);
      mix(seat.connection);
      mix(seat.asked_on);
      mix_text(seat.value);
    }
  }
  for (const Question& question : questions_) mix(question.proc), mix(question.id), mix(question.sent_on);
  return digest;
}

}  // namespace parallel_state::control
