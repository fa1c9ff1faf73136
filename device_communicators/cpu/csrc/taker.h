// Receives a message of unknown size: a `Taker` gets its head and returns the addresses for its tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "queue.h"

namespace parallel_state {

struct Head {
  const char* data;
  std::uint64_t bytes;  // of `data`: the whole head, or the start of a head that is too long
  std::uint64_t head_bytes;
  std::uint64_t tensor_bytes;
  bool is_at_hand;           // the tensors are small and can be read without a wait
  std::vector<Loan>* loans;  // addresses of lent tensors; a taker that keeps them clears it
};

class Taker {
 public:
  virtual ~Taker() = default;
  virtual std::uint64_t most_head_bytes() const = 0;  // `head_buffer` gets only kHeadStart bytes of a longer head
  virtual bool wants_loans() const = 0;
  virtual char* head_buffer(std::uint64_t bytes) = 0;
  // Appends the addresses of the tensors, in order. Returns false to refuse the message.
  virtual bool take_head(const Head& head, std::vector<Piece>* pieces) = 0;
  // Returns true if a refused message stays for the next receive.
  virtual bool leaves_message() const { return false; }
};
constexpr std::uint64_t kHeadStart = 32;  // has the kind and sizes

}  // namespace parallel_state
