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
  // ESTALE: the server closed the connection since the last reply. ECONNABORTED: it did so before it was identified.
  // EKEYREJECTED: the server doesn't hold the token. EPROTO: it is another service, whose first bytes are `text`.
  // EPROTONOSUPPORT: the server has another version, named in `text`. EBADMSG: a wrong MAC, or not the next reply.

  // Begins to connect to a numeric address.
  int dial(const std::string& host, int port, std::string token);
  // Begins a request. The reply of the last one must have arrived.
  int ask(Bytes request);
  // Ends the request, a kGet or kWait: its reply, or kCancelled, arrives next.
  void cancel();
  // Waits for the reply until `until`.
  int wait(Nanos until);
  bool is_identified() const { return identified_; }

  Bytes text;  // the reply, or what the error above says
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

// The way to one store, and the connections that no request uses.
struct Client {
  std::vector<std::string> addresses;  // numeric: a name may have several, and a server may listen at one of them
  int port = 0;
  std::string token;
  std::list<std::unique_ptr<Guest>> free;  // guarded by the fork mutex
};

// One request to a store. One thread uses it at a time. Without a reply, its connection ends with it.
class Request {
 public:
  // `deadline`: of the reply. The connection may take until `connected_by`.
  Request(std::shared_ptr<Client> client, Bytes content, Nanos deadline, Nanos connected_by);
  Request(const Request&) = delete;
  ~Request();

  // Waits for the reply until `until`, at most 0.2 s longer. Returns 0 or an errno. EAGAIN: call it again. ETIME: the
  // keys that it waits for are not set at its deadline. ETIMEDOUT: the server doesn't answer. Others: see Guest.
  // Connects anew if the server has closed a kept connection, or closes a new one before it is identified, as it does
  // when strangers crowd it.
  int wait(Nanos until);

  Bytes text;  // the reply, or what went wrong

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
