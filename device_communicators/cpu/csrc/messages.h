// Messages between the ranks of a host: objects with their tensors, lists of tensors whose head the receiver knows
// beforehand, and plain tensors. See open_queue.h, and transfers.h.
//
// A message is taken in by these steps, whatever it is: its head is read, a `Taker` says where the tensors go, and they
// are read to there. Who asks by a group's name has the message recorded and counted here, else by the caller.
//
// Any thread may call. The pieces are the caller's.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "handle.h"
#include "queue.h"

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
// As the group's next collective, which all ranks are told of as `told`.
Outcome broadcast_message(Served& served, Told told, const std::vector<Piece>& pieces, int heads);

// The message whose head is the first piece and whose tensors are the others.
Outcome receive_message(Served& served, ToOne from, const std::vector<Piece>& pieces);
Outcome receive_broadcast(Served& served, Told told, int src, const std::vector<Piece>& pieces);

// The head of a message that has come.
struct Head {
  const char* data;
  std::uint64_t bytes;       // of `data`: all of the head, or the beginning of one that is too long
  std::uint64_t head_bytes;  // of the head
  std::uint64_t tensor_bytes;
  bool is_at_hand;           // whether the tensors can be read without a wait, and are few bytes
  std::vector<Loan>* loans;  // where the tensors are if the sender has lent them; a taker that keeps them clears it
};

// Makes something of a message.
class Taker {
 public:
  virtual ~Taker() = default;
  virtual std::uint64_t most_head_bytes() const = 0;  // of a longer head `head_buffer` gets kHeadStart bytes
  virtual bool wants_loans() const = 0;
  virtual char* head_buffer(std::uint64_t bytes) = 0;  // to read the head into
  // Says where the tensors go, one after the other. False where the message is refused.
  virtual bool take_head(const Head& head, std::vector<Piece>* pieces) = 0;
};
constexpr std::uint64_t kHeadStart = 32;  // tells what a head is

Outcome receive_value(Served& served, ToOne from, Taker& taker);
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
