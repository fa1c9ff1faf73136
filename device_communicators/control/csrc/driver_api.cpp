// The C interface of the control plane, for ctypes. A handle identifies a stay. Functions return -ESRCH for an unknown
// handle, such as a parent's in a forked child. None takes the interpreter lock; each wait is bounded.
#ifdef __linux__
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "driver.h"

using namespace parallel_state::control;

namespace {

Nanos from_now(double seconds) {
  // 1e9 s: no deadline.
  return monotonic_now() + static_cast<Nanos>(std::min(std::max(seconds, 0.0), 1e9) * 1e9);
}

// `make` fills in the event. Returns 0 or the negative errno; -ENOMEM instead of bad_alloc.
template <typename Make>
int post_event(std::int64_t handle, Event::Kind kind, Make make) {
  try {
    const std::shared_ptr<Stay> stay = find_stay(handle);
    if (stay == nullptr) return -ESRCH;
    Event event;
    event.kind = kind;
    make(&event);
    return post(stay, std::move(event)) ? 0 : -errno;
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
}

// Returns the size; copies what fits.
std::uint64_t copy_out(const Bytes& bytes, char* buffer, std::uint64_t capacity) {
  std::memcpy(buffer, bytes.data(), std::min<std::uint64_t>(bytes.size(), capacity));
  return bytes.size();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Listens at a numeric address, at a port from `first` to `last`, 0 for any. Returns a handle or the negative errno.
// Writes the process's number, port and board descriptor. `token`: the listener's, at most 64 characters; an empty one
// is replaced by 32 random characters.
std::int64_t ps_control_open(const char* address, int first, int last, double beat_s, double limit_s,
                             std::uint32_t build, std::uint64_t* proc, int* port, int* board, char* token) {
  try {
    Config config;
    config.beat = static_cast<Nanos>(beat_s * 1e9);
    config.limit = static_cast<Nanos>(limit_s * 1e9);
    config.build = build;
    std::shared_ptr<Stay> stay;
    const std::int64_t handle = open_stay(address, first, last, token, config, &stay);
    if (handle < 0) return handle;
    *proc = stay->proc;
    *port = stay->port;
    *board = stay->board.number();
    std::memcpy(token, stay->token.c_str(), stay->token.size() + 1);
    return handle;
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
}

// `members`: for each, in rank order: rank, process, domain, pid, start time, board, port, host, token; see plane.py.
int ps_control_meet(std::int64_t handle, const char* members, std::uint64_t size, int count) {
  try {
    const std::shared_ptr<Stay> stay = find_stay(handle);
    if (stay == nullptr) return -ESRCH;
    Reader reader(std::string_view(members, static_cast<std::size_t>(size)));
    std::vector<Member> all(static_cast<std::size_t>(count));
    std::vector<int> boards;
    for (Member& member : all) {
      get(&reader, std::tie(member.rank, member.proc, member.domain, member.pid, member.began, boards.emplace_back(),
                            member.endpoint.port, member.endpoint.host, member.endpoint.token));
    }
    if (!reader.finished()) return -EINVAL;
    Event event;
    event.kind = Event::kMeet;
    event.roster = std::make_shared<const Roster>(std::move(all));
    return post(stay, std::move(event), std::move(boards)) ? 0 : -errno;
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
}

// Begins an agreement among `members`, in rank order; a negative timeout cancels it. Writes an identifier of the
// members to `digest`. Returns -EEXIST if the agreement is running. Each one needs a later `ps_control_forget`.
int ps_control_call(std::int64_t handle, const char* purpose, std::uint32_t attempt, const std::uint64_t* members,
                    int count, const char* value, std::uint64_t size, double timeout_s, std::uint64_t* digest) try {
  *digest = Core::digest_of({members, members + count});
  const auto stay = find_stay(handle);
  if (stay != nullptr && timeout_s >= 0 && !stay->inbox.expect({*digest, purpose, attempt})) return -EEXIST;
  return post_event(handle, timeout_s < 0 ? Event::kCancel : Event::kCall, [&](Event* event) {
    auto call = std::make_shared<Call>();
    call->purpose = purpose;
    call->attempt = attempt;
    call->members.assign(members, members + count);
    call->value.assign(value, size);
    call->deadline = from_now(timeout_s);
    event->call = std::move(call);
  });
} catch (const std::bad_alloc&) {
  return -ENOMEM;
}

// Waits for a call's verdict, copies what fits, and returns its size; 0 if there is none yet, -ESHUTDOWN if the stay is
// over. Another thread may close the stay meanwhile.
std::int64_t ps_control_verdict(std::int64_t handle, std::uint64_t digest, const char* purpose, std::uint32_t attempt,
                                double wait_s, char* buffer, std::uint64_t capacity) {
  const std::shared_ptr<Stay> stay = find_stay(handle);
  if (stay == nullptr) return -ESRCH;
  const auto size =
      stay->inbox.await({digest, purpose, attempt}, static_cast<Nanos>(wait_s * 1e9), buffer, capacity);
  return size < 0 ? -ESHUTDOWN : size;
}

void ps_control_forget(std::int64_t handle, std::uint64_t digest, const char* purpose, std::uint32_t attempt) {
  if (const auto stay = find_stay(handle)) stay->inbox.forget({digest, purpose, attempt});
}

// 1: the process exited, or each of its threads is exiting or has a pending SIGKILL.
int ps_control_is_ending(int pid) { return is_ending(pid) ? 1 : 0; }

int ps_control_ask(std::int64_t handle, std::uint64_t proc, std::uint64_t id, const char* question, std::uint64_t size,
                   double timeout_s) {
  return post_event(handle, Event::kAsk, [&](Event* event) {
    event->proc = proc;
    event->id = id;
    event->bytes.assign(question, size);
    event->deadline = from_now(timeout_s);
  });
}

int ps_control_reply(std::int64_t handle, std::uint64_t proc, std::uint64_t id, const char* reply, std::uint64_t size) {
  return post_event(handle, Event::kReply, [&](Event* event) {
    event->proc = proc;
    event->id = id;
    event->bytes.assign(reply, size);
  });
}

// `proc`: 0 for this process. `flags`: EndFlag bits.
int ps_control_report(std::int64_t handle, std::uint64_t proc, int flags, const char* text) {
  return post_event(handle, Event::kReport, [&](Event* event) {
    event->proc = proc;
    event->flags = static_cast<std::uint8_t>(flags);
    event->bytes = text;
  });
}

// Returns when other hosts' kernels have the farewell and this host's ranks can read it, at most `linger_s` + 1 s
// later.
void ps_control_leave(std::int64_t handle, double linger_s) {
  if (const std::shared_ptr<Stay> stay = find_stay(handle)) leave_stay(stay, from_now(linger_s));
}

// Returns the size of the next news, or 0. News larger than `capacity` is kept.
std::uint64_t ps_control_next(std::int64_t handle, char* buffer, std::uint64_t capacity) {
  const std::shared_ptr<Stay> stay = find_stay(handle);
  return stay == nullptr ? 0 : stay->inbox.take(buffer, capacity);
}

// Readable while there is news.
int ps_control_eventfd(std::int64_t handle) {
  const std::shared_ptr<Stay> stay = find_stay(handle);
  return stay == nullptr ? -1 : stay->inbox.number();
}

// Returns the size of the record of the last events.
std::uint64_t ps_control_record(std::int64_t handle, char* buffer, std::uint64_t capacity) {
  try {
    const std::shared_ptr<Stay> stay = find_stay(handle);
    return stay == nullptr ? 0 : copy_out(record_of(stay.get()), buffer, capacity);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

// Returns the size of the record's replay as text.
std::uint64_t ps_control_describe(const char* record, std::uint64_t size, char* buffer, std::uint64_t capacity) {
  try {
    return copy_out(describe({record, static_cast<std::size_t>(size)}), buffer, capacity);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

void ps_control_close(std::int64_t handle) { close_stay(handle); }

}  // extern "C"
#pragma GCC visibility pop
#endif
