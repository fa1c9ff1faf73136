#include "core.h"

#include <algorithm>
#include <type_traits>

#include "hmac.h"

namespace parallel_state::control {
namespace {

// Unidentified connections. Early, all ranks may dial at once.
constexpr std::size_t kMostStrangers = 256, kMostEarlyStrangers = 1024;
constexpr std::uint8_t kAllFlags = kLeft | kExited | kUnreachable | kFailed | kStopped;

std::uint64_t state_digest(const Ends& ends) {
  std::uint64_t digest = kEmptyDigest;
  for (const auto& [proc, end] : ends) digest += digest_of(proc, end);
  return digest;
}

bool decode(Reader* reader, Ends* ends) {
  get(reader, ends);
  Proc last = 0;
  for (const auto& [proc, end] : *ends) {
    if (std::exchange(last, proc) >= proc || end.flags == 0 || (end.flags & ~kAllFlags) != 0) return false;
  }
  return reader->ok();
}

End joined(const End& one, const End& other) {
  return {static_cast<std::uint8_t>(one.flags | other.flags), std::min(one.reporter, other.reporter),
          std::max(one.text, other.text)};
}

bool is_before(const std::pair<Proc, End>& entry, Proc proc) { return entry.first < proc; }

std::string versions(const Hello& hello, std::uint32_t build) {
  return "the control plane of this host has version " + std::to_string(kVersion) + " (build " + std::to_string(build) +
         "), a peer has version " + std::to_string(hello.version) + " (build " + std::to_string(hello.build) +
         ", which accepts " + std::to_string(hello.oldest) + " and later): install the same package on all hosts";
}

}  // namespace

Roster::Roster(std::vector<Member> all) : members(std::move(all)) {
  std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) { return a.rank < b.rank; });
  std::map<std::uint64_t, int> numbers;
  std::vector<Proc> procs;
  for (const Member& member : members) {
    const int index = static_cast<int>(domain_of.size());
    const int domain = numbers.emplace(member.domain, static_cast<int>(numbers.size())).first->second;
    if (domain == static_cast<int>(domains.size())) domains.emplace_back();
    place_of.push_back(static_cast<int>(domains[domain].size()));
    domains[domain].push_back(index);
    domain_of.push_back(domain);
    indices[member.proc] = index;
    procs.push_back(member.proc);
  }
  world = digest_of(procs);
}

int Roster::index_of(Proc proc) const {
  const auto found = indices.find(proc);
  return found == indices.end() ? -1 : found->second;
}

// With fewer beats in the limit, live connections would be closed.
Core::Core(Proc self, std::string token, Config config) : self_(self), token_(std::move(token)), config_(config) {
  config_.limit = std::max(config_.limit, 4 * config_.beat);
}

void Core::step(Nanos now, const Event& event, std::vector<Action>* actions) {
  out_ = actions;
  skew_ = std::max(skew_, now_ - now);
  now_ = now + skew_;
  // A paused process received nothing: shift its clocks before it checks peers.
  if (alarm_ != kNever && now_ > alarm_ + config_.pause) excuse(now_ - alarm_);
  if (!left_ || event.kind == Event::kCall) handle(event);
  for (int round = 0; round < 4 && !left_ && (dirty_ || urgent_ || now_ >= alarm_); ++round) {
    flood();
    dirty_ = false;
    tend();
  }
  if (publish_at_once_) publish();
  if (!left_) try_leave();
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
    case Event::kBoard: on_board(event); break;
    case Event::kBeats:
      beats_asked_ = std::max(beats_asked_ - 1, 0);
      for (const Proc proc : event.procs) {
        const int index = index_of(proc);
        if (index >= 0 && domain_of(proc) == roster_->domain_of[me_]) seen_[roster_->place_of[index]] = now_;
      }
      break;
    // Not published: every process of the domain detects this exit. The reporter makes all entries equal.
    case Event::kEnded: join({{event.proc, {kExited, event.proc, ""}}}, Source::kBoard); break;
    case Event::kExiting: report(event.proc, kExited, "exiting"); break;
    case Event::kCall: on_call(*event.call, false); break;
    case Event::kCancel: on_call(*event.call, true); break;
    case Event::kReport:
      if (event.proc != 0 && event.proc != self_) report(event.proc, event.flags & kUnreachable, event.bytes);
      else report(self_, event.flags & kFailed, event.bytes);
      break;
    case Event::kLeave:
      leaving_ = std::min(leaving_, std::max(own_time(event.deadline), now_));
      waits_until_ = std::min(waits_until_, now_ + config_.settle);
      dirty_ = true;
      end_calls();
      break;
  }
}

Action& Core::act(Action::Kind kind, int connection) {
  out_->emplace_back();
  out_->back().kind = kind;
  out_->back().connection = connection;
  return out_->back();
}

void Core::log(Proc proc, std::string text) {
  Action& action = act(Action::kLog);
  action.proc = proc;
  action.bytes = std::move(text);
}

const End* Core::end_of(Proc proc) const {
  const auto at = std::lower_bound(ends_.begin(), ends_.end(), proc, is_before);
  return at == ends_.end() || at->first != proc ? nullptr : &at->second;
}

void Core::report(Proc proc, std::uint8_t flags, const std::string& text) {
  if (flags != 0) join({{proc, {flags, self_, text.substr(0, kMostTextBytes)}}}, Source::kOwn);
}

// No forwarding: a peer sends its state to all leads, and the domain reads each board.
void Core::join(const Ends& other, Source source) {
  auto at = ends_.begin();
  for (const auto& [proc, end] : other) {
    at = std::lower_bound(at, ends_.end(), proc, is_before);
    const bool is_new = at == ends_.end() || at->first != proc;
    const End before = is_new ? End() : at->second;
    const End after = is_new ? end : joined(before, end);
    if (after.fields() == before.fields()) continue;
    if (roster_ == nullptr ? ends_.size() >= kMostMembers : index_of(proc) < 0) continue;
    if (is_new) at = ends_.emplace(at, proc, after);
    else at->second = after;
    ends_digest_ += digest_of(proc, after) - (is_new ? 0 : digest_of(proc, before));
    if (source != Source::kBoard) unpublished_ = true;
    if (after.flags == before.flags) continue;
    dirty_ = true;
    const bool died = after.is_death() && !before.is_death();
    if (died && source != Source::kPeer) urgent_ = true;
    if (died && source != Source::kBoard) publish_at_once_ = true;
    announce(proc, after, before);
  }
}

void Core::announce(Proc proc, const End& end, const End& before) {
  const bool died = end.is_death() && !before.is_death();
  const bool left = (end.flags & kLeft) != 0 && (before.flags & kLeft) == 0;
  const int domain = domain_of(proc);
  if ((!died && !left) || domain < 0) return;
  if (!died && leading_ && link_to(proc) >= 0) {  // the successor of a lead that left dials first
    Watch& watch = watches_[domain];
    watch.sign = watch.heard = now_;
    watch.dial_at = std::max(watch.dial_at, now_ + config_.patience);
  }
  if (died && domain == roster_->domain_of[me_]) alert_ = next_tick_ = now_;
  Action& action = act(died ? Action::kDoom : Action::kLeft);
  action.proc = proc;
  action.flags = end.flags;
  action.bytes = end.text;
  action.id = end.reporter;
}

std::vector<int> Core::lost_by(const Action& end) const {
  const int domain = domain_of(end.proc), mine = roster_->domain_of[me_];
  if (domain != mine || (end.flags & (kLeft | kExited | kFailed)) != 0) {
    return {roster_->members[index_of(end.proc)].rank};
  }
  std::vector<int> lost;
  const int teller = domain_of(end.id);
  if (teller < 0 || teller == mine) return lost;
  for (const int index : roster_->domains[teller]) lost.push_back(roster_->members[index].rank);
  return lost;
}

void Core::on_board(const Event& event) {
  Reader reader(event.bytes, kMostTextBytes);
  Ends ends;
  std::vector<Silence> silences;
  if (!decode(&reader, &ends)) return;
  get(&reader, &silences);
  if (!reader.finished()) return;
  for (std::size_t domain = 0; domain < std::min(silences.size(), silences_.size()); ++domain) {
    silences[domain].heard = std::min(own_time(silences[domain].heard), now_);
    silences_[domain] = std::max(silences_[domain], silences[domain]);
  }
  // One farewell of a domain's first process can report both processes.
  const auto has_left = [&](Proc proc) {
    const auto at = std::lower_bound(ends.begin(), ends.end(), proc, is_before);
    return at != ends.end() && at->first == proc && at->second.flags == kLeft;
  };
  const bool is_first = roster_ != nullptr && event.proc == proc_at(own_domain().front());
  farewell_sent_ = farewell_sent_ || (is_first && has_left(event.proc) && has_left(self_));
  join(ends, Source::kBoard);
}

void Core::note_silences() {
  for (int domain = 0; domain < static_cast<int>(watches_.size()); ++domain) {
    const auto& indices = roster_->domains[domain];
    if (&indices == &own_domain() || all_gone(indices)) continue;
    Silence& known = silences_[domain];
    const Nanos heard = std::max(watches_[domain].heard, known.heard);
    const Silence silence{heard, now_ - heard > unheard()};
    if (silence.silent == known.silent || silence < known) continue;
    known = silence;
    unpublished_ = true;
  }
}

void Core::publish() {
  publish_at_once_ = false;
  if (is_alone()) return;
  if (leading_) note_silences();
  if (!std::exchange(unpublished_, false)) return;
  auto silences = silences_;
  for (Silence& silence : silences) silence.heard -= skew_;
  act(Action::kBoard).bytes = packed(ends_, silences);
}

void Core::flood() {
  if (!urgent_) return;
  urgent_ = false;
  for (const auto& [connection, link] : links_) {
    if (link.identified && link.beating && link.peer_digest != ends_digest_) send_state(connection);
  }
  // Leads that detect the loss dial this domain. This process dials after one tick.
  for (Watch& watch : watches_) watch.dial_at = std::min(watch.dial_at, now_ + config_.tick);
}

int Core::domain_of(Proc proc) const {
  const int index = index_of(proc);
  return index < 0 ? -1 : roster_->domain_of[index];
}

bool Core::is_stranger(const Link& link) const {
  return !link.dialed && (!link.identified || (roster_ != nullptr && index_of(link.proc) < 0));
}

void Core::dial(Proc proc, bool for_watch) {
  Peer& peer = peers_[proc];
  const int index = index_of(proc);
  if (index < 0 || peer.out >= 0) return;
  if (!peer.dialing && now_ < peer.next_dial) return wake_by(peer.next_dial);
  peer.for_watch = for_watch || (peer.dialing && peer.for_watch);
  if (peer.dialing) return;
  peer.dialing = true;
  peer.next_dial = now_ + config_.redial;
  Action& action = act(Action::kDial);
  action.proc = proc;
  action.endpoint = &roster_->members[index].endpoint;
}

int Core::link_to(Proc proc) const {
  const auto peer = peers_.find(proc);
  if (peer == peers_.end()) return -1;
  for (const int connection : {peer->second.out, peer->second.in}) {
    if (connection >= 0 && links_.at(connection).identified) return connection;
  }
  return -1;
}

int Core::connect(Proc proc) {
  const int connection = link_to(proc);
  if (connection >= 0) links_[connection].for_watch = false;
  else if (!is_dead(self_)) dial(proc, false);  // peers that report it as dead close its connections
  return connection;
}

void Core::send(int connection, FrameKind kind, Bytes body) {
  send(connection, std::make_shared<Bytes>(encode(Frame{kind, world(), self_, std::move(body)})));
}

void Core::send_state(int connection) {
  Link& link = links_[connection];
  link.peer_digest = ends_digest_;
  link.beaten = now_;
  send(connection, FrameKind::kState, packed(ends_));
}

void Core::send_beat(int connection) {
  links_[connection].beaten = now_;
  send(connection, FrameKind::kBeat, Writer().number(ends_digest_).take());
}

void Core::greet(int connection, const Bytes& nonce) {
  Link& link = links_[connection];
  link.opened = link.watched = link.heard = link.sign = now_;
  link.nonce = nonce;
  send(connection, std::make_shared<Bytes>(encode(Hello{kVersion, kOldestVersion, config_.build}) +
                                           encode(Frame{FrameKind::kNonce, world(), self_, nonce})));
}

Bytes Core::proof(const Link& link, bool of_dialer) const {
  const int index = link.dialed ? index_of(link.proc) : -1;
  const Bytes& token = !link.dialed ? token_ : index < 0 ? Bytes() : roster_->members[index].endpoint.token;
  if (link.dialed) return prove(token, of_dialer, link.nonce, link.theirs, self_, link.proc);
  return prove(token, of_dialer, link.theirs, link.nonce, link.proc, self_);
}

void Core::on_accepted(const Event& event) {
  std::size_t strangers = 0;
  int oldest = -1;
  for (const auto& [connection, link] : links_) {
    if (!is_stranger(link)) continue;
    if (strangers++ == 0 || link.opened < links_.at(oldest).opened) oldest = connection;
  }
  // The oldest handshake is the least likely to complete.
  if (strangers >= (roster_ == nullptr ? kMostEarlyStrangers : kMostStrangers + roster_->members.size())) {
    refuse(oldest, "too many unidentified connections, and this is the oldest");
  }
  links_[event.connection] = Link();
  greet(event.connection, event.nonce);
  wake_by(now_);
}

void Core::on_dialed(const Event& event) {
  Peer& peer = peers_[event.proc];
  peer.dialing = false;
  peer.refused = kNever;
  if (is_gone(event.proc) || peer.out >= 0) {
    act(Action::kClose, event.connection);
    return;
  }
  peer.out = event.connection;
  Link& link = links_[event.connection] = Link();
  link.proc = event.proc;
  link.dialed = true;
  link.beating = link.for_watch = peer.for_watch;
  greet(event.connection, event.nonce);
}

// A refused dial of a call reports no exit: the process may have left.
void Core::on_no_dial(const Event& event) {
  Peer& peer = peers_[event.proc];
  peer.dialing = false;
  peer.next_dial = now_ + config_.tick;
  wake_by(peer.next_dial);
  const int domain = domain_of(event.proc);
  if (event.kind == Event::kNoAnswer || !peer.for_watch || !leading_ || domain < 0 || is_gone(event.proc)) return;
  if (watches_[domain].hunt < 0) start_hunt(domain);
  peer.refused = std::min(peer.refused, now_);
  dirty_ = true;
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
                      : result == Parser::Result::kFrame ? on_frame(connection, frame)
                                                         : false;
    found = links_.find(connection);
    if (fine || found == links_.end()) continue;
    if (is_stranger(found->second)) return refuse(connection, "malformed bytes, or another token");
    log(found->second.proc, "closed a connection: malformed bytes");
    act(Action::kClose, connection);
    drop(connection, true);
    return;
  }
}

bool Core::on_hello(int connection, const Hello& hello) {
  if (hello.version >= kOldestVersion && kVersion >= hello.oldest) return true;
  const Link& link = links_[connection];
  // Only a dialed peer is known to belong to this job.
  if (link.dialed) act(Action::kRefuse).bytes = versions(hello, config_.build);
  else log(0, versions(hello, config_.build));
  close(connection);
  return true;
}

bool Core::on_nonce(int connection, const Frame& frame) {
  Link& link = links_[connection];
  const bool is_known = link.dialed ? frame.from == link.proc : frame.from != self_;
  if (!is_known || frame.body.size() != kNonceBytes || !link.theirs.empty()) return false;
  link.proc = frame.from;
  link.theirs = frame.body;
  send(connection, FrameKind::kIdentity, proof(link, link.dialed));
  return true;
}

bool Core::on_identity(int connection, const Frame& frame) {
  Link& link = links_[connection];
  if (link.theirs.empty() || frame.from != link.proc) return false;
  if (!token_.empty() && !equal_secrets(frame.body, proof(link, !link.dialed))) return false;
  if (link.proc == 0) {
    act(Action::kGuest, connection).bytes = link.theirs + link.nonce + Bytes(link.parser.rest());
    links_.erase(connection);
    return true;
  }
  if (!link.dialed) {
    Peer& peer = peers_[frame.from];
    if (peer.in >= 0) close(peer.in);
    peer.in = connection;
  }
  link.identified = true;
  link.heard = link.sign = now_;
  link.parser.trust();
  dirty_ = true;
  if (!ends_.empty()) send_state(connection);
  if (link.beating) send_beat(connection);
  if (is_dead(frame.from)) close(connection);
  return true;
}

bool Core::on_frame(int connection, const Frame& frame) {
  Link& link = links_[connection];
  if (frame.world != world() && frame.world != 0 && world() != 0) return false;
  if (!link.identified && frame.kind == FrameKind::kNonce) return on_nonce(connection, frame);
  if (!link.identified) return frame.kind == FrameKind::kIdentity && on_identity(connection, frame);
  if (frame.from != link.proc) return false;
  link.heard = link.sign = now_;
  switch (frame.kind) {
    case FrameKind::kNonce:
    case FrameKind::kIdentity:
    case FrameKind::kStoreCall:
    case FrameKind::kStoreReply: return false;
    case FrameKind::kBeat: {
      Reader reader(frame.body);
      link.peer_digest = reader.number<std::uint64_t>();
      if (!link.beating) watch_link(connection);
      link.heard = now_;
      return reader.finished();
    }
    case FrameKind::kState: {
      Reader reader(frame.body, kMostTextBytes);
      Ends ends;
      if (!decode(&reader, &ends) || !reader.finished()) return false;
      link.peer_digest = state_digest(ends);
      join(ends, Source::kPeer);
      return true;
    }
    default: return on_round(connection, frame);
  }
}

void Core::drop(int connection, bool by_peer) {
  const auto found = links_.find(connection);
  if (found == links_.end()) return;
  const Link link = std::move(found->second);
  links_.erase(found);
  if (!link.identified && !link.dialed) return;
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
  dirty_ = true;
  // Dial the whole domain if the connection was watched, or in a hunt.
  const int domain = domain_of(link.proc);
  if (!by_peer || !leading_ || domain < 0 || is_gone(link.proc)) return;
  if (!link.beating && watches_[domain].hunt < 0) return;
  start_hunt(domain);
}

void Core::close(int connection) {
  act(Action::kClose, connection);
  drop(connection, false);
}

void Core::refuse(int connection, const char* reason) {
  std::uint64_t logged = 1;
  while (logged < refused_ + 1) logged *= 10;
  if (++refused_ == logged) {
    Action& action = act(Action::kLog, connection);
    action.flags = 1;
    action.bytes = "refused a connection (number " + std::to_string(refused_) + "): " + reason;
  }
  close(connection);
}

void Core::meet(const Event& event) {
  const int me = event.roster->index_of(self_);
  if (roster_ != nullptr || me < 0) return;
  roster_ = event.roster;
  me_ = me;
  watches_.assign(roster_->domains.size(), Watch());
  silences_.assign(roster_->domains.size(), Silence());
  seen_.assign(own_domain().size(), now_);
  const Ends known = std::exchange(ends_, {});
  ends_digest_ = kEmptyDigest;
  join(known, Source::kPeer);
  dirty_ = true;
}

void Core::try_leave() {
  if (leaving_ == kNever) return;
  wake_by(leaving_);
  if (owes_farewell() || owes_verdict()) return;
  if (!std::exchange(said_left_, true)) {
    report(self_, kLeft, "");
    publish();
    ask_beats();  // once answered, this process has read all that its domain published before
  }
  if (beats_asked_ > 0 && now_ < leaving_) return;
  publish();  // a farewell that arrived meanwhile, perhaps only here
  for (const auto& [connection, link] : links_) {
    if (link.identified && link.beating) send_state(connection);
    else if (link.identified) send(connection, FrameKind::kState, packed(Ends{{self_, {kLeft, self_, ""}}}));
    act(Action::kClose, connection);
  }
  links_.clear();
  rounds_.clear();
  alarm_ = kNever;
  left_ = true;
}

// A lead waits for its domain, so that one farewell reports all. Then it dials: no process may know of the farewell if
// the rest of its domain exits before the next lead connects.
bool Core::owes_farewell() {
  if (!leading_ || farewell_sent_ || now_ >= leaving_ || watches_.size() == 1) return false;
  const auto& mates = own_domain();
  if (now_ < waits_until_ &&
      !std::all_of(mates.begin(), mates.end(), [&](int index) { return index == me_ || is_gone(proc_at(index)); })) {
    wake_by(waits_until_);
    return true;
  }
  bool owes = false;
  for (std::size_t domain = 0; domain < watches_.size(); ++domain) {
    const auto& indices = roster_->domains[domain];
    if (&indices == &mates || all_gone(indices) || watches_[domain].link >= 0) continue;
    dial_domain(static_cast<int>(domain));
    owes = true;
  }
  return owes;
}

// Shifts all clocks by a pause. No peer is judged within `settle`, so that received bytes are read first. Repeated
// pauses would delay judgments forever if clocks restarted.
void Core::excuse(Nanos late) {
  const auto shift = [&](Nanos* since, Nanos patience) {
    *since = std::min(std::max(*since + late, now_ - patience + config_.settle), now_);
  };
  for (auto& [connection, link] : links_) {
    shift(&link.heard, config_.beat * 5 / 2);
    shift(&link.sign, config_.limit / 2);
    shift(&link.opened, config_.stranger);
  }
  for (Nanos& seen : seen_) shift(&seen, config_.stale);
  for (auto& [proc, peer] : peers_) {
    if (peer.refused != kNever) shift(&peer.refused, config_.settle);
  }
  for (Watch& watch : watches_) {
    shift(&watch.sign, config_.limit);
    shift(&watch.heard, config_.limit);
    if (watch.hunt >= 0) watch.hunt = now_;
  }
  for (Silence& silence : silences_) {
    if (leading_ && silence.silent) shift(&silence.heard, config_.limit);
  }
  const Nanos soon = now_ + config_.settle;
  for (auto& [key, round] : rounds_) {
    if (round.deadline < soon) round.deadline = soon;
    if (round.expires < soon) round.expires = soon;
  }
}

bool Core::all_gone(const std::vector<int>& indices) const {
  return std::all_of(indices.begin(), indices.end(), [&](int index) { return is_gone(proc_at(index)); });
}

// Faster after a death, so that a stopped lead is replaced in time to report it.
bool Core::is_stale(int index) const {
  const Nanos seen = seen_[roster_->place_of[index]];
  return now_ - seen > config_.stale || (is_alert() && now_ - std::max(seen, alert_) > config_.stale * 2 / 5);
}

bool Core::is_lead() const {
  if (is_dead(self_)) return false;
  for (const int index : own_domain()) {
    if (index == me_) break;
    if (!is_gone(proc_at(index)) && !is_stale(index)) return false;
  }
  return true;
}

// A lead that acted continues until it has bytes from each domain after the lower process returned. Otherwise a domain
// that exited before would get the limit twice.
bool Core::may_not_yield() const {
  if (!leading_ || is_dead(self_)) return false;
  for (std::size_t domain = 0; domain < watches_.size(); ++domain) {
    const auto& indices = roster_->domains[domain];
    if (&indices != &own_domain() && watches_[domain].heard <= led_ && !all_gone(indices)) return true;
  }
  return false;
}

void Core::start_leading() {
  bool acts = false, after_death = false;
  for (const int index : own_domain()) {
    const End* end = end_of(proc_at(index));
    acts = acts || (index < me_ && end == nullptr);
    after_death = after_death || (end != nullptr && end->is_death());
  }
  const bool follows = after_death || own_domain().front() != me_;
  for (std::size_t domain = 0; domain < watches_.size(); ++domain) {
    const bool dials = roster_->domains[domain].front() < me_;  // else it is dialed
    Watch& watch = watches_[domain] = Watch();
    watch.dial_at = now_ + (acts || (!follows && dials) ? 0 : after_death ? config_.tick : config_.patience);
    // The last lead published each longer silence.
    watch.sign = watch.heard = follows ? std::min(now_, watch.dial_at - unheard()) : now_;
    if (!silences_[domain].silent) continue;
    // A living domain gets `patience` to answer.
    watch.sign = watch.heard = std::max(silences_[domain].heard, now_ - config_.limit + config_.patience);
    start_hunt(static_cast<int>(domain));
  }
}

// The connection counts as silent unless the peer answers within `settle`.
void Core::watch_link(int connection) {
  Link& link = links_[connection];
  link.beating = true;
  link.watched = now_;
  link.heard = std::min(link.heard, now_ - config_.beat * 5 / 2 + config_.settle);
  if (link.peer_digest != ends_digest_) send_state(connection);
  send_beat(connection);
}

void Core::start_hunt(int domain) {
  for (const int index : roster_->domains[domain]) {
    const auto peer = peers_.find(proc_at(index));
    if (peer == peers_.end()) continue;
    peer->second.refused = kNever;
    peer->second.next_dial = std::min(peer->second.next_dial, now_ + config_.redial);
    const int connection = link_to(proc_at(index));
    if (connection >= 0 && !links_[connection].beating) watch_link(connection);
  }
  watches_[domain].hunt = watches_[domain].dial_at = now_;
}

void Core::tend() {
  alarm_ = kNever;
  const bool ticked = now_ >= next_tick_;
  if (ticked) next_tick_ = now_ + (is_alert() ? config_.tick / 4 : config_.tick);
  if (roster_ != nullptr || !links_.empty()) wake_by(next_tick_);
  if (ticked) ask_beats(), publish();
  if (roster_ != nullptr) tend_domains(ticked);
  tend_links();
  if (ticked) forget_peers(), forget_rounds();
  for (auto at = rounds_.begin(); at != rounds_.end();) {
    RoundEntry* entry = &*at++;
    advance(entry);
  }
}

void Core::ask_beats() {
  if (is_alone()) return;
  ++beats_asked_;
  act(Action::kBeat);
}

void Core::tend_domains(bool ticked) {
  const bool leads = is_lead();
  if (leads && !leading_) start_leading();
  if (leads) led_ = now_;
  leading_ = leads || may_not_yield();
  if (!leading_) return;
  for (const int index : own_domain()) {
    if (ticked && index != me_ && !is_gone(proc_at(index)) && is_stale(index)) {
      act(Action::kLook).proc =
          proc_at(index);  // large processes free memory for seconds before their descriptors close
    }
  }
  find_watched_links();
  for (std::size_t domain = 0; domain < watches_.size(); ++domain) {
    if (&roster_->domains[domain] != &own_domain()) tend_domain(static_cast<int>(domain));
  }
}

void Core::find_watched_links() {
  for (Watch& watch : watches_) watch.link = -1, watch.linked = false;
  for (const auto& [connection, link] : links_) {
    const int domain = link.identified || link.dialed ? domain_of(link.proc) : -1;
    if (domain < 0 || is_gone(link.proc)) continue;
    Watch& watch = watches_[domain];
    watch.linked = true;
    watch.sign = std::max(watch.sign, link.sign);
    if (!link.identified) continue;
    watch.heard = std::max(watch.heard, link.heard);
    if (link.beating && now_ - link.heard > config_.beat * 5 / 2) continue;
    if (watch.link < 0 || index_of(link.proc) < index_of(links_[watch.link].proc)) watch.link = connection;
  }
  std::vector<int> surplus;
  for (const auto& [connection, link] : links_) {
    const int domain = link.for_watch ? domain_of(link.proc) : -1;
    const int watched = domain < 0 ? -1 : watches_[domain].link;
    if (watched < 0 || links_[watched].heard < links_[watched].watched) continue;
    if (index_of(links_[watched].proc) < index_of(link.proc)) surplus.push_back(connection);
  }
  for (const int connection : surplus) close(connection);
}

void Core::tend_domain(int domain) {
  Watch& watch = watches_[domain];
  const auto& indices = roster_->domains[domain];
  if (all_gone(indices)) return;
  const bool is_unreachable = now_ - watch.sign > config_.limit;
  const bool is_stopped = now_ - watch.heard > config_.limit && now_ - watch.sign < config_.limit / 2;
  if ((is_unreachable || is_stopped) && leaving_ == kNever) {
    for (const int index : indices) {
      if (!is_gone(proc_at(index))) report(proc_at(index), is_unreachable ? kUnreachable : kStopped, "");
    }
    return;
  }
  if (watch.link >= 0) {
    watch.hunt = -1;
    if (!links_[watch.link].beating) watch_link(watch.link);
    return;
  }
  if (watch.hunt >= 0) judge_refused(domain);
  if (now_ >= watch.dial_at) {
    if (watch.linked && watch.hunt < 0) start_hunt(domain);
    dial_domain(domain);
  }
  wake_by(watch.dial_at);
}

// A leaving process judges only in an earlier hunt: later refusals may be of processes that leave with it.
void Core::judge_refused(int domain) {
  if (watches_[domain].hunt + config_.settle >= waits_until_) return;
  for (const int index : roster_->domains[domain]) {
    const auto peer = peers_.find(proc_at(index));
    if (peer == peers_.end() || peer->second.refused == kNever || is_gone(proc_at(index))) continue;
    if (now_ - peer->second.refused >= config_.settle) report(proc_at(index), kExited, "its port is closed");
    else wake_by(peer->second.refused + config_.settle);
  }
}

void Core::dial_domain(int domain) {
  Watch& watch = watches_[domain];
  watch.dial_at = now_ + config_.patience;
  for (const int index : roster_->domains[domain]) {
    const Proc proc = proc_at(index);
    if (is_gone(proc)) continue;
    Peer& peer = peers_[proc];
    if (peer.out < 0 && peer.in < 0 && peer.refused == kNever) {
      if (!peer.for_watch) peer.next_dial = std::min(peer.next_dial, now_);  // a refused call doesn't delay a watch
      if (now_ < peer.next_dial) watch.dial_at = std::min(watch.dial_at, peer.next_dial);
      dial(proc, true);
    }
    if (watch.hunt < 0) break;
  }
}

void Core::tend_links() {
  std::vector<int> dead, late, useless;
  for (auto& [connection, link] : links_) {
    const bool is_watched = link.beating || (link.dialed && !link.identified);
    if ((link.identified || link.dialed) && is_dead(link.proc)) {
      dead.push_back(connection);
    } else if (is_stranger(link) && now_ - link.opened >= config_.stranger) {
      late.push_back(connection);
    } else if (is_watched &&
               now_ - std::max(link.sign, link.watched) > config_.limit / 2) {  // while idle it had no sign
      // Dial again: a full window or a lost NAT entry also silences a connection.
      useless.push_back(connection);
    } else if (is_watched) {
      if (now_ - link.heard > config_.beat * 3 / 2) act(Action::kProbe, connection);
      if (!link.identified || now_ - link.beaten < config_.beat) continue;
      if (link.peer_digest != ends_digest_) send_state(connection);
      else send_beat(connection);
    }
  }
  for (const int connection : dead) {
    if (links_[connection].identified) send_state(connection);  // if alive, it must receive the report of its own death
    close(connection);
  }
  for (const int connection : useless) close(connection);
  for (const int connection : late) refuse(connection, "it did not prove within 5 s that it belongs to this job");
}

void Core::forget_peers() {
  for (auto at = peers_.begin(); at != peers_.end();) {
    const auto& [proc, peer] = *at;
    const bool is_idle = peer.out < 0 && peer.in < 0 && !peer.dialing && now_ >= peer.next_dial;
    at = is_idle && (peer.refused == kNever || is_gone(proc)) ? peers_.erase(at) : std::next(at);
  }
}

std::uint64_t Core::digest() const { return digest_of(*this); }

void Core::write(Writer* writer) const {
  put(writer, *this);
  put(writer, std::tie(now_, config_, roster_, me_, rounds_opened_));
}

void Core::read(Reader* reader) {
  get(reader, this);
  get(reader, std::tie(now_, config_, roster_, me_, rounds_opened_));
}

}  // namespace parallel_state::control
