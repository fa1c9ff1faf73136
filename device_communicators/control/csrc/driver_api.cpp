// The C interface for ctypes. Functions return -ESRCH for an unknown handle, as in a forked child. None takes the
// interpreter lock; each wait is bounded.
#ifdef __linux__
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "driver.h"

using namespace parallel_state::control;

namespace {

Nanos from_now(double seconds) {
  return monotonic_now() + static_cast<Nanos>(std::min(std::max(seconds, 0.0), 1e9) * 1e9);
}

template <typename Result, typename Body>
Result with(std::int64_t handle, Result unknown, Result failed, Body body) try {
  const std::shared_ptr<Stay> stay = find_stay(handle);
  return stay == nullptr ? unknown : static_cast<Result>(body(stay));
} catch (const std::bad_alloc&) {
  return failed;
}

template <typename Make>
int post_event(std::int64_t handle, Event::Kind kind, Make make, std::vector<int>* boards = nullptr) {
  return with(handle, -ESRCH, -ENOMEM, [&](const auto& stay) {
    Event event;
    event.kind = kind;
    if (const int code = make(&event); code != 0) return -code;
    return post(stay, std::move(event), boards == nullptr ? std::vector<int>() : *boards) ? 0 : -errno;
  });
}

std::uint64_t copy_out(const Bytes& bytes, char* buffer, std::uint64_t capacity) {
  std::memcpy(buffer, bytes.data(), std::min<std::uint64_t>(bytes.size(), capacity));
  return bytes.size();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// See `open_stay`. `token` has at most 64 characters.
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

// `members`: see `_pack` in plane.py.
int ps_control_meet(std::int64_t handle, const char* members, std::uint64_t size, int count) {
  std::vector<int> boards;
  const auto make = [&](Event* event) {
    Reader reader(std::string_view(members, static_cast<std::size_t>(size)));
    std::vector<Member> all(static_cast<std::size_t>(count));
    for (Member& member : all) {
      get(&reader, std::tie(member.rank, member.proc, member.domain, member.pid, member.began, boards.emplace_back(),
                            member.endpoint.port, member.endpoint.host, member.endpoint.token));
    }
    event->roster = std::make_shared<const Roster>(std::move(all));
    return reader.finished() ? 0 : EINVAL;
  };
  return post_event(handle, Event::kMeet, make, &boards);
}

// A negative timeout cancels the agreement. -EEXIST: it is running. Needs a later `ps_control_forget`.
int ps_control_call(std::int64_t handle, const char* purpose, std::uint32_t attempt, const std::uint64_t* members,
                    int count, const char* value, std::uint64_t size, double timeout_s, std::uint64_t* digest) try {
  *digest = digest_of(std::vector<Proc>(members, members + count));
  const auto stay = find_stay(handle);
  if (stay != nullptr && timeout_s >= 0 && !stay->inbox.expect({*digest, purpose, attempt})) return -EEXIST;
  return post_event(handle, timeout_s < 0 ? Event::kCancel : Event::kCall, [&](Event* event) {
    event->call = std::make_shared<const Call>(
        Call{purpose, attempt, {members, members + count}, {value, size}, from_now(timeout_s)});
    return 0;
  });
} catch (const std::bad_alloc&) {
  return -ENOMEM;
}

// See Inbox::await. -ESHUTDOWN: the stay is over.
std::int64_t ps_control_verdict(std::int64_t handle, std::uint64_t digest, const char* purpose, std::uint32_t attempt,
                                double wait_s, char* buffer, std::uint64_t capacity) {
  return with<std::int64_t>(handle, -ESRCH, -ENOMEM, [&](const auto& stay) {
    const auto wait = static_cast<Nanos>(wait_s * 1e9);
    const auto size = stay->inbox.await({digest, purpose, attempt}, wait, buffer, capacity);
    return size < 0 ? -ESHUTDOWN : size;
  });
}

void ps_control_forget(std::int64_t handle, std::uint64_t digest, const char* purpose, std::uint32_t attempt) {
  with(handle, 0, 0, [&](const auto& stay) { return stay->inbox.forget({digest, purpose, attempt}), 0; });
}

int ps_control_is_ending(int pid) { return is_ending(pid) ? 1 : 0; }

// See Event::kReport.
int ps_control_report(std::int64_t handle, std::uint64_t proc, int flags, const char* cause, std::uint64_t size) {
  return post_event(handle, Event::kReport, [&](Event* event) {
    event->proc = proc;
    event->flags = static_cast<std::uint8_t>(flags);
    event->bytes.assign(cause, size);
    return 0;
  });
}

// `guest`: the number in the news of its question.
int ps_control_reply(std::int64_t handle, std::uint64_t guest, const char* reply, std::uint64_t size) {
  return with(handle, -ESRCH, -ENOMEM,
              [&](const auto& stay) { return post_reply(stay, static_cast<int>(guest), {reply, size}) ? 0 : -errno; });
}

void ps_control_leave(std::int64_t handle, double linger_s) {
  with(handle, 0, 0, [&](const auto& stay) { return leave_stay(stay, from_now(linger_s)), 0; });
}

// See Inbox::take.
std::uint64_t ps_control_next(std::int64_t handle, char* buffer, std::uint64_t capacity) {
  return with<std::uint64_t>(handle, 0, 0, [&](const auto& stay) { return stay->inbox.take(buffer, capacity); });
}

int ps_control_eventfd(std::int64_t handle) {
  return with(handle, -1, -1, [](const auto& stay) { return stay->inbox.number(); });
}

std::uint64_t ps_control_record(std::int64_t handle, char* buffer, std::uint64_t capacity) {
  return with<std::uint64_t>(handle, 0, 0,
                             [&](const auto& stay) { return copy_out(record_of(stay.get()), buffer, capacity); });
}

std::uint64_t ps_control_describe(const char* record, std::uint64_t size, char* buffer, std::uint64_t capacity) try {
  return copy_out(describe({record, static_cast<std::size_t>(size)}), buffer, capacity);
} catch (const std::bad_alloc&) {
  return 0;
}

void ps_control_close(std::int64_t handle) { close_stay(handle); }

}  // extern "C"
#pragma GCC visibility pop
#endif
