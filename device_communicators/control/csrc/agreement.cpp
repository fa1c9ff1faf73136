// Agreement among members of a world, and questions for a status.
//
// The lowest living member decides, so an index in the list of members is a ballot. Member 0 decides alone, as nobody
// lower can have decided: the values of all, or the members that ended, or those that are missing shortly before the
// earliest deadline. A later member decides once all lower ones ended and each other living member has answered its
// question: a verdict that exists is adopted, else the members that ended are the verdict. An answer is also a promise:
// a verdict of a lower ballot, which may still be in flight, isn't taken afterwards. So each verdict that a survivor
// took is found, and none is taken that was not found.
#include <algorithm>
#include <utility>

#include "core.h"

namespace parallel_state::control {
namespace {

constexpr std::size_t kMostUncalled = 1024;  // agreements that peers began and this process has not called

void put_key(Writer* writer, const AgreementKey& key, int seat) {
  writer->number(key.members).text(key.purpose).number(key.attempt).number(static_cast<std::uint32_t>(seat));
}

void put_members(Writer* writer, const std::vector<Proc>& members) {
  writer->number(static_cast<std::uint32_t>(members.size()));
  for (const Proc member : members) writer->number(member);
}

void put_verdict(Writer* writer, const Verdict& verdict) {
  writer->number(static_cast<std::uint8_t>(verdict.kind)).number(static_cast<std::uint32_t>(verdict.values.size()));
  for (const Bytes& value : verdict.values) writer->text(value);
  put_members(writer, verdict.culprits);
}

std::vector<Proc> get_members(Reader* reader) {
  std::vector<Proc> members(reader->count(kMostMembers, sizeof(Proc)));
  for (Proc& member : members) member = reader->number<Proc>();
  return members;
}

std::shared_ptr<const Verdict> get_verdict(Reader* reader) {
  auto verdict = std::make_shared<Verdict>();
  verdict->kind = static_cast<Verdict::Kind>(std::min<std::uint8_t>(reader->number<std::uint8_t>(), Verdict::kMissing));
  verdict->values.resize(reader->count(kMostMembers, sizeof(std::uint32_t)));
  for (Bytes& value : verdict->values) value = reader->text(kMostValueBytes);
  verdict->culprits = get_members(reader);
  return verdict;
}

}  // namespace

std::uint64_t Core::digest_of(const std::vector<Proc>& members) {
  std::uint64_t digest = members.size();
  for (const Proc member : members) {
    digest = (digest ^ member) * 0x9e3779b97f4a7c15;
    digest ^= digest >> 32;
  }
  return digest;
}

// Returns the agreement of this key, or null if this process isn't one of the members.
Core::RoundEntry* Core::open_round(const AgreementKey& key, std::vector<Proc> members) {
  const auto found = rounds_.find(key);
  if (found != rounds_.end()) return &*found;
  const auto me = std::find(members.begin(), members.end(), self_);
  if (me == members.end()) return nullptr;
  Round& round = rounds_[key];
  round.me = static_cast<int>(me - members.begin());
  round.members = std::move(members);
  return &*rounds_.find(key);
}

void Core::on_call(const Call& call, bool cancel) {
  const AgreementKey key{epoch_, digest_of(call.members), call.purpose, call.attempt};
  RoundEntry* entry = call.members.size() > kMostMembers ? nullptr : open_round(key, call.members);
  if (entry == nullptr || call.value.size() > kMostValueBytes || call.purpose.size() > kMostTextBytes) {
    act(Action::kRefuse).bytes = "agreement '" + call.purpose.substr(0, kMostTextBytes) +
                                 "': this process must be one of at most " + std::to_string(kMostMembers) +
                                 " members, and the value have at most " + std::to_string(kMostValueBytes) + " bytes";
    return;
  }
  Round& round = entry->second;
  if (cancel) {
    if (!round.called || round.delivered) return;
    round.canceled = true;
    round.decide_by = now_;
    round.sent_on = -1;
  } else {
    if (round.called) return;
    round.called = true;
    round.value = call.value;
    round.deadline = call.deadline + skew_;
    round.decide_by = round.deadline - std::min(config_.margin, std::max<Nanos>(round.deadline - now_, 0) / 4);
  }
  round.expires = std::min(round.expires, round.decide_by);
  advance(entry);
}

// A frame of an agreement. Returns false if it is malformed.
bool Core::on_round(int connection, const Frame& frame) {
  Reader reader(frame.body);
  AgreementKey key{frame.epoch, reader.number<std::uint64_t>(), "", 0};
  key.purpose = reader.text(kMostTextBytes);
  key.attempt = reader.number<std::uint32_t>();
  const auto seat_index = reader.number<std::uint32_t>();
  // A member that has taken a failure says which one: the decider may be new and not have called yet.
  const bool tells = frame.kind == FrameKind::kDone && reader.number<std::uint8_t>() != 0;
  const bool begins = frame.kind == FrameKind::kValue || frame.kind == FrameKind::kAsk || tells;
  std::vector<Proc> members;
  if (begins) members = get_members(&reader);
  Nanos remaining = 0;
  Bytes value;
  if (frame.kind == FrameKind::kValue) {
    remaining = reader.number<Nanos>();
    value = reader.text(kMostValueBytes);
  }
  const auto ballot = frame.kind == FrameKind::kAnswer ? reader.number<std::uint32_t>() : 0;
  const bool has_verdict = frame.kind == FrameKind::kVerdict || tells ||
                           (frame.kind == FrameKind::kAnswer && reader.number<std::uint8_t>() != 0);
  const auto verdict = has_verdict ? get_verdict(&reader) : nullptr;
  if (!reader.finished() || (begins && digest_of(members) != key.members)) return false;

  if (key.epoch < epoch_) return true;  // of members that were
  auto found = rounds_.find(key);
  if (found == rounds_.end()) {
    if (frame.kind == FrameKind::kDone && !tells) {  // success needs all calls, so this process was past it
      Writer writer;
      put_key(&writer, key, 0);
      send(connection, FrameKind::kForget, writer.take(), &key);
    }
    if (!begins) return true;
    const auto uncalled =
        std::count_if(rounds_.begin(), rounds_.end(), [](const auto& each) { return !each.second.called; });
    if (uncalled >= static_cast<std::ptrdiff_t>(kMostUncalled)) return true;
    if (open_round(key, std::move(members)) == nullptr) return false;
    found = rounds_.find(key);
  }
  RoundEntry* entry = &*found;
  Round& round = entry->second;
  if (frame.kind != FrameKind::kForget &&
      (seat_index >= round.members.size() || round.members[seat_index] != frame.from)) {
    return false;
  }
  const int index = static_cast<int>(seat_index);
  if (frame.kind == FrameKind::kAsk) {
    if (index < round.promised) return true;  // of a decider that others took to have ended
    round.answered = true;
    round.promised = index;
    Writer writer;
    put_key(&writer, key, round.me);
    writer.number(seat_index).number(static_cast<std::uint8_t>(round.verdict != nullptr));
    if (round.verdict != nullptr) put_verdict(&writer, *round.verdict);
    send(connection, FrameKind::kAnswer, writer.take(), &key);
    return true;
  }
  if (frame.kind == FrameKind::kVerdict) {
    if (index >= round.promised && round.verdict == nullptr) round.verdict = verdict;
    advance(entry);
    return true;
  }
  if (frame.kind == FrameKind::kForget) {
    if (round.verdict != nullptr && round.delivered) rounds_.erase(found);
    return true;
  }
  round.seats.resize(round.members.size());
  Round::Seat& seat = round.seats[index];
  seat.connection = connection;
  if (frame.kind == FrameKind::kValue) {
    if (!seat.has_value) ++round.values;
    seat.has_value = true;
    seat.value = std::move(value);
    seat.told = false;
    round.expires = std::min(round.expires, now_ + std::clamp<Nanos>(remaining, 0, kNever / 4));
  } else if (frame.kind == FrameKind::kDone) {
    seat.done = true;
    if (round.verdict == nullptr) round.verdict = verdict;
  } else if (static_cast<int>(ballot) == round.me) {
    seat.answered = true;
    if (round.verdict == nullptr) round.verdict = verdict;
  }
  advance(entry);
  return true;
}

int Core::first_living(const Round& round) const {
  for (std::size_t i = 0; i < round.members.size(); ++i) {
    if (!is_gone(round.members[i])) return static_cast<int>(i);
  }
  return -1;
}

// Does what can be done now; returns false if the agreement was forgotten.
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
  }
  if (round.called && !round.delivered) {
    if (round.verdict != nullptr || now_ >= round.deadline) deliver(entry);
    else wake_by(round.deadline);
  }
  if (decides) return decide(entry);
  if (target >= 0) serve(entry, target);
  return true;
}

// Decides as member 0, if it is time.
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

// Asks each living member for a verdict; returns true if all have answered that there is none.
bool Core::ask_all(RoundEntry* entry) {
  auto& [key, round] = *entry;
  round.answered = true;
  round.promised = std::max(round.promised, round.me);
  bool all = true;
  for (std::size_t i = 0; i < round.members.size(); ++i) {
    Round::Seat& seat = round.seats[i];
    if (static_cast<int>(i) == round.me || is_gone(round.members[i]) || seat.answered) continue;
    all = false;
    if (seat.asked_on >= 0) continue;
    seat.asked_on = connect(round.members[i]);
    if (seat.asked_on < 0) continue;
    Writer writer;
    put_key(&writer, key, round.me);
    put_members(&writer, round.members);
    send(seat.asked_on, FrameKind::kAsk, writer.take(), &key);
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

// Hands the verdict to this process' call: at its deadline without one, the members that didn't answer.
void Core::deliver(RoundEntry* entry) {
  auto& [key, round] = *entry;
  round.delivered = true;
  Action& action = act(Action::kVerdict);
  action.key = key;
  action.verdict = round.verdict;
  if (round.verdict != nullptr) return;
  auto verdict = std::make_shared<Verdict>();
  const int target = first_living(round);
  for (std::size_t i = 0; i < round.members.size(); ++i) {
    const bool silent = target == round.me ? static_cast<int>(i) != round.me && !is_gone(round.members[i]) &&
                                                 !(i < round.seats.size() && round.seats[i].answered)
                                           : static_cast<int>(i) == target;
    if (silent) verdict->culprits.push_back(round.members[i]);
  }
  action.verdict = std::move(verdict);
}

// As a member: sends the value, later that the verdict was taken, once to each decider and connection.
void Core::serve(RoundEntry* entry, int target) {
  auto& [key, round] = *entry;
  const bool done = round.verdict != nullptr && round.delivered;
  if (!done && (!round.called || round.delivered)) return;
  if (round.sent_on >= 0 && round.sent_to == target && round.sent_done == done) return;
  const int connection = connect(round.members[target]);
  if (connection < 0) return;
  Writer writer;
  put_key(&writer, key, round.me);
  const bool tells = done && round.verdict->kind != Verdict::kAgreed;
  if (done) writer.number(static_cast<std::uint8_t>(tells));
  if (!done || tells) put_members(&writer, round.members);
  if (tells) put_verdict(&writer, *round.verdict);
  if (!done) {
    writer.number(std::max<Nanos>(round.decide_by - now_, 0)).text(round.value);
  }
  send(connection, done ? FrameKind::kDone : FrameKind::kValue, writer.take(), &key);
  round.sent_on = connection;
  round.sent_to = target;
  round.sent_done = done;
}

// As the decider: sends the verdict to those that wait for it, and forgets it when all living members have taken it.
bool Core::decide(RoundEntry* entry) {
  auto& [key, round] = *entry;
  if (round.verdict == nullptr) return true;
  round.seats.resize(round.members.size());
  round.seats[round.me].done = round.delivered;
  bool all = true;
  for (std::size_t i = 0; i < round.members.size(); ++i) {
    Round::Seat& seat = round.seats[i];
    if (!seat.done && !is_gone(round.members[i])) all = false;
    if (seat.told || seat.done || seat.connection < 0) continue;
    seat.told = true;
    Writer writer;
    put_key(&writer, key, round.me);
    put_verdict(&writer, *round.verdict);
    send(seat.connection, FrameKind::kVerdict, writer.take(), &key);
  }
  if (!all) return true;
  Writer writer;
  put_key(&writer, key, round.me);
  const Bytes body = writer.take();
  for (const Round::Seat& seat : round.seats) {
    if (seat.connection >= 0) send(seat.connection, FrameKind::kForget, body, &key);
  }
  rounds_.erase(rounds_.find(key));
  return false;
}

void Core::advance_all() {
  routed_ = false;
  for (auto at = rounds_.begin(); at != rounds_.end();) {
    RoundEntry* entry = &*at++;
    advance(entry);
  }
  advance_questions();
}

// Status: one question, one reply, over one hop.

void Core::advance_questions() {
  for (std::size_t i = 0; i < questions_.size();) {
    Question& question = questions_[i];
    if (now_ >= question.deadline || is_gone(question.proc)) {
      Action& action = act(Action::kReply);
      action.proc = question.proc;
      action.id = question.id;
      action.flags = 1;
      questions_.erase(questions_.begin() + static_cast<std::ptrdiff_t>(i));
      continue;
    }
    wake_by(question.deadline);
    if (question.sent_on < 0) {
      question.sent_on = connect(question.proc);
      if (question.sent_on >= 0) {
        send(question.sent_on, FrameKind::kQuestion, Writer().number(question.id).text(question.bytes).take());
      }
    }
    ++i;
  }
}

bool Core::on_question(int connection, const Frame& frame) {
  Reader reader(frame.body);
  const auto id = reader.number<std::uint64_t>();
  Bytes bytes = reader.text(kMostValueBytes);
  if (!reader.finished()) return false;
  const Proc proc = links_[connection].proc;
  if (frame.kind == FrameKind::kReply) {
    const auto asked = std::find_if(questions_.begin(), questions_.end(), [&](const Question& question) {
      return question.proc == proc && question.id == id;
    });
    if (asked == questions_.end()) return true;
    questions_.erase(asked);
  }
  Action& action = act(frame.kind == FrameKind::kReply ? Action::kReply : Action::kQuestion);
  action.proc = proc;
  action.id = id;
  action.bytes = std::move(bytes);
  return true;
}

}  // namespace parallel_state::control
