// Messages: within a host through rings, between hosts over connections. Functions with a `Served` record and count the
// message. Thread-safe. The caller owns the pieces.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "handle.h"
#include "queue.h"
#include "taker.h"
#include "transfer_call.h"

namespace parallel_state {

enum class Outcome : int {
  // Python must repeat the call: nothing has happened, an unexpected message has arrived and stays, or the call failed.
  kLeft = 0,
  kDone = 1,
  kNoRoom = 2,  // nothing has happened
  kRaised = 3   // the taker refused the message
};

// `method`: a number in TRANSFERS of user_call.py.
struct ToOne {
  static constexpr int kPlainTensor = -1;

  int rank;
  int method;
  Counted counted() const { return counted_as(Counted::kSendMessage, Counted::kSendList, Counted::kSend); }
  Counted received() const { return counted_as(Counted::kReceiveMessage, Counted::kReceiveList, Counted::kReceive); }

 private:
  Counted counted_as(Counted message, Counted list, Counted tensor) const {
    return method == kPlainTensor ? tensor : method < 2 ? list : message;
  }
};

constexpr std::uint64_t kMostListHead = 4096;  // fits the first chunk of each queue

// As `wire.head_of_list`. False if the form isn't a digest of 32 hexadecimal digits, or the head is too long.
bool write_list_head(std::string_view form, const std::vector<std::uint64_t>& sizes, std::vector<char>* head);

Outcome send_message(Served& served, ToOne to, const std::vector<Piece>& pieces, int heads);
// Null if messages go through rings, or need Python.
std::shared_ptr<Transfers> connections_of(Served& served, int rank);
std::int64_t start_message(Served& served, Transfers& transfers, ToOne to, const OutgoingMessage& message,
                           const TransferUser* user, void* self, bool waits);
// Between hosts. The thread must have entered `handle`.
Status broadcast_entered(Handle& handle, Told told, const std::vector<Piece>& pieces, int heads);
Status receive_entered(Handle& handle, Told told, int src, Taker& taker, HostsGroup::Taken* taken);
Outcome broadcast_message(Served& served, Told told, const std::vector<Piece>& pieces, int heads);

Outcome receive_message(Served& served, ToOne from, const std::vector<Piece>& pieces);
Outcome receive_broadcast(Served& served, Told told, int src, const std::vector<Piece>& pieces);

Outcome receive_value(Served& served, ToOne from, Taker& taker);
Outcome receive_value(Transfers& transfers, int src, int tag, double timeout_s, Taker& taker, QueueReport* report);
Outcome receive_broadcast_value(Served& served, Told told, int src, Taker& taker);
// `number` of the message; 0 if the queue is to this rank alone. The end's report gets its size, and the reason of a
// kLeft.
Outcome receive_value(OpenReader& open, std::uint64_t number, double timeout_s, Taker& taker);

struct PlainTensor {
  int dtype;
  const std::int64_t* sizes;
  std::size_t dims;
  std::uint64_t bytes;  // not 0
  // Called only if the queue is free, because it may copy or allocate.
  std::function<void*()> data;
};

Outcome send_tensor(Served& served, int dst, const PlainTensor& x);
Outcome receive_tensor(Served& served, int src, const PlainTensor& out);

}  // namespace parallel_state
