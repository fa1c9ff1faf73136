// What the C interface of transfers.h takes and gives.
#pragma once

#include <cstdint>

namespace parallel_state {

// How a transfer failed: the words of `Failed` in cpu/transfers.py. Ranks are those of the group, -1 for none.
struct TransferFailure {
  std::int64_t status = 0;  // of QueueStatus, or one of these:
  static constexpr std::int64_t kNoMemory = 7, kClosed = 8, kBroken = 9;
  std::int64_t sends = 0;
  std::int64_t peer = -1;
  std::int64_t suspect = -1;   // to blame
  std::int64_t reporter = -1;  // gave up, after kGivenUp, for this reason
  std::int64_t reason = 0;
  std::int64_t elapsed_us = 0;
  std::int64_t sent_dtype = -1, sent_bytes = 0;  // the message, where it doesn't fit its receive; else -1
  std::int64_t expected_dtype = -1, expected_bytes = 0;
};

// Who started a transfer. Each function may be null. None is called with a lock held.
struct TransferUser {
  // The transfer has ended, by `failure` unless that is null. Returns not 0 if `announce` is to be called, after waits
  // for the transfer were let go: it may take long, and start other transfers.
  int (*settle)(void* self, int source, const TransferFailure* failure);
  void (*announce)(void* self);
  // The memory isn't used any more. Called once, also for a transfer that was refused.
  void (*release)(void* self);
};

struct OutgoingMessage;
struct IncomingMessage;

struct TransferCall {
  int peer;  // -1: any source
  int sends;
  int tag;
  int dtype;  // by torch's number, or kMessageDtype
  void* address;
  std::uint64_t bytes;
  double timeout_s;  // from now on; 0: it has no deadline but that of a wait for it
  const TransferUser* user;
  void* self;
  // In place of `address`: see transfers.h. The bytes of a send are those of the whole message, of a receive unknown.
  const OutgoingMessage* outgoing = nullptr;
  IncomingMessage* incoming = nullptr;
  // In place of `tag`, over connections: see Streams. A send writes to a window of the peer, from `offset` on, or
  // signals there if it has no bytes. A receive takes a signal of the peer from a window of this rank.
  std::uint32_t window = 0;  // 0: none
  std::uint64_t offset = 0;
};
constexpr int kMessageDtype = 1 << 20, kWindowDtype = kMessageDtype + 1;  // no dtype has these numbers

// What starting returns, beside the number of a transfer: it is done; it was refused, see the failure; this thread is
// in the middle of what it would wait for, as in a signal's handler.
constexpr std::int64_t kDoneTransfer = 0, kRefusedTransfer = -1, kInsideTransfer = -2;

// How a wait ends. kLateTransfer: at its timeout. kInterruptedTransfer: a signal's handler raised.
constexpr int kEndedTransfer = 0, kFailedTransfer = 1, kLateTransfer = 2, kInterruptedTransfer = 3, kInsideWait = 4;
constexpr int kLeftMessage = 5;  // its taker has left it to the next receive

}  // namespace parallel_state
