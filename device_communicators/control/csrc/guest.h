// A client of a listener's store, driven by the threads that call it. It never takes Python's lock.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "machine.h"
#include "store.h"

namespace parallel_state::control {

// One thread uses a guest at a time. Each step returns 0 or an errno. After EINPROGRESS and EAGAIN, step again.
// After any other errno, close the guest.
class Guest {
 public:
  // EINPROGRESS: the deadline `until` passed during the handshake. EAGAIN: it passed after the handshake.
  // ESTALE: the server closed the connection after the last reply. ECONNABORTED: the server closed the connection
  // before the handshake ended. EKEYREJECTED: the server doesn't have the token. EPROTO: another service answered;
  // `text` has its first bytes. EPROTONOSUPPORT: the server has another version, named in `text`. EBADMSG: the MAC is
  // wrong, or the frame is not the next reply.

  // Begins to connect to a numeric address.
  int dial(const std::string& host, int port, std::string token);
  // Begins a request. The previous one must have its reply.
  int ask(Bytes request);
  // Cancels the current request, a kGet or kWait: its reply, or kCancelled, arrives next.
  void cancel();
  // Waits for the reply until `until`.
  int wait(Nanos until);
  bool is_identified() const { return identified_; }

  Bytes text;  // the reply, or the error's text
  int pid = 0;

 private:
  int on_frame(const Frame& frame);
  int read();
  int flush();

  Descriptor socket_;
  std::string token_;
  Bytes nonce_, theirs_, request_, out_;
  Seal to_listener_, from_listener_;
  Proc listener_ = 0;
  Parser parser_;
  bool connected_ = false, identified_ = false, asking_ = false;
};

// One store's addresses, and its idle connections.
struct Client {
  std::vector<std::string> addresses;  // numeric; a host name may have several, and the server may listen at only one
  int port = 0;
  std::string token;
  std::list<std::unique_ptr<Guest>> free;  // guarded by the fork mutex
};

// One request to a store, used by one thread at a time. Its destructor closes the connection if no reply has arrived.
class Request {
 public:
  // `deadline`: by when the reply must arrive. `connected_by`: by when the connection must be identified.
  Request(std::shared_ptr<Client> client, Bytes content, Nanos deadline, Nanos connected_by);
  Request(const Request&) = delete;
  ~Request();

  // Waits for the reply until `until`, at most 0.2 s longer. Returns 0 or an errno. EAGAIN: call it again. ETIME: some
  // keys of a kGet or kWait were not set by the deadline. ETIMEDOUT: the server doesn't answer. Others: see Guest.
  // Reconnects if the server has closed an idle connection, or closes a new one before it is identified. A server does
  // the latter when it has too many unidentified connections.
  int wait(Nanos until);

  Bytes text;  // the reply, or the error's text

 private:
  int advance(Nanos until);

  std::shared_ptr<Client> client_;
  std::unique_ptr<Guest> guest_;
  Bytes content_;
  Nanos deadline_, connected_by_;
  std::size_t address_ = 0;
  bool waits_, asked_ = false, cancelled_ = false, replied_ = false;
};

}  // namespace parallel_state::control
