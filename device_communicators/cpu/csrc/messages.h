// Messages between two ranks: objects with their tensors, lists of tensors whose head the receiver knows beforehand,
// and plain tensors. Within a host they go through rings (open_queue.h), between hosts over connections (transfers.h).
//
// A message is taken in by these steps, whatever it is: its head is read, a `Taker` says where the tensors go, and they
// are read to there. Who asks by a group's name has the message recorded and counted here, else by the caller.
//
// Any thread may call. The pieces are the caller's.
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
  // Nothing has happened yet; or the message that has come is another than the expected one, and waits to be looked at;
  // or the call has failed, and Python finds out how at once.
  kLeft = 0,
  kDone = 1,
  kNoRoom = 2,  // for all of the message at once; nothing has happened
  kRaised = 3   // the taker has refused the message, which has come
};

// A message to one rank: under which name it is counted, and by which method it is sent or received, a number of
// TRANSFERS in user_call.py.
struct ToOne {
  static constexpr int kPlainTensor = -1;  // has no number

  int rank;
  int method;
  Counted counted() const { return counted_as(Counted::kSendMessage, Counted::kSendList, Counted::kSend); }
  Counted received() const { return counted_as(Counted::kReceiveMessage, Counted::kReceiveList, Counted::kReceive); }

 private:
  Counted counted_as(Counted message, Counted list, Counted tensor) const {
    return method == kPlainTensor ? tensor : method < 2 ? list : message;
  }
};

constexpr std::uint64_t kMostListHead = 4096;  // lies in the first chunk of any queue of a group

// Writes the head of a list of tensors of these sizes, as `wire.head_of_list` of parallel_state.messages makes it.
// False for a form that isn't a digest, of 32 hexadecimal digits, and for a head that is longer than kMostListHead.
bool write_list_head(std::string_view form, const std::vector<std::uint64_t>& sizes, std::vector<char>* head);

// A message of these pieces, the first `heads` of which are its head.
Outcome send_message(Served& served, ToOne to, const std::vector<Piece>& pieces, int heads);
// The connections that carry the group's messages; null where rings do, or nothing without Python.
std::shared_ptr<Transfers> connections_of(Served& served, int rank);
// As `send_message`, over connections; `waits` until it is sent, else only starts. Returns what Transfers::start does.
std::int64_t start_message(Served& served, Transfers& transfers, ToOne to, const OutgoingMessage& message,
                           const TransferUser* user, void* self, bool waits);
// Messages to all ranks of a group on several hosts, for a thread that has entered `handle`.
Status broadcast_entered(Handle& handle, Told told, const std::vector<Piece>& pieces, int heads);
Status receive_entered(Handle& handle, Told told, int src, Taker& taker, HostsGroup::Taken* taken);
// As the group's next collective, which all ranks are told of as `told`.
Outcome broadcast_message(Served& served, Told told, const std::vector<Piece>& pieces, int heads);

// The message whose head is the first piece and whose tensors are the others.
Outcome receive_message(Served& served, ToOne from, const std::vector<Piece>& pieces);
Outcome receive_broadcast(Served& served, Told told, int src, const std::vector<Piece>& pieces);

Outcome receive_value(Served& served, ToOne from, Taker& taker);
Outcome receive_value(Transfers& transfers, int src, int tag, double timeout_s, Taker& taker, QueueReport* report);
Outcome receive_broadcast_value(Served& served, Told told, int src, Taker& taker);
// Message `number` of an end, 0 for one to this rank alone. The report tells its size, and of kLeft the reason.
Outcome receive_value(OpenReader& open, std::uint64_t number, double timeout_s, Taker& taker);

// A plain tensor.
struct PlainTensor {
  int dtype;  // by torch's number
  const std::int64_t* sizes;
  std::size_t dims;
  std::uint64_t bytes;  // not 0
  // Where they are, contiguous; asked for once the queue turned out to be free, so that nothing is copied or allocated
  // in vain.
  std::function<void*()> data;
};

// kNoRoom for one that doesn't fit into the ring at once.
Outcome send_tensor(Served& served, int dst, const PlainTensor& x);
Outcome receive_tensor(Served& served, int src, const PlainTensor& out);

}  // namespace parallel_state
