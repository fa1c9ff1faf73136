#include "record.h"

#include <cstdio>
#include <utility>

namespace parallel_state::control {
namespace {

constexpr std::uint64_t kMagic = 0x31303052435350;  // "PSCR001"
constexpr std::size_t kPartBytes = 32U << 10;
constexpr std::size_t kAll = SIZE_MAX;

const char* const kEvents[] = {
    "tick",  "meets the world", "dialed", "refused by", "no answer from", "accepted", "closed", "receives", "acked",
    "board", "beats",           "ended:", "exits:",     "call",           "cancel",   "report", "leave"};
const char* const kActions[] = {"dial",      "close", "send",    "probe",  "publish", "beat", "look at",
                                "tell dead", "left:", "verdict", "refuse", "guest",   "log"};
const char* const kFrames[] = {"",       "nonce",   "identity", "beat",   "state",      "value",      "ask",
                               "answer", "verdict", "done",     "forget", "store call", "store reply"};
const char* const kVerdicts[] = {"agreed", "ended", "missing", "undecided"};

std::string name_of(const Core& core, Proc proc) {
  const int index = core.roster() == nullptr ? -1 : core.roster()->index_of(proc);
  return index < 0 ? "process " + std::to_string(proc) : "rank " + std::to_string(core.roster()->members[index].rank);
}

std::string frames_in(std::string_view bytes) {
  std::string text = " " + std::to_string(bytes.size()) + " bytes:";
  if (bytes.substr(0, 8) == std::string_view(encode(Hello{})).substr(0, 8)) {
    text += " hello";
    bytes.remove_prefix(std::min(bytes.size(), kHelloBytes));
  }
  while (bytes.size() >= kHeadBytes) {
    Reader reader(bytes);
    const std::size_t size = kHeadBytes + reader.number<std::uint32_t>();
    const auto version = reader.number<std::uint16_t>(), kind = reader.number<std::uint16_t>();
    if (version != kVersion || kind == 0 || kind >= std::size(kFrames)) break;
    text += std::string(" ") + kFrames[kind];
    bytes.remove_prefix(std::min(bytes.size(), size));
  }
  return text;
}

template <typename Subject>
std::string about(const Core& core, const Subject& subject) {
  std::string text;
  if (subject.proc != 0) text += " " + name_of(core, subject.proc);
  if (subject.connection >= 0) text += " on connection " + std::to_string(subject.connection);
  if (subject.flags != 0) text += ", flags " + std::to_string(subject.flags);
  return text;
}

std::string words(const Core& core, const Event& event) {
  std::string text = kEvents[event.kind] + about(core, event);
  if (event.kind == Event::kBytes) text += frames_in(event.bytes);
  else if (event.kind == Event::kReport) text += " " + event.bytes;
  if (event.call != nullptr) text += " '" + event.call->purpose + "' of " + std::to_string(event.call->members.size());
  for (const Proc proc : event.procs) text += " " + name_of(core, proc);
  return text;
}

std::string words(const Core& core, const Action& action) {
  std::string text = kActions[action.kind] + about(core, action);
  if (action.kind == Action::kSend) text += frames_in(*action.frames);
  else if (action.kind == Action::kDoom || action.kind == Action::kLog || action.kind == Action::kRefuse)
    text += " " + action.bytes;
  if (action.verdict == nullptr) return text;
  text += " '" + action.key.purpose + "': " + kVerdicts[action.verdict->kind];
  for (const Proc proc : action.verdict->culprits) text += " " + name_of(core, proc);
  return text;
}

}  // namespace

void Record::add(const Core& core, Nanos now, const Event& event) {
  if (!newer_ || newer_->events.size() >= kPartBytes) {
    older_ = std::move(newer_);
    newer_.emplace(Part{core, {}});
  }
  Writer writer;
  writer.number(now);
  put(&writer, event);
  newer_->events += writer.take();
}

Bytes Record::bytes(const Core& core) const {
  Writer writer;
  writer.number(kMagic).number(kVersion).number(core.digest());
  if (!newer_) return writer.take();
  (older_ ? older_ : newer_)->start.write(&writer);
  return writer.take() + (older_ ? older_->events : Bytes()) + newer_->events;
}

std::optional<bool> replay(
    std::string_view record, Core* core,
    const std::function<void(Nanos, const Event&, const std::vector<Action>&, const Core&)>& each) {
  Reader reader(record, kAll, kAll);
  if (reader.number<std::uint64_t>() != kMagic || reader.number<std::uint16_t>() != kVersion) return {};
  const auto digest = reader.number<std::uint64_t>();
  if (!reader.finished()) core->read(&reader);
  while (reader.ok() && !reader.finished()) {
    const auto now = reader.number<Nanos>();
    Event event;
    get(&reader, &event);
    const bool has_call = event.kind == Event::kCall || event.kind == Event::kCancel;
    if (!reader.ok() || event.kind < Event::kTick || event.kind > Event::kLeave) return {};
    if ((has_call && event.call == nullptr) || (event.kind == Event::kMeet && event.roster == nullptr)) return {};
    std::vector<Action> actions;
    core->step(now, event, &actions);
    each(now, event, actions, *core);
  }
  if (!reader.ok()) return {};
  return core->digest() == digest;
}

std::string describe(std::string_view record) {
  std::string text;
  Core core(0, "", Config{});
  const auto same = replay(record, &core, [&](Nanos now, const Event& event, const auto& actions, const Core& after) {
    char time[32];
    std::snprintf(time, sizeof(time), "%.6f ", static_cast<double>(now) / 1e9);
    text += time + words(after, event) + "\n";
    for (const Action& action : actions) text += "    " + words(after, action) + "\n";
  });
  if (!same) return text + "the record is malformed, or of another version\n";
  for (const auto& [proc, end] : core.ends()) {
    text += name_of(core, proc) + " ended, flags " + std::to_string(end.flags) + ": " + end.text + "\n";
  }
  return text + (*same ? "the replay has the same digest\n" : "the replay has ANOTHER digest\n");
}

}  // namespace parallel_state::control
