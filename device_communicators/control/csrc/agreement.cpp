// Agreements among members of a world.
//
// An answer promises to ignore lower ballots. So a new decider finds each verdict that a survivor received.
#include <algorithm>
#include <utility>

#include "core.h"

namespace parallel_state::control {
namespace {

// For agreements that were not called here, together.
constexpr std::size_t kMostUncalledBytes = 32U << 20;
// A finished agreement is kept until so many others began, even if members aren't done.
constexpr std::size_t kMostKept = 256;
// For an agreement that is known only from a decider's question.
constexpr Nanos kAskedTime = 600 * kSecond;

bool decode(const Frame& frame, Message* message) {
  Reader reader(frame.body);
  get(&reader, message);
  const auto& verdict = message->verdict;
  if (!reader.finished() || message->key.purpose.size() > kMostTextBytes) return false;
  if (!message->members.empty() && digest_of(message->members) != message->key.members) return false;
  if (frame.kind == FrameKind::kVerdict) return verdict != nullptr && verdict->kind <= Verdict::kUndecided;
  return verdict == nullptr || verdict->kind < Verdict::kUndecided;
}

bool contains(const std::vector<Proc>& procs, Proc proc) {
  return std::find(procs.begin(), procs.end(), proc) != procs.end();
}

bool fits(const Verdict& verdict, const std::vector<Proc>& members) {
  if (verdict.kind == Verdict::kAgreed) return verdict.values.size() == members.size() && verdict.culprits.empty();
  return verdict.values.empty() && verdict.culprits.size() <= members.size() &&
         std::all_of(verdict.culprits.begin(), verdict.culprits.end(),
                     [&](Proc proc) { return contains(members, proc); });
}

std::shared_ptr<const Verdict> undecided(std::vector<Proc> culprits) {
  return std::make_shared<const Verdict>(Verdict{Verdict::kUndecided, {}, std::move(culprits)});
}

}  // namespace

void Core::on_call(const Call& call, bool cancel) {
  const AgreementKey key{digest_of(call.members), call.purpose, call.attempt};
  const auto found = rounds_.find(key);
  if (cancel) return found == rounds_.end() ? void() : cancel_call(&*found);
  if (leaving_ != kNever) return tell_verdict(key, undecided({self_}));
  const bool are_members =
      std::all_of(call.members.begin(), call.members.end(), [&](Proc proc) { return index_of(proc) >= 0; });
  const char* wrong = roster_ == nullptr                                   ? "this process has not met its world"
                      : !contains(call.members, self_)                     ? "this process is no member"
                      : !are_members || call.members.size() > kMostMembers ? "not all members are of this world"
                      : call.value.size() > kMostValueBytes                ? "the value has more than 4096 bytes"
                      : call.purpose.size() > kMostTextBytes               ? "the purpose has more than 256 bytes"
                      : found != rounds_.end() && found->second.called     ? "it was called before"
                                                                           : nullptr;
  if (wrong != nullptr) {
    Action& action = act(Action::kRefuse);
    action.key = key;
    action.bytes = "agreement '" + call.purpose.substr(0, kMostTextBytes) + "': " + wrong;
    return;
  }
  RoundEntry* entry = found == rounds_.end() ? open_round(key, call.members) : &*found;
  Round& round = entry->second;
  round.called = true;
  round.value = call.value;
  round.deadline = own_time(call.deadline);
  round.decide_by = round.deadline - std::min(config_.margin, std::max<Nanos>(round.deadline - now_, 0) / 4);
  round.expires = std::min(round.expires, round.decide_by);
  advance(entry);
}

void Core::cancel_call(RoundEntry* entry) {
  Round& round = entry->second;
  if (!round.called || round.delivered) return;
  round.decide_by = now_;
  round.deadline = std::min(round.deadline, now_ + config_.margin);  // bounds the wait for a silent decider
  round.expires = std::min(round.expires, now_);
  round.sent_on = -1;
  advance(entry);
}

void Core::tell_verdict(const AgreementKey& key, std::shared_ptr<const Verdict> verdict) {
  Action& action = act(Action::kVerdict);
  action.key = key;
  action.verdict = std::move(verdict);
}

// This process still answers peers.
void Core::end_calls() {
  for (auto& [key, round] : rounds_) {
    if (round.called && !std::exchange(round.delivered, true)) tell_verdict(key, undecided({self_}));
  }
}

Core::RoundEntry* Core::open_round(const AgreementKey& key, std::vector<Proc> members) {
  RoundEntry* entry = &*rounds_.emplace(key, Round()).first;
  Round& round = entry->second;
  round.number = ++rounds_opened_;
  round.me = static_cast<int>(std::find(members.begin(), members.end(), self_) - members.begin());
  round.bytes = members.size() * (sizeof(Proc) + sizeof(Round::Seat));
  round.members = std::move(members);
  return entry;
}

// Members that never call would keep them forever.
void Core::forget_rounds() {
  for (auto at = rounds_.begin(); at != rounds_.end();) {
    const Round& round = at->second;
    const bool is_old =
        round.is_over() ? round.number + kMostKept <= rounds_opened_ : !round.called && round.expires < now_ - kSecond;
    at = is_old ? rounds_.erase(at) : std::next(at);
  }
}

bool Core::has_room(std::size_t bytes) const {
  for (const auto& [key, round] : rounds_) {
    if (!round.called && round.verdict == nullptr) bytes += round.bytes;
  }
  return bytes <= kMostUncalledBytes;
}

void Core::send(int connection, FrameKind kind, const Message& message) { send(connection, kind, packed(message)); }

bool Core::on_round(int connection, const Frame& frame) {
  Message message;
  if (!decode(frame, &message)) return false;
  const auto sits = [&](const std::vector<Proc>& members) {
    return message.seat < members.size() && members[message.seat] == frame.from;
  };
  const auto found = rounds_.find(message.key);
  const bool is_known = found != rounds_.end();
  const std::vector<Proc>& members = is_known ? found->second.members : message.members;
  if (!is_known && members.empty()) {
    // A done frame without members: the agreement was *agreed* here, and erased.
    if (frame.kind == FrameKind::kDone) send(connection, FrameKind::kForget, Message{message.key});
    return true;
  }
  if (frame.kind == FrameKind::kForget) {
    if (is_known && found->second.called && found->second.is_over()) rounds_.erase(found);
    return true;
  }
  if (!sits(members) || !contains(members, self_)) return false;
  if (message.verdict != nullptr && !fits(*message.verdict, members)) return false;
  const bool costs = !is_known || (!found->second.called && frame.kind == FrameKind::kValue);
  // The sender's call then ends as undecided, with this process as the culprit.
  if (costs && !has_room(message.value.size() + (is_known ? 0 : members.size() * sizeof(Round::Seat)))) return true;
  take(connection, frame.kind, &message, is_known ? &*found : open_round(message.key, message.members));
  return true;
}

void Core::take(int connection, FrameKind kind, Message* message, RoundEntry* entry) {
  Round& round = entry->second;
  const int index = static_cast<int>(message->seat);
  if (kind == FrameKind::kAsk || kind == FrameKind::kVerdict) {
    if (index < round.promised) return;
    if (kind == FrameKind::kAsk) {
      round.promised = index;
      if (!round.called) round.expires = std::min(round.expires, now_ + kAskedTime);
      Message answer = message_of(*entry);
      answer.ballot = message->seat;
      answer.verdict = round.verdict;
      return send(connection, FrameKind::kAnswer, answer);
    }
    if (message->verdict->kind == Verdict::kUndecided) round.hint = message->verdict;
    else if (round.verdict == nullptr) round.verdict = message->verdict;
  } else {
    round.seats.resize(round.members.size());
    Round::Seat& seat = round.seats[index];
    // A member sends its value again if the connection of the value breaks.
    if (kind != FrameKind::kAnswer || !seat.has_value) seat.connection = connection;
    if (kind == FrameKind::kValue) {
      round.values += seat.has_value ? 0 : 1;
      round.bytes += message->value.size();
      round.bytes -= seat.value.size();
      seat.has_value = true;
      seat.value = std::move(message->value);
      seat.told = false;
      round.expires = std::min(round.expires, now_ + std::clamp<Nanos>(message->remaining, 0, kNever / 4));
    }
    const bool is_done = kind == FrameKind::kDone;
    const bool answers = kind == FrameKind::kAnswer && static_cast<int>(message->ballot) == round.me;
    seat.done = seat.done || is_done;
    seat.answered = seat.answered || answers;
    if ((is_done || answers) && round.verdict == nullptr) round.verdict = message->verdict;
  }
  advance(entry);
}

Message Core::message_of(const RoundEntry& entry) { return {entry.first, static_cast<std::uint32_t>(entry.second.me)}; }

int Core::first_living(const Round& round) const {
  for (std::size_t i = 0; i < round.members.size(); ++i) {
    if (!is_gone(round.members[i])) return static_cast<int>(i);
  }
  return -1;
}

bool Core::advance(RoundEntry* entry) {
  Round& round = entry->second;
  const int target = first_living(round);
  const bool decides = target == round.me;
  if (decides && round.verdict == nullptr) {
    round.seats.resize(round.members.size());
    Round::Seat& own = round.seats[round.me];
    if (round.called && !own.has_value) {
      own.has_value = true;
      own.value = round.value;
      ++round.values;
    }
    if (round.me == 0) reach_verdict(&round);
    else if (ask_all(entry)) conclude(&round, Verdict::kEnded, {});
    else tell_hint(entry);
  }
  if (round.called && !round.delivered) {
    if (round.verdict != nullptr || now_ >= round.deadline) deliver(entry);
    else wake_by(round.deadline);
  }
  if (decides) return decide(entry);
  if (target >= 0) serve(entry, target);
  return true;
}

void Core::reach_verdict(Round* round) {
  if (round->checked != ends_digest_) {
    round->checked = ends_digest_;
    const auto& members = round->members;
    if (std::any_of(members.begin(), members.end(), [&](Proc proc) { return is_gone(proc); })) {
      return conclude(round, Verdict::kEnded, {});
    }
  }
  std::vector<Proc> missing;
  if (round->values == round->members.size()) return conclude(round, Verdict::kAgreed, {});
  if (now_ < round->expires) {
    if (round->expires != kNever) wake_by(round->expires);
    return;
  }
  for (std::size_t i = 0; i < round->members.size(); ++i) {
    if (!round->seats[i].has_value) missing.push_back(round->members[i]);
  }
  conclude(round, Verdict::kMissing, std::move(missing));
}

// Returns true if all living members answered that there is no verdict.
bool Core::ask_all(RoundEntry* entry) {
  Round& round = entry->second;
  round.promised = std::max(round.promised, round.me);
  bool all = true;
  for (std::size_t i = 0; i < round.members.size(); ++i) {
    Round::Seat& seat = round.seats[i];
    if (static_cast<int>(i) == round.me || is_gone(round.members[i]) || seat.answered) continue;
    all = false;
    if (seat.asked_on >= 0) continue;
    seat.asked_on = connect(round.members[i]);
    if (seat.asked_on < 0) continue;
    Message message = message_of(*entry);
    message.members = round.members;
    send(seat.asked_on, FrameKind::kAsk, message);
  }
  return all;
}

void Core::conclude(Round* round, Verdict::Kind kind, std::vector<Proc> culprits) {
  auto verdict = std::make_shared<Verdict>();
  verdict->kind = kind;
  verdict->culprits = std::move(culprits);
  for (std::size_t i = 0; i < round->members.size(); ++i) {
    if (kind == Verdict::kAgreed) verdict->values.push_back(round->seats[i].value);
    if (kind == Verdict::kEnded && is_gone(round->members[i])) verdict->culprits.push_back(round->members[i]);
  }
  round->verdict = std::move(verdict);
}

std::vector<Proc> Core::silent_members(const Round& round) const {
  std::vector<Proc> silent;
  for (std::size_t i = 0; i < round.members.size(); ++i) {
    const bool waits = static_cast<int>(i) != round.me && !is_gone(round.members[i]);
    if (waits && !(i < round.seats.size() && round.seats[i].answered)) silent.push_back(round.members[i]);
  }
  return silent;
}

// Names the silent members; else the waiting ones would blame this decider.
void Core::tell_hint(RoundEntry* entry) {
  Round& round = entry->second;
  if (round.expires == kNever || round.hinted) return;
  if (now_ < round.expires) return wake_by(round.expires);
  round.hinted = true;
  Message message = message_of(*entry);
  message.verdict = undecided(silent_members(round));
  for (const Round::Seat& seat : round.seats) {
    if (seat.has_value && seat.connection >= 0) send(seat.connection, FrameKind::kVerdict, message);
  }
}

void Core::deliver(RoundEntry* entry) {
  auto& [key, round] = *entry;
  round.delivered = true;
  if (round.verdict != nullptr) return tell_verdict(key, round.verdict);
  const int target = first_living(round);
  if (target == round.me) return tell_verdict(key, undecided(silent_members(round)));
  if (target >= 0 && round.hint != nullptr) return tell_verdict(key, round.hint);
  tell_verdict(key, undecided(target < 0 ? round.members : std::vector<Proc>{round.members[target]}));
}

void Core::serve(RoundEntry* entry, int target) {
  Round& round = entry->second;
  const bool done = round.verdict != nullptr && round.delivered;
  if (!done && (!round.called || round.delivered)) return;
  if (round.sent_on >= 0 && round.sent_to == target && round.sent_done == done) return;
  if (round.sent_to != target) round.hint = nullptr;
  const int connection = connect(round.members[target]);
  if (connection < 0) return;
  Message message = message_of(*entry);
  // After a failure, done has the verdict for a decider that may not have called.
  const bool tells = done && round.verdict->kind != Verdict::kAgreed;
  if (tells) message.verdict = round.verdict;
  if (!done || tells) message.members = round.members;
  if (!done) message.value = round.value;
  message.remaining = std::max<Nanos>(round.decide_by - now_, 0);
  send(connection, done ? FrameKind::kDone : FrameKind::kValue, message);
  round.sent_on = connection;
  round.sent_to = target;
  round.sent_done = done;
}

bool Core::decide(RoundEntry* entry) {
  Round& round = entry->second;
  if (round.verdict == nullptr) return true;
  round.seats.resize(round.members.size());
  round.seats[round.me].done = round.delivered;
  Message message = message_of(*entry);
  message.verdict = round.verdict;
  std::shared_ptr<const Bytes> verdict;
  bool all = true;
  for (std::size_t i = 0; i < round.members.size(); ++i) {
    Round::Seat& seat = round.seats[i];
    if (!seat.done && !is_gone(round.members[i])) all = false;
    if (seat.told || seat.done || seat.connection < 0) continue;
    seat.told = true;
    if (verdict == nullptr)
      verdict = std::make_shared<Bytes>(encode(Frame{FrameKind::kVerdict, world(), self_, packed(message)}));
    send(seat.connection, verdict);
  }
  if (!all) return true;
  message.verdict = nullptr;
  for (const Round::Seat& seat : round.seats) {
    if (seat.connection >= 0) send(seat.connection, FrameKind::kForget, message);
  }
  rounds_.erase(rounds_.find(entry->first));
  return false;
}

// A decider leaves only after the callers received its verdict: the next decider would decide again.
bool Core::owes_verdict() const {
  if (now_ >= leaving_) return false;
  for (const auto& [key, round] : rounds_) {
    if (round.verdict == nullptr || first_living(round) != round.me) continue;
    for (std::size_t i = 0; i < round.seats.size(); ++i) {
      const Round::Seat& seat = round.seats[i];
      if (seat.has_value && !seat.done && static_cast<int>(i) != round.me && !is_gone(round.members[i])) return true;
    }
  }
  return false;
}

}  // namespace parallel_state::control
