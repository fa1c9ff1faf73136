// Each rank writes the memory of other ranks, and reads that of its host's ranks, without their help. Its arena has two
// blocks per window: the memory, and a counter of signals per peer.
//
// put copies, and fences                          later reads by ranks of the host see the bytes
// signal publishes the next number (release)      a wait that received it (acquire) sees earlier writes of this
// rank, and of ranks whose signals it had received
//
// Thread-safe. Between hosts, a put returns when its data may be changed, and a signal arrives after earlier puts to
// the same rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "handle.h"
#include "streams.h"
#include "window_part.h"

namespace parallel_state {

class SharedWindow {
 public:
  struct Refusal {
    std::string text;
    Loss loss;
    TransferFailure failure;  // after kBroken, which fails all transfers between hosts
  };

  // Null `data`: zeros. A tensor in this rank's arena is used directly; another is copied.
  SharedWindow(std::uint64_t group, std::shared_ptr<Handle> handle, const WindowPart& part, const void* data);
  ~SharedWindow();
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  const WindowPart& part() const { return part_of(rank_); }
  // Call it once, before the following calls. kUnsupported on every rank if one had no memory for its part.
  Status open(const WindowPart* parts, Refusal* refusal);

  // `dst` may be this rank. `signals`: as `signal` after it, but between hosts in the same message.
  Status put(int dst, std::int64_t first_element, std::int64_t elements, int dtype, const void* data, bool signals,
             Refusal* refusal);
  Status signal(int dst, Refusal* refusal);
  Status wait_signal(int src, double timeout_s, Refusal* refusal);
  Status memory_of(int rank, void** found, Refusal* refusal);
  double timeout_s() const { return handle_->timeout_s(); }
  bool maps(int rank) const { return rank >= 0 && rank < handle_->size() && peer(rank).memory != nullptr; }

  // Collective: waits for the puts of other hosts, and frees the blocks. Otherwise these stay until the group ends,
  // because a peer may still write to them.
  Status end(Refusal* refusal);

 private:
  struct Peer {
    char* memory = nullptr;
    Counter* to = nullptr;
    Counter* from = nullptr;
    std::mutex mutex;
    std::uint64_t sent = 0;
    std::atomic<std::uint64_t> taken{0};
  };

  std::shared_ptr<char> allocate(std::size_t bytes);
  Status check(int rank, const char* call, bool maps, Refusal* refusal) const;
  Status lost(int rank, Refusal* refusal) const;
  Status write(int dst, std::size_t offset, const void* data, std::size_t bytes, bool signals, const char* call,
               Refusal* refusal);
  Status ended(int how, const char* call, int rank, Refusal* refusal) const;
  const WindowPart& part_of(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
  std::uint32_t number_of(int rank) const { return static_cast<std::uint32_t>(part_of(rank).number); }
  Peer& peer(int rank) const { return *peers_[static_cast<std::size_t>(rank)]; }

  const std::uint64_t group_;
  const std::shared_ptr<Handle> handle_;
  const int rank_;
  std::shared_ptr<Streams> streams_;  // null on one host, or if not all ranks are connected
  std::vector<WindowPart> parts_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::shared_ptr<char> memory_, signals_;
  bool is_given_ = false;
  std::atomic<bool> ended_{false};
};

// The thread has the interpreter lock. Returns a Python int: the Status.
void* put_from_python(void* window, int dst, std::int64_t first_element, std::int64_t elements, int dtype,
                      const void* data, bool signals);

}  // namespace parallel_state
