// How a message becomes something of the receiver's: its head is read, a `Taker` says where the tensors go, and they
// are read to there. What carries it, rings or connections, is in messages.h.
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

// Makes something of a message.
class Taker {
 public:
  virtual ~Taker() = default;
  virtual std::uint64_t most_head_bytes() const = 0;  // of a longer head `head_buffer` gets kHeadStart bytes
  virtual bool wants_loans() const = 0;
  virtual char* head_buffer(std::uint64_t bytes) = 0;  // to read the head into
  // Says where the tensors go, one after the other. False where the message is refused.
  virtual bool take_head(const Head& head, std::vector<Piece>* pieces) = 0;
  // Whether the refused message stays for the next receive.
  virtual bool leaves_message() const { return false; }
};
constexpr std::uint64_t kHeadStart = 32;  // tells what a head is

}  // namespace parallel_state
