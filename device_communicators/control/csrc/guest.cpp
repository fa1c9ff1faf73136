#ifdef __linux__
// Driven by its callers without the interpreter lock.

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <sstream>
#include <list>
#include <string>
#include <vector>

#include "hmac.h"
#include "machine.h"
#include "store.h"

namespace parallel_state::control {
namespace {

constexpr std::size_t kReadBytes = 32U << 10;
constexpr std::size_t kMostShown = 64;
constexpr Nanos kPause = 20'000'000;
constexpr Nanos kEnd = 200'000'000;  // for a running server to end a cancelled wait
constexpr std::size_t kMostFree = 4;
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

// Used by one thread at a time. Steps return 0 or an errno:
// EINPROGRESS, EAGAIN: step again; during, or after, the handshake.
// ESTALE: closed after the last reply. ECONNABORTED: closed during the handshake.
// EKEYREJECTED: the server lacks the token.
// EPROTO: another service; `text` has its first bytes. EPROTONOSUPPORT: another version, in `text`.
// EBADMSG: wrong MAC, or not the next reply.
class Guest {
 public:
  int dial(const std::string& host, int port, std::string token) {
    socket_ = begin_dial(host, port);
    if (!socket_) return errno;
    keep_alive(*socket_, kIdleSeconds, kIdleSeconds, kProbes);
    token_ = std::move(token);
    nonce_ = random_bytes(kNonceBytes);
    out_ = encode(Hello{}) + encode_frame(FrameKind::kNonce, nonce_);
    return 0;
  }

  int ask(Bytes request) {
    char byte;
    // A server sends nothing between requests: it was closed.
    const bool is_quiet =
        !identified_ || (recv(*socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EINTR));
    if (!is_quiet) return ESTALE;
    asking_ = true;
    text.clear();
    if (identified_) out_ += encode_frame(FrameKind::kStoreCall, to_listener_.seal(std::move(request)));
    else request_ = std::move(request);
    return 0;
  }

  void cancel() {
    out_ += encode_frame(FrameKind::kStoreCall,
                         to_listener_.seal(encode_store(static_cast<std::uint8_t>(StoreCall::kCancel), {})));
  }

  int wait(Nanos until) {
    while (asking_) {
      pollfd poll{*socket_, static_cast<short>(POLLIN | (out_.empty() && connected_ ? 0 : POLLOUT)), 0};
      const Nanos left = std::max<Nanos>(until - monotonic_now(), 0);
      const int count = ::poll(&poll, 1, static_cast<int>((left + 999'999) / 1'000'000));
      if (count < 0 && errno != EINTR) return errno;
      if (count <= 0) return identified_ ? EAGAIN : EINPROGRESS;  // also after a signal: the caller runs its handler
      if (!connected_) {
        if (const int code = dial_error(*socket_); code != 0) return code;
        connected_ = true;
      }
      int code = flush();
      if (code == 0) code = read();
      if (code != 0) return code;
    }
    return 0;
  }

  bool is_identified() const { return identified_; }
  bool is_open() const { return static_cast<bool>(socket_); }  // false in a forked child

  Bytes text;  // the reply, or the error's text

 private:
  int flush() {
    while (!out_.empty()) {
      const ssize_t size = send(*socket_, out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (size < 0) return errno == EAGAIN || errno == EINTR ? 0 : read();  // received bytes may contain the cause
      out_.erase(0, static_cast<std::size_t>(size));
    }
    return 0;
  }

  int read() {
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

  int on_frame(const Frame& frame) {
    if (theirs_.empty()) {
      if (frame.kind != FrameKind::kNonce || frame.body.size() != kNonceBytes) return EBADMSG;
      if (frame.from == 0) return ECONNREFUSED;  // the socket connected to itself (TCP simultaneous open)
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

  Descriptor socket_;
  std::string token_;
  Bytes nonce_, theirs_, request_, out_;
  Seal to_listener_, from_listener_;
  Proc listener_ = 0;
  Parser parser_;
  bool connected_ = false, identified_ = false, asking_ = false;
};

struct Client {
  std::vector<std::string> addresses;  // the server may listen at only one
  int port = 0;
  std::string token;
  std::list<std::unique_ptr<Guest>> free;  // idle; guarded by the fork mutex
};

// Used by one thread at a time. Closes its connection if no reply arrived.
class Request {
 public:
  // `deadline`: of the reply. `connected_by`: of the handshake.
  Request(std::shared_ptr<Client> client, Bytes content, Nanos deadline, Nanos connected_by)
      : client_(std::move(client)), content_(std::move(content)), deadline_(deadline), connected_by_(connected_by) {
    const auto call = static_cast<StoreCall>(content_.empty() ? 0 : content_[0]);
    waits_ = call == StoreCall::kGet || call == StoreCall::kWait;
    asks_ = call == StoreCall::kQuestion;
  }

  Request(const Request&) = delete;

  ~Request() {
    const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
    const bool is_held = !content_.empty() && content_[0] == static_cast<char>(StoreCall::kHold);
    if (replied_ && !is_held && !asks_ && client_->free.size() < kMostFree) client_->free.push_back(std::move(guest_));
  }

  // Returns at most 0.2 s after `until`. EAGAIN: call again. ETIME: keys were not set, or a question was not
  // answered, by the deadline. ETIMEDOUT: the server didn't answer. Others: see Guest. Reconnects if the server closed
  // an idle connection, or a new one because it has too many.
  int wait(Nanos until) {
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
        if (!waits_ || cancelled_) return waits_ || asks_ ? ETIME : ETIMEDOUT;
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

  Bytes text;

 private:
  int advance(Nanos until) {
    if (guest_ == nullptr) asked_ = false;
    if (guest_ == nullptr && !asks_) {
      const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
      auto& free = client_->free;
      free.remove_if([](const auto& guest) { return !guest->is_open(); });
      if (!free.empty()) {
        guest_ = std::move(free.back());
        free.pop_back();
      }
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

  std::shared_ptr<Client> client_;
  std::unique_ptr<Guest> guest_;
  Bytes content_;
  Nanos deadline_, connected_by_;
  std::size_t address_ = 0;
  bool waits_, asks_;  // a question has its own connection, whose handshake shows that the server runs
  bool asked_ = false, cancelled_ = false, replied_ = false;
};

// Guarded by the fork mutex. Never freed: threads may use them at exit.
auto& clients = *new std::map<std::int64_t, std::shared_ptr<Client>>;
auto& requests = *new std::map<std::int64_t, std::shared_ptr<Request>>;
std::int64_t next_request = 1;

template <typename All>
auto find(const All& all, std::int64_t handle) {
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

// Connecting may take `connect_s`, even if `timeout_s` is shorter.
std::int64_t ps_store_ask(std::int64_t client, const char* content, std::uint64_t size, double timeout_s,
                          double connect_s) try {
  auto found = find(clients, client);
  if (found == nullptr) return -ESRCH;
  const auto after = [now = monotonic_now()](double s) { return now + static_cast<Nanos>(std::min(s, 1e9) * 1e9); };
  auto request = std::make_shared<Request>(std::move(found), Bytes(content, size), after(timeout_s),
                                           after(std::max(timeout_s, connect_s)));
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  requests[next_request] = std::move(request);
  return next_request++;
} catch (const std::bad_alloc&) {
  return -ENOMEM;
}

int ps_store_wait(std::int64_t handle, double slice_s) try {
  const auto request = find(requests, handle);
  return request == nullptr ? -ESRCH : -request->wait(monotonic_now() + static_cast<Nanos>(slice_s * 1e9));
} catch (const std::bad_alloc&) {
  return -ENOMEM;
}

std::uint64_t ps_store_take(std::int64_t handle, char* buffer, std::uint64_t capacity) {
  const auto request = find(requests, handle);
  if (request == nullptr) return 0;
  if (request->text.size() <= capacity) std::copy(request->text.begin(), request->text.end(), buffer);
  return request->text.size();
}

// Closes the connection if it holds, or lacks a reply.
void ps_store_end(std::int64_t handle) {
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  requests.erase(handle);
}

void ps_store_close(std::int64_t client) {
  const std::lock_guard<std::recursive_mutex> lock(fork_mutex());
  if (const auto found = clients.find(client); found != clients.end()) found->second->free.clear();
}

}  // extern "C"
#pragma GCC visibility pop
#endif
