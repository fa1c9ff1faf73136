#pragma once

#include <cstdint>
#include <vector>

#include "queue.h"

namespace parallel_state {

struct Head {
  const char* data;
  std::uint64_t bytes;  // may be the start of a head that is too long
  std::uint64_t head_bytes;
  std::uint64_t tensor_bytes;
  bool is_at_hand;
  std::vector<Loan>* loans;  // a taker that keeps loans clears it
};

class Taker {
 public:
  virtual ~Taker() = default;
  virtual std::uint64_t most_head_bytes() const = 0;  // `head_buffer` gets only kHeadStart bytes of a longer head
  virtual bool wants_loans() const = 0;
  virtual char* head_buffer(std::uint64_t bytes) = 0;
  // False refuses the message.
  virtual bool take_head(const Head& head, std::vector<Piece>* pieces) = 0;
  // A refused message then stays for the next receive.
  virtual bool leaves_message() const { return false; }
};
constexpr std::uint64_t kHeadStart = 32;  // has the kind and sizes

}  // namespace parallel_state
