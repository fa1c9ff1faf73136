#pragma once

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

namespace parallel_state {

inline std::string in_words(int error) {
  const bool broken = error == ECONNRESET || error == EPIPE || error == ECONNABORTED || error == ECONNREFUSED;
  return std::string(strerror(error)) + (broken ? " (closed by peer)" : "");
}

inline bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

inline void add_polled(std::vector<pollfd>* polled, int descriptor, bool sends, bool receives) {
  if (!sends && !receives) return;
  polled->push_back({descriptor, static_cast<short>((sends ? POLLOUT : 0) | (receives ? POLLIN : 0)), 0});
}

// `use(index, begin, end)` gets the others' stripes. Returns the bytes of the first connection.
template <typename Use>
std::uint64_t divide(std::uint64_t bytes, std::size_t others, Use use) {
  const std::uint64_t stripe = (bytes + others) / (others + 1);
  std::uint64_t begin = stripe;
  for (std::size_t index = 0; index < others && begin < bytes; ++index, begin += stripe) {
    use(index, begin, std::min(begin + stripe, bytes));
  }
  return stripe;
}

template <typename Owner>
class StripeSends {
 public:
  void add(const char* at, std::uint64_t bytes, Owner owner) { parts_.push_back({at, bytes, std::move(owner)}); }
  void clear() { parts_.clear(); }
  bool is_idle() const { return parts_.empty(); }
  const Owner& owner() const { return parts_.front().owner; }

  template <typename Ended>
  int write(int descriptor, bool* moved, Ended ended) {
    while (!parts_.empty()) {
      Part& first = parts_.front();
      const ssize_t sent = ::send(descriptor, first.at, first.bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) return would_block(errno) ? 0 : errno;
      *moved = true;
      first.at += sent;
      first.bytes -= static_cast<std::uint64_t>(sent);
      if (first.bytes > 0) continue;
      const Owner owner = std::move(first.owner);
      parts_.pop_front();
      ended(owner);
    }
    return 0;
  }

 private:
  struct Part {
    const char* at;
    std::uint64_t bytes;
    Owner owner;
  };
  std::deque<Part> parts_;
};

}  // namespace parallel_state
