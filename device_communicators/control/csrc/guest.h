// A client of a listener's store, driven by its callers without the interpreter lock.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "machine.h"
#include "store.h"

namespace parallel_state::control {

// Used by one thread at a time. Each step returns 0 or an errno. After EINPROGRESS and EAGAIN step again; after others
// close the guest.
class Guest {
 public:
  // EINPROGRESS, EAGAIN: the deadline `until` passed during, or after, the handshake. ESTALE: the server closed the
  // connection after the last reply; ECONNABORTED: during the handshake. EKEYREJECTED: the server doesn't have the
  // token. EPROTO: another service answered; `text` has its first bytes. EPROTONOSUPPORT: the server has another
  // version, in `text`. EBADMSG: wrong MAC, or not the next reply.

  // `host` is a numeric address.
  int dial(const std::string& host, int port, std::string token);
  // The previous request must have its reply.
  int ask(Bytes request);
  // Cancels a kGet or kWait: its reply, or kCancelled, arrives next.
  void cancel();
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
  std::vector<std::string> addresses;  // numeric; the server may listen at only one of a host's
  int port = 0;
  std::string token;
  std::list<std::unique_ptr<Guest>> free;  // guarded by the fork mutex
};

// One request to a store, used by one thread at a time. Its destructor closes the connection if no reply arrived.
class Request {
 public:
  // `deadline`: of the reply. `connected_by`: of the handshake.
  Request(std::shared_ptr<Client> client, Bytes content, Nanos deadline, Nanos connected_by);
  Request(const Request&) = delete;
  ~Request();

  // Waits until `until`, at most 0.2 s longer. Returns 0 or an errno. EAGAIN: call again. ETIME: keys of a kGet or
  // kWait were not set by the deadline. ETIMEDOUT: the server doesn't answer. Others: see Guest. Reconnects if the
  // server closed an idle connection, or a new one because it has too many unidentified connections.
  int wait(Nanos until);

  Bytes text;

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
