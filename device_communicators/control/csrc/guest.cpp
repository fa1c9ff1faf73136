#ifdef __linux__
#include "guest.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <new>

#include "hmac.h"

namespace parallel_state::control {
namespace {

constexpr std::size_t kReadBytes = 32U << 10;
constexpr std::size_t kMostShown = 64;  // of what another service sent

Bytes encode_frame(FrameKind kind, Bytes body) { return encode(Frame{kind, 0, 0, 0, 0, std::move(body)}); }

}  // namespace

int Guest::dial(const std::string& host, int port, std::string token) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return EADDRNOTAVAIL;
  socket_ = Descriptor::of([&] { return socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  const bool begun = socket_ && (connect(*socket_, found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS);
  const int code = errno;
  freeaddrinfo(found);
  if (!begun) return code;
  const int on = 1;
  setsockopt(*socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  token_ = std::move(token);
  nonce_ = random_bytes(kNonceBytes);
  out_ = encode(Hello{}) + encode_frame(FrameKind::kNonce, nonce_);
  pid = getpid();
  return 0;
}

int Guest::ask(Bytes request) {
  char byte;
  // A server sends nothing between two requests: what can be read is its end.
  if (identified_ && recv(*socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0) return ESTALE;
  asking_ = true;
  text.clear();
  if (identified_) out_ += encode_frame(FrameKind::kStoreCall, to_listener_.seal(std::move(request)));
  else request_ = std::move(request);
  return 0;
}

int Guest::wait(Nanos until) {
  while (asking_) {
    pollfd poll{*socket_, static_cast<short>(POLLIN | (out_.empty() && connected_ ? 0 : POLLOUT)), 0};
    const Nanos left = std::max<Nanos>(until - monotonic_now(), 0);
    const int count = ::poll(&poll, 1, static_cast<int>((left + 999'999) / 1'000'000));
    if (count < 0 && errno != EINTR) return errno;
    if (count <= 0) return identified_ ? EAGAIN : EINPROGRESS;  // after a signal, too: its handler runs in the caller
    if (!connected_) {
      int code = 0;
      socklen_t size = sizeof(code);
      getsockopt(*socket_, SOL_SOCKET, SO_ERROR, &code, &size);
      if (code != 0) return code;
      connected_ = true;
    }
    int code = flush();
    if (code == 0) code = read();
    if (code != 0) return code;
  }
  return 0;
}

int Guest::flush() {
  while (!out_.empty()) {
    const ssize_t size = send(*socket_, out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (size < 0) return errno == EAGAIN || errno == EINTR ? 0 : read();  // what came before the end says why
    out_.erase(0, static_cast<std::size_t>(size));
  }
  return 0;
}

int Guest::read() {
  Bytes bytes(kReadBytes, '\0');
  while (asking_) {
    const ssize_t size = recv(*socket_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (size <= 0) return identified_ ? ECONNRESET : ECONNABORTED;
    parser_.push(std::string_view(bytes).substr(0, static_cast<std::size_t>(size)));
    while (asking_) {
      Hello hello;
      Frame frame;
      const Bytes first(parser_.rest().substr(0, kMostShown));
      const Parser::Result result = parser_.next(&hello, &frame);
      if (result == Parser::Result::kNeedsMore) break;
      int code = 0;
      if (result == Parser::Result::kMalformed) {
        text = first;
        code = theirs_.empty() ? EPROTO : EBADMSG;
      } else if (result == Parser::Result::kFrame) {
        code = on_frame(frame);
      } else if (hello.version < kOldestVersion || kVersion < hello.oldest) {
        text = std::to_string(hello.version) + ", and this process " + std::to_string(kVersion);
        code = EPROTONOSUPPORT;
      }
      if (code != 0) return code;
    }
  }
  return 0;
}

int Guest::on_frame(const Frame& frame) {
  if (theirs_.empty()) {
    if (frame.kind != FrameKind::kNonce || frame.body.size() != kNonceBytes) return EBADMSG;
    if (frame.from == 0) return ECONNREFUSED;  // it met itself: TCP simultaneous open
    listener_ = frame.from;
    theirs_ = frame.body;
    out_ += encode_frame(FrameKind::kIdentity, prove(token_, true, nonce_, theirs_, 0, listener_));
    return flush();
  }
  if (!identified_) {
    if (frame.kind != FrameKind::kIdentity) return EBADMSG;
    if (!equal_secrets(frame.body, prove(token_, false, nonce_, theirs_, 0, listener_))) return EKEYREJECTED;
    identified_ = true;
    parser_.trust();
    to_listener_ = Seal(token_, true, nonce_, theirs_);
    from_listener_ = Seal(token_, false, nonce_, theirs_);
    out_ += encode_frame(FrameKind::kStoreCall, to_listener_.seal(std::move(request_)));
    return flush();
  }
  text = frame.body;
  if (frame.kind != FrameKind::kStoreReply || !from_listener_.open(&text)) return EBADMSG;
  asking_ = false;
  return 0;
}

namespace {

// Guarded by the fork mutex. Never freed: threads may use it while the process exits.
auto& guests = *new std::map<std::int64_t, std::shared_ptr<Guest>>;
std::int64_t next_guest = 1;

// Returns null also in a forked child of the guest's process: its descriptors are closed there.
std::shared_ptr<Guest> find_guest(std::int64_t handle) {
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  const auto found = guests.find(handle);
  return found == guests.end() || found->second->pid != getpid() ? nullptr : found->second;
}

}  // namespace
}  // namespace parallel_state::control

using namespace parallel_state::control;

#pragma GCC visibility push(default)
extern "C" {

// Begins to connect to the store at a numeric address. Returns a handle, or the negative errno.
std::int64_t ps_store_open(const char* host, int port, const char* token) {
  try {
    auto guest = std::make_shared<Guest>();
    if (const int code = guest->dial(host, port, token); code != 0) return -code;
    const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
    guests[next_guest] = std::move(guest);
    return next_guest++;
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
}

// Sends a request, or with a null one goes on waiting, for at most `slice_s`. Returns 0 once its reply has arrived, or
// a negative errno; see guest.h.
int ps_store_ask(std::int64_t handle, const char* request, std::uint64_t size, double slice_s) {
  try {
    const auto guest = find_guest(handle);
    if (guest == nullptr) return -ESRCH;
    const int code = request == nullptr ? 0 : guest->ask(Bytes(request, size));
    return -(code != 0 ? code : guest->wait(monotonic_now() + static_cast<Nanos>(slice_s * 1e9)));
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
}

// Returns the size of the reply, or of an error's text, and copies it if it fits into `capacity`.
std::uint64_t ps_store_take(std::int64_t handle, char* buffer, std::uint64_t capacity) {
  const auto guest = find_guest(handle);
  if (guest == nullptr) return 0;
  if (guest->text.size() <= capacity) std::copy(guest->text.begin(), guest->text.end(), buffer);
  return guest->text.size();
}

void ps_store_close(std::int64_t handle) {
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  guests.erase(handle);
}

}  // extern "C"
#pragma GCC visibility pop
#endif
