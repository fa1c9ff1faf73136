#include "record.h"

#include <utility>

namespace parallel_state::control {
namespace {

constexpr std::size_t kMostBytes = 64U << 20;
constexpr std::size_t kMostProcs = 1U << 16;

// In and Out share an interface: one template reads and writes.
struct Out {
  Writer writer;
  template <typename T>
  void number(T* value) {
    writer.number(*value);
  }
  void text(Bytes* value) { writer.text(*value); }
  std::size_t count(std::size_t size) {
    writer.number(static_cast<std::uint32_t>(size));
    return size;
  }
};

struct In {
  Reader reader;
  template <typename T>
  void number(T* value) {
    *value = reader.number<T>();
  }
  void text(Bytes* value) { *value = reader.text(kMostBytes); }
  std::size_t count(std::size_t) { return reader.count(kMostProcs, sizeof(Proc)); }
};

template <typename Stream, typename... T>
void numbers(Stream* stream, T*... values) {
  (stream->number(values), ...);
}

template <typename Stream>
void pass(Stream* stream, std::vector<Proc>* procs) {
  procs->resize(stream->count(procs->size()));
  for (Proc& proc : *procs) stream->number(&proc);
}

template <typename Stream>
void pass(Stream* stream, std::vector<Member>* members) {
  members->resize(stream->count(members->size()));
  for (Member& member : *members) {
    numbers(stream, &member.rank, &member.proc, &member.domain, &member.endpoint.port, &member.pid, &member.began);
    stream->text(&member.endpoint.host);
    stream->text(&member.endpoint.token);
  }
}

template <typename Stream>
void pass(Stream* stream, Call* call) {
  stream->text(&call->purpose);
  stream->text(&call->value);
  numbers(stream, &call->attempt, &call->deadline);
  pass(stream, &call->members);
}

template <typename Stream>
void pass(Stream* stream, Config* config) {
  numbers(stream, &config->tick, &config->stale, &config->beat, &config->limit, &config->patience, &config->settle,
          &config->redial, &config->margin, &config->pause, &config->stranger, &config->build);
}

template <typename Stream>
void pass(Stream* stream, Nanos* now, Event* event) {
  numbers(stream, now, &event->kind, &event->connection, &event->proc, &event->world, &event->epoch, &event->term,
          &event->id, &event->flags, &event->deadline, &event->age);
  stream->text(&event->bytes);
  stream->text(&event->nonce);
  pass(stream, &event->procs);
  std::vector<Member> members;
  if (event->roster != nullptr) members = event->roster->members;
  pass(stream, &members);
  if (!members.empty()) event->roster = std::make_shared<const Roster>(std::move(members));
  auto call = std::make_shared<Call>();
  if (event->call != nullptr) *call = *event->call;
  if (stream->count(event->call != nullptr ? 1 : 0) == 0) return;
  pass(stream, call.get());
  event->call = std::move(call);
}

}  // namespace

Record::Record(Proc self, const std::string& token, const Config& config, std::size_t most_bytes)
    : most_bytes_(most_bytes) {
  Out out;
  Config copy = config;
  Bytes secret = token;
  out.number(&self);
  out.text(&secret);
  pass(&out, &copy);
  head_ = out.writer.take();
}

void Record::add(Nanos now, const Event& event) {
  Out out;
  Event copy = event;
  pass(&out, &now, &copy);
  Bytes bytes = out.writer.take();
  bytes_ += bytes.size();
  events_.emplace_back(event.kind == Event::kMeet, std::move(bytes));
  for (; bytes_ > most_bytes_ && events_.size() > 1; events_.pop_front()) {
    auto& [is_meet, oldest] = events_.front();
    bytes_ -= oldest.size();
    if (is_meet) meets_ += oldest;
  }
}

Bytes Record::bytes() const {
  Bytes all = head_ + meets_;
  for (const auto& [is_meet, each] : events_) all += each;
  return all;
}

bool replay(std::string_view record,
            const std::function<void(Nanos, const Event&, const std::vector<Action>&, const Core&)>& each) {
  In in{Reader(record)};
  Proc self = 0;
  std::string token;
  Config config;
  in.number(&self);
  in.text(&token);
  pass(&in, &config);
  Core core(self, token, config);
  while (in.reader.ok() && !in.reader.finished()) {
    Nanos now = 0;
    Event event;
    pass(&in, &now, &event);
    const bool has_call = event.kind == Event::kCall || event.kind == Event::kCancel;
    if (!in.reader.ok() || event.kind < Event::kTick || event.kind > Event::kLeave) return false;
    if ((has_call && event.call == nullptr) || (event.kind == Event::kMeet && event.roster == nullptr)) return false;
    std::vector<Action> actions;
    core.step(now, event, &actions);
    each(now, event, actions, core);
  }
  return in.reader.ok();
}

}  // namespace parallel_state::control
