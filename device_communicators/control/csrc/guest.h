// A guest's connection to the store of a listener, driven by the thread that calls it. It never takes Python's lock.
#pragma once

#include <string>

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
  // Waits for the reply until `until`.
  int wait(Nanos until);

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

}  // namespace parallel_state::control
