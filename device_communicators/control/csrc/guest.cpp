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
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <sstream>

#include "hmac.h"

namespace parallel_state::control {
namespace {

constexpr std::size_t kReadBytes = 32U << 10;
constexpr std::size_t kMostShown = 64;  // quoted bytes of another service's answer
constexpr Nanos kPause = 20'000'000;    // before a connection that closed early is redialed
constexpr Nanos kEnd = 200'000'000;     // within which a running server ends a cancelled wait
constexpr std::size_t kMostFree = 4;    // idle connections per client
// Keepalives keep firewalls from dropping idle connections. A connection ends 70 s after the server's host vanished.
constexpr int kIdleSeconds = 10, kProbes = 6;

Bytes encode_frame(FrameKind kind, Bytes body) { return encode(Frame{kind, 0, 0, std::move(body)}); }

bool is_of_address(int code) {
  return code == ECONNREFUSED || code == EHOSTUNREACH || code == ENETUNREACH || code == EADDRNOTAVAIL ||
         code == EAFNOSUPPORT;
}

Bytes printable(const Bytes& text) {
  Bytes shown;
  for (const char byte : text) shown += byte >= ' ' && byte <= '~' ? byte : '?';
  return shown;
}

Bytes describe(int code, const Bytes& text) {
  switch (code) {
    case EPROTO: return printable(text);
    case EPROTONOSUPPORT: return "the server has protocol version " + text + ": install the same package on all hosts";
    case EKEYREJECTED:
      return "the server can't prove that it has the secret. Give each node the same secret_file, or free the port";
    case EBADMSG: return "the server sent a reply with a wrong MAC, or a frame that is no reply";
    case ECONNRESET:
    case EPIPE: return "the connection was closed";
    default: return std::strerror(code);
  }
}

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
  keep_alive(*socket_, kIdleSeconds, kIdleSeconds, kProbes);
  token_ = std::move(token);
  nonce_ = random_bytes(kNonceBytes);
  out_ = encode(Hello{}) + encode_frame(FrameKind::kNonce, nonce_);
  pid = getpid();
  return 0;
}

int Guest::ask(Bytes request) {
  char byte;
  // A server sends nothing between requests: a readable socket was closed.
  const bool is_quiet =
      !identified_ || (recv(*socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EINTR));
  if (!is_quiet) return ESTALE;
  asking_ = true;
  text.clear();
  if (identified_) out_ += encode_frame(FrameKind::kStoreCall, to_listener_.seal(std::move(request)));
  else request_ = std::move(request);
  return 0;
}

void Guest::cancel() {
  out_ += encode_frame(FrameKind::kStoreCall,
                       to_listener_.seal(encode_store(static_cast<std::uint8_t>(StoreCall::kCancel), {})));
}

int Guest::wait(Nanos until) {
  while (asking_) {
    pollfd poll{*socket_, static_cast<short>(POLLIN | (out_.empty() && connected_ ? 0 : POLLOUT)), 0};
    const Nanos left = std::max<Nanos>(until - monotonic_now(), 0);
    const int count = ::poll(&poll, 1, static_cast<int>((left + 999'999) / 1'000'000));
    if (count < 0 && errno != EINTR) return errno;
    if (count <= 0) return identified_ ? EAGAIN : EINPROGRESS;  // after a signal, too: the caller runs its handler
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
    if (size < 0) return errno == EAGAIN || errno == EINTR ? 0 : read();  // received bytes may have the cause
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
    if (frame.from == 0) return ECONNREFUSED;  // the socket connected to itself: TCP simultaneous open
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

Request::Request(std::shared_ptr<Client> client, Bytes content, Nanos deadline, Nanos connected_by)
    : client_(std::move(client)), content_(std::move(content)), deadline_(deadline), connected_by_(connected_by) {
  const auto call = static_cast<StoreCall>(content_.empty() ? 0 : content_[0]);
  waits_ = call == StoreCall::kGet || call == StoreCall::kWait;
}

Request::~Request() {
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  // In a forked child the number may be another file's.
  if (guest_ != nullptr && guest_->pid != getpid()) {
    static_cast<void>(guest_.release());
    return;
  }
  const bool is_held = !content_.empty() && content_[0] == static_cast<char>(StoreCall::kHold);
  if (replied_ && !is_held && client_->free.size() < kMostFree) client_->free.push_back(std::move(guest_));
}

int Request::wait(Nanos until) {
  while (true) {
    const int code = advance(until);
    const Nanos now = monotonic_now();
    if (code == 0) {
      text = std::move(guest_->text);
      replied_ = true;
      return !text.empty() && text[0] == static_cast<char>(kCancelled) ? ETIME : 0;
    }
    if (code == EINPROGRESS) return now < connected_by_ ? EAGAIN : ETIMEDOUT;
    if (code == EAGAIN) {
      if (now < deadline_) return EAGAIN;
      if (!waits_ || cancelled_) return waits_ ? ETIME : ETIMEDOUT;
      guest_->cancel();
      cancelled_ = true;
      until = deadline_ = now + kEnd;
      continue;
    }
    text = describe(code, guest_->text);
    guest_.reset();
    if (code == ESTALE) continue;
    if (code == ECONNABORTED && now + kPause < connected_by_) {
      ::poll(nullptr, 0, kPause / 1'000'000);
      return EAGAIN;
    }
    if (!is_of_address(code) || address_ + 1 >= client_->addresses.size()) return code;
    ++address_;
  }
}

int Request::advance(Nanos until) {
  if (guest_ == nullptr) {
    const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
    auto& free = client_->free;
    free.remove_if([](auto& guest) {  // in a forked child: the parent's guests, closed
      const bool is_foreign = guest->pid != getpid();
      if (is_foreign) static_cast<void>(guest.release());
      return is_foreign;
    });
    if (!free.empty()) {
      guest_ = std::move(free.back());
      free.pop_back();
    }
    asked_ = false;
  }
  if (guest_ == nullptr) {
    guest_ = std::make_unique<Guest>();
    if (const int code = guest_->dial(client_->addresses[address_], client_->port, client_->token); code != 0)
      return code;
  }
  if (!asked_) {
    if (const int code = guest_->ask(content_); code != 0) return code;
    asked_ = true;
  }
  return guest_->wait(std::min(until, guest_->is_identified() ? deadline_ : connected_by_));
}

namespace {

// Guarded by the fork mutex. Never freed: threads may use them at exit.
auto& clients = *new std::map<std::int64_t, std::shared_ptr<Client>>;
auto& requests = *new std::map<std::int64_t, std::shared_ptr<Request>>;
std::int64_t next_request = 1;

template <typename T>
std::shared_ptr<T> find(const std::map<std::int64_t, std::shared_ptr<T>>& all, std::int64_t handle) {
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  const auto found = all.find(handle);
  return found == all.end() ? nullptr : found->second;
}

}  // namespace
}  // namespace parallel_state::control

using namespace parallel_state::control;

#pragma GCC visibility push(default)
extern "C" {

// `addresses`: numeric, separated by commas. Equal stores share one client.
std::int64_t ps_store_client(const char* addresses, int port, const char* token) {
  auto client = std::make_shared<Client>();
  std::istringstream words(addresses);
  for (std::string word; std::getline(words, word, ',');) client->addresses.push_back(word);
  client->port = port;
  client->token = token;
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  for (const auto& [handle, known] : clients) {
    if (known->addresses == client->addresses && known->port == port && known->token == token) return handle;
  }
  const auto handle = static_cast<std::int64_t>(clients.size()) + 1;
  clients[handle] = std::move(client);
  return handle;
}

// Returns the request's handle, or the negative errno. Connecting may take `connect_s`, even if the request's limit is
// shorter.
std::int64_t ps_store_ask(std::int64_t client, const char* content, std::uint64_t size, double timeout_s,
                          double connect_s) {
  try {
    auto found = find(clients, client);
    if (found == nullptr) return -ESRCH;
    const Nanos now = monotonic_now();
    const auto after = [now](double s) { return now + static_cast<Nanos>(std::min(s, 1e9) * 1e9); };
    auto request = std::make_shared<Request>(std::move(found), Bytes(content, size), after(timeout_s),
                                             after(std::max(timeout_s, connect_s)));
    const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
    requests[next_request] = std::move(request);
    return next_request++;
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
}

// Waits for at most `slice_s`. Returns 0 or the negative errno of Request::wait.
int ps_store_wait(std::int64_t handle, double slice_s) {
  try {
    const auto request = find(requests, handle);
    return request == nullptr ? -ESRCH : -request->wait(monotonic_now() + static_cast<Nanos>(slice_s * 1e9));
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
}

// Returns the size of the reply or error text, and copies it if it fits.
std::uint64_t ps_store_take(std::int64_t handle, char* buffer, std::uint64_t capacity) {
  const auto request = find(requests, handle);
  if (request == nullptr) return 0;
  if (request->text.size() <= capacity) std::copy(request->text.begin(), request->text.end(), buffer);
  return request->text.size();
}

// Closes the connection of a kHold, or if no reply has arrived.
void ps_store_end(std::int64_t handle) {
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  requests.erase(handle);
}

// The next request connects again.
void ps_store_close(std::int64_t client) {
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  if (const auto found = clients.find(client); found != clients.end()) found->second->free.clear();
}

}  // extern "C"
#pragma GCC visibility pop
#endif
