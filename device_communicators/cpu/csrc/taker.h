// Receives a message of unknown size: the library reads its head, a `Taker` returns the addresses for its tensors, and
// the library reads the tensors to these. The functions that do so, over rings and connections, are in messages.h.
#pragma once

#include <cstdint>
#include <vector>

#include "queue.h"

namespace parallel_state {

// The head of a message that has arrived.
struct Head {
  const char* data;
  std::uint64_t bytes;       // of `data`: all of the head, or the beginning of one that is too long
  std::uint64_t head_bytes;  // of the head
  std::uint64_t tensor_bytes;
  bool is_at_hand;           // whether the tensors can be read without a wait, and are few bytes
  std::vector<Loan>* loans;  // where the tensors are if the sender has lent them; a taker that keeps them clears it
};

// Decides where a message's tensors go, and builds the receiver's object from its head.
class Taker {
 public:
  virtual ~Taker() = default;
  virtual std::uint64_t most_head_bytes() const = 0;  // of a longer head `head_buffer` gets kHeadStart bytes
  virtual bool wants_loans() const = 0;
  virtual char* head_buffer(std::uint64_t bytes) = 0;  // to read the head into
  // Appends the places of the tensors, in order. Returns false if it refuses the message.
  virtual bool take_head(const Head& head, std::vector<Piece>* pieces) = 0;
  // Returns whether a refused message stays for the next receive.
  virtual bool leaves_message() const { return false; }
};
constexpr std::uint64_t kHeadStart = 32;  // the part of a head that has its kind and sizes

}  // namespace parallel_state
