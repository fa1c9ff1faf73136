#pragma once

#include <cstdint>

namespace parallel_state {

// The words of `Failed` in cpu/transfers.py. Ranks are those of the group, -1 for none.
struct TransferFailure {
  std::int64_t status = 0;  // a QueueStatus, or:
  static constexpr std::int64_t kNoMemory = 7, kClosed = 8, kBroken = 9;
  std::int64_t sends = 0;
  std::int64_t peer = -1;
  std::int64_t suspect = -1;
  std::int64_t reporter = -1;  // after kGivenUp: failed first
  std::int64_t reason = 0;     // the reporter's status; after kPeerDied: 1 if the suspect left
  std::int64_t elapsed_us = 0;
  std::int64_t sent_dtype = -1, sent_bytes = 0;  // if a message doesn't fit its receive; else -1
  std::int64_t expected_dtype = -1, expected_bytes = 0;
};

// Each may be null. None is called with a lock held.
struct TransferUser {
  // `failure` is null after success. Unless it returns 0, `announce`, which may start transfers, follows once waits
  // have returned.
  int (*settle)(void* self, int source, const TransferFailure* failure);
  void (*announce)(void* self);
  // Called once, even if the transfer was refused.
  void (*release)(void* self);
};

struct OutgoingMessage;
struct IncomingMessage;

struct TransferCall {
  int peer;  // -1: any source
  int sends;
  int tag;
  int dtype;  // c10::ScalarType, or kMessageDtype
  void* address;
  std::uint64_t bytes;
  double timeout_s;  // 0: only waits have deadlines
  const TransferUser* user;
  void* self;
  // Of a message, in place of `address`. A receive's `bytes` are unknown.
  const OutgoingMessage* outgoing = nullptr;
  IncomingMessage* incoming = nullptr;
  // In place of `tag`, over connections. A send writes to a window of the peer, and then adds `signals` there. A
  // receive takes a signal from a window of this rank.
  std::uint32_t window = 0;  // 0: none
  std::uint32_t signals = 0;
  std::uint64_t offset = 0;
};
constexpr int kMessageDtype = 1 << 20, kWindowDtype = kMessageDtype + 1;

// kInsideTransfer: this thread, in a signal handler, would wait for the interrupted call.
constexpr std::int64_t kDoneTransfer = 0, kRefusedTransfer = -1, kInsideTransfer = -2;

constexpr int kEndedTransfer = 0, kFailedTransfer = 1, kLateTransfer = 2, kInterruptedTransfer = 3, kInsideWait = 4;
constexpr int kLeftMessage = 5;  // the taker left it to the next receive

}  // namespace parallel_state
