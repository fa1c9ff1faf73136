#include "core.h"

#include <algorithm>

#include "hmac.h"

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
    case Event::kAccepted: on_accepted(event); break;
    case Event::kClosed: drop(event.connection, true); break;
    case Event::kBytes: on_bytes(event); break;
    case Event::kAcked: {
      const auto found = links_.find(event.connection);
      if (found != links_.end()) found->second.sign = std::max(found->second.sign, now_ - event.age);
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
    case Event::kReport: on_report(event); break;
    case Event::kAsk:
      questions_.push_back({event.proc, event.id, event.deadline + skew_, event.bytes, -1});
      advance_questions();
      break;
    case Event::kReply: {
      const auto peer = peers_.find(event.proc);
      if (peer == peers_.end() || peer->second.link() < 0 || !links_[peer->second.link()].identified)
        break;  // the asker asks again on its next connection
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

void Core::on_report(const Event& event) {
  if (event.proc != 0 && event.proc != self_) report(event.proc, event.flags & kUnreachable, event.bytes);
  else report(self_, event.flags & (kFailed | kRevoked), event.bytes);
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
  const int domain = domain_of(proc);
  if (domain < 0) return;
  const auto peer = peers_.find(proc);
  if (!died && leading_ && peer != peers_.end() &&
      peer->second.link() >= 0) {  // its successor dials; if all leave now, nobody does
    Watch& watch = watches_[domain];
    watch.sign = watch.heard = now_;
    watch.dial_at = std::max(watch.dial_at, now_ + config_.patience);
  }
  Action& action = act(died ? Action::kDoom : Action::kLeft);
  action.proc = proc;
  action.flags = end.flags;
  action.bytes = end.text;
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
    if (link.identified && link.beating && link.peer_digest != ends_digest_) send_state(connection);
  }
  // Leads that notice the loss of this domain's lead dial; this process dials those that have not.
  for (Watch& watch : watches_) watch.dial_at = std::min(watch.dial_at, now_ + config_.tick);
}

// Connections.

const Member* Core::find_member(Proc proc) const {
  const int index = roster_ == nullptr ? -1 : roster_->index_of(proc);
  return index < 0 ? nullptr : &roster_->members[index];
}

int Core::domain_of(Proc proc) const {
  const int index = roster_ == nullptr ? -1 : roster_->index_of(proc);
  return index < 0 ? -1 : roster_->domain_of[index];
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
    Link& link = links_[peer.link()];
    link.for_watch = false;
    return link.identified ? peer.link() : -1;
  }
  if (now_ >= peer.next_dial) dial(proc, &peer, false);
  else wake_by(peer.next_dial);
  return -1;
}

void Core::send(int connection, FrameKind kind, Bytes body, const AgreementKey* key) {
  const Frame frame{kind, world_, key == nullptr ? epoch_ : key->epoch, term_, self_, std::move(body)};
  Action& action = act(Action::kSend);
  action.connection = connection;
  action.bytes = control::encode(frame);
  links_[connection].sent = now_;
}

void Core::send_state(int connection) {
  links_[connection].peer_digest = ends_digest_;
  send(connection, FrameKind::kState, encode(ends_));
}

// Begins this side of a connection: the hello, who this is, a random number.
void Core::greet(int connection, const Bytes& nonce) {
  Link& link = links_[connection];
  link.heard = link.sign = now_;
  link.nonce = nonce;
  Action& action = act(Action::kSend);
  action.connection = connection;
  action.bytes = control::encode(Hello{kVersion, kOldestVersion, config_.build});
  send(connection, FrameKind::kNonce, nonce);
}

// What only holders of the listener's token can say, about this connection and in one direction alone.
Bytes Core::proof(const Link& link, bool of_dialer) const {
  const Member* member = find_member(link.proc);
  const std::string& token = !link.dialed ? token_ : member == nullptr ? Bytes() : member->endpoint.token;
  const Bytes& dialer = link.dialed ? link.nonce : link.theirs;
  const Bytes& listener = link.dialed ? link.theirs : link.nonce;
  Writer writer;
  writer.number(static_cast<std::uint8_t>(of_dialer)).text(dialer).text(listener);
  writer.number(link.dialed ? self_ : link.claimed).number(link.dialed ? link.claimed : self_);
  return hmac_sha256(token, writer.take());
}

void Core::on_accepted(const Event& event) {
  std::size_t strangers = 0;
  for (const auto& [connection, link] : links_) strangers += link.proc == 0 ? 1 : 0;
  if (strangers >= kMostStrangers + (roster_ == nullptr ? kMostMembers : roster_->members.size())) {
    act(Action::kClose).connection = event.connection;
    return;
  }
  links_[event.connection] = Link();
  greet(event.connection, event.nonce);
  wake_by(now_);
}

void Core::on_dialed(const Event& event) {
  Peer& peer = peers_[event.proc];
  peer.dialing = peer.refused = peer.suspect = false;
  if (is_gone(event.proc) || peer.out >= 0) {
    act(Action::kClose).connection = event.connection;
    return;
  }
  peer.out = event.connection;
  Link& link = links_[event.connection] = Link();
  link.proc = event.proc;
  link.dialed = true;
  link.beating = link.for_watch = peer.for_watch;
  greet(event.connection, event.nonce);
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
  const int domain = domain_of(event.proc);
  if (leading_ && domain >= 0) {
    if (watches_[domain].hunt < 0) start_hunt(domain);
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

bool Core::on_nonce(int connection, const Frame& frame) {
  Link& link = links_[connection];
  const bool is_known = link.dialed ? frame.from == link.proc : frame.from != 0 && frame.from != self_;
  if (!is_known || frame.body.size() != kNonceBytes || !link.theirs.empty()) return false;
  link.claimed = frame.from;
  link.theirs = frame.body;
  send(connection, FrameKind::kIdentity, proof(link, link.dialed));
  return true;
}

bool Core::on_identity(int connection, const Frame& frame) {
  Link& link = links_[connection];
  if (link.theirs.empty() || frame.from != link.claimed) return false;
  if (!equal_secrets(frame.body, proof(link, !link.dialed))) return false;
  if (!link.dialed) {
    link.proc = frame.from;
    Peer& peer = peers_[frame.from];
    // The newest connection of a dialer replaces its older one: what is still in flight there is void.
    if (peer.in >= 0) close(peer.in);
    peer.in = connection;
  }
  link.identified = true;
  link.heard = link.sign = now_;
  link.parser.trust();
  if (!ends_.empty()) send_state(connection);
  if (link.beating) send(connection, FrameKind::kBeat, Writer().number(ends_digest_).take());
  peers_[frame.from].suspect = false;
  if (const End* end = end_of(frame.from); end != nullptr && end->is_death()) close(connection);  // it knows why now
  routed_ = true;
  return true;
}

bool Core::on_frame(int connection, Frame* frame) {
  Link& link = links_[connection];
  // 0: the sender hasn't met its world yet.
  if (frame->world != world_ && frame->world != 0 && world_ != 0) return false;
  if (!link.identified && frame->kind == FrameKind::kNonce) return on_nonce(connection, *frame);
  if (!link.identified) return frame->kind == FrameKind::kIdentity && on_identity(connection, *frame);
  if (frame->from != link.proc) return false;
  link.heard = link.sign = now_;
  switch (frame->kind) {
    case FrameKind::kNonce:
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
  if (roster_ != nullptr && epoch_ >= event.epoch) return;
  if (me < 0 || event.roster->domains.size() > kMostDomains || event.roster->members.size() > kMostMembers) {
    act(Action::kRefuse).bytes = me < 0 ? "this process is no member of its world"
                                        : "a world of " + std::to_string(event.roster->members.size()) + " ranks on " +
                                              std::to_string(event.roster->domains.size()) +
                                              " hosts is too large: at most " + std::to_string(kMostMembers) +
                                              " ranks on " + std::to_string(kMostDomains) + " hosts";
    return;
  }
  world_ = event.world;
  epoch_ = event.epoch;
  term_ = event.term;
  roster_ = event.roster;
  me_ = me;
  leading_ = false;
  watches_.clear();
  for (const int index : roster_->domains[own_domain()]) {
    if (index != me) seen_.emplace(roster_->members[index].proc, now_);
  }
  for (const auto& entry : ends_) announce(entry, {});
  dirty_ = true;
}

void Core::leave() {
  report(self_, kLeft, "");
  publish();
  for (const auto& [connection, link] : links_) {
    if (link.identified && link.beating) send_state(connection);
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
  for (Watch& watch : watches_) {
    watch.sign = watch.heard = now_;
    if (watch.hunt >= 0) watch.hunt = now_;
  }
}

// Returns true for the lowest living process of the domain, and where all lower ones have stale beats.
bool Core::is_lead() const {
  for (const int index : roster_->domains[own_domain()]) {
    if (index == me_) return true;
    const Proc proc = roster_->members[index].proc;
    if (!is_gone(proc) && now_ - seen_.at(proc) <= config_.stale) return false;
  }
  return true;
}

void Core::start_leading() {
  bool acts = false, after_death = false, after_farewell = false;
  for (const int index : roster_->domains[own_domain()]) {
    if (index >= me_) break;
    const End* end = end_of(roster_->members[index].proc);
    acts = acts || end == nullptr;
    after_death = after_death || (end != nullptr && end->is_death());
    after_farewell = after_farewell || end != nullptr;
  }
  watches_.assign(roster_->domains.size(), Watch{});
  for (std::size_t domain = 0; domain < watches_.size(); ++domain) {
    const bool dials = roster_->domains[domain].front() < me_;  // else it is dialed
    Watch& watch = watches_[domain];
    watch.dial_at = acts             ? now_
                    : after_death    ? now_ + config_.tick
                    : after_farewell ? now_ + config_.patience
                    : dials          ? now_
                                     : now_ + config_.patience;
    watch.sign = watch.heard = now_;
  }
}

// A connection to `proc` broke without a farewell. If it was watched, or its domain is hunted already, all of its
// domain are dialed at once. A process that leaves closes the connections of its calls without a word: these make no
// suspect.
void Core::hunt(Proc proc, bool was_watched) {
  const int domain = domain_of(proc);
  if (!leading_ || domain < 0 || (!was_watched && watches_[domain].hunt < 0)) return;
  start_hunt(domain);
  if (was_watched) peers_[proc].suspect = true;
  dirty_ = true;
}

// Uses a connection for liveness from now on; it is silent unless the peer answers soon.
void Core::watch_link(int connection) {
  Link& link = links_[connection];
  link.beating = true;
  link.heard = std::min(link.heard, now_ - config_.beat * 5 / 2 + config_.settle);
  if (link.peer_digest != ends_digest_) send_state(connection);
  send(connection, FrameKind::kBeat, Writer().number(ends_digest_).take());
}

void Core::start_hunt(int domain) {
  for (const int index : roster_->domains[domain]) {
    const auto peer = peers_.find(roster_->members[index].proc);
    if (peer == peers_.end()) continue;
    peer->second.refused = false;
    peer->second.next_dial = std::min(peer->second.next_dial, now_ + config_.redial);
    const int connection = peer->second.link();
    if (connection >= 0 && !links_[connection].beating && links_[connection].identified) watch_link(connection);
  }
  watches_[domain].hunt = watches_[domain].dial_at = now_;
}

// Looks at everything that depends on time, on the ends and on watched connections.
void Core::tend() {
  alarm_ = kNever;
  const bool ticked = now_ >= next_tick_;
  if (ticked) next_tick_ = now_ + config_.tick;
  if (roster_ != nullptr || !links_.empty()) wake_by(next_tick_);
  if (ticked && !seen_.empty()) act(Action::kBeat);
  if (roster_ != nullptr) tend_domains(ticked);
  if (ticked || dirty_) tend_links();
  advance_all();
}

void Core::tend_domains(bool ticked) {
  const End* own = end_of(self_);
  const bool leads = (own == nullptr || !own->is_death()) && is_lead();
  if (leads && !leading_) start_leading();
  leading_ = leads;
  if (!leads) return;
  const Roster& roster = *roster_;
  for (const int index : roster.domains[own_domain()]) {
    const Proc proc = roster.members[index].proc;
    if (ticked && index != me_ && !is_gone(proc) && now_ - seen_.at(proc) > config_.stale) {
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
    Watch& watch = watches_[domain];
    watch.sign = std::max(watch.sign, link.sign);
    if (link.identified) watch.heard = std::max(watch.heard, link.heard);
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
    const int domain = index < 0 ? own_domain() : roster.domain_of[index];
    if (domain != own_domain() && first[domain] >= 0 && first[domain] < index) surplus.push_back(connection);
  }
  for (const int connection : surplus) close(connection);
  for (std::size_t domain = 0; domain < roster.domains.size(); ++domain) {
    if (static_cast<int>(domain) != own_domain()) {
      tend_domain(static_cast<int>(domain), fresh[domain], linked[domain] != 0);
    }
  }
}

void Core::tend_domain(int domain, int fresh, bool linked) {
  const Roster& roster = *roster_;
  Watch& watch = watches_[domain];
  const auto& indices = roster.domains[domain];
  if (std::all_of(indices.begin(), indices.end(), [&](int index) { return is_gone(roster.members[index].proc); })) {
    return;
  }
  const bool is_unreachable = now_ - watch.sign > config_.limit;
  if (is_unreachable || (now_ - watch.heard > config_.limit && now_ - watch.sign < config_.limit / 2)) {
    for (const int index : indices) {
      const Proc proc = roster.members[index].proc;
      if (!is_gone(proc)) report(proc, is_unreachable ? kUnreachable : kStopped, "");
    }
    return;
  }
  if (fresh >= 0) {
    watch.hunt = -1;
    if (!links_[fresh].beating) watch_link(fresh);
    return;
  }
  if (watch.hunt >= 0) judge_refused(domain);
  if (now_ >= watch.dial_at) {
    if (linked && watch.hunt < 0) start_hunt(domain);  // connected, and silent
    dial_domain(domain);
  }
  wake_by(watch.dial_at);
}

// Refused dials are exits if nobody of the domain answers, who would know better: a process may also have left.
void Core::judge_refused(int domain) {
  const Watch& watch = watches_[domain];
  std::vector<Proc> refused;
  bool all = true;
  for (const int index : roster_->domains[domain]) {
    const Proc proc = roster_->members[index].proc;
    if (is_gone(proc)) continue;
    if (peers_[proc].refused) refused.push_back(proc);
    else all = false;
  }
  if (refused.empty()) return;
  if (!all && now_ - watch.hunt < config_.settle) return wake_by(watch.hunt + config_.settle);
  for (const Proc proc : refused) report(proc, kExited, "its port is closed");
}

// Dials the lowest living process of a domain; in a hunt all of them.
void Core::dial_domain(int domain) {
  Watch& watch = watches_[domain];
  watch.dial_at = now_ + config_.patience;
  for (const int index : roster_->domains[domain]) {
    const Proc proc = roster_->members[index].proc;
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
    if (now_ - link.sign > config_.limit / 2) {  // a full window, or a network that lost its state: dials tell
      useless.push_back(connection);
      continue;
    }
    const Nanos silent = now_ - link.heard;
    if (silent > config_.beat * 3 / 2) act(Action::kProbe).connection = connection;
    if (!link.identified || now_ - link.sent < config_.beat) continue;
    if (link.peer_digest != ends_digest_) send_state(connection);
    else send(connection, FrameKind::kBeat, Writer().number(ends_digest_).take());
  }
  for (const int connection : useless) {
    const Link& link = links_[connection];
    if (link.identified && is_gone(link.proc))
      send_state(connection);  // it may live, and is to know what it is taken for
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
  mix(epoch_);
  mix(term_);
  mix(leading_);
  for (const Watch& watch : watches_) {
    mix_time(watch.sign);
    mix_time(watch.heard);
    mix_time(watch.dial_at);
    mix(watch.hunt < 0 ? -1 : now_ - watch.hunt);
  }
  for (const auto& [connection, link] : links_) {
    mix(connection);
    mix(link.proc);
    mix(link.dialed | link.for_watch << 1 | link.identified << 2 | link.beating << 3);
    mix(link.claimed);
    mix_text(link.nonce);
    mix_text(link.theirs);
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
