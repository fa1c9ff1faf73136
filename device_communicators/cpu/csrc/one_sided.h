// One-sided access between the ranks of a host: each reads and writes the other ranks' memory without their help.
//
// Of a window each rank has two blocks in its arena, which all ranks of the host map: the memory, and a counter per
// peer, the number of signals that the rank sent to it.
//
//   put copies, and fences                          what any rank of the host reads after `put` returned has the bytes
//   signal publishes the next number (release)      a peer whose `wait_signal` took it (acquire) reads what was written
//                                                   before, by this rank or by ranks whose signals it had taken
//
// A wait takes one signal. It ends as all waits do: see wait.h. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "handle.h"
#include "window_part.h"

namespace parallel_state {

class SharedWindow {
 public:
  // The reason why a call did nothing.
  struct Refusal {
    std::string text;  // after kWrongArgument and kUnsupported
    Loss loss;         // after kPeerDied
  };

  // `group`: the number of `handle`. The part's bytes, dtype and shape are set. `data`: a tensor's memory; null for
  // zeros. It is used as it is if it is in this rank's arena, else copied to a new block.
  SharedWindow(std::uint64_t group, std::shared_ptr<Handle> handle, const WindowPart& part, const void* data);
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  const WindowPart& part() const { return parts_[static_cast<std::size_t>(rank_)]; }
  // Maps the parts of the other ranks of this host. `parts`: of all ranks. Call it once, before what follows. Returns
  // kUnsupported, on every rank, if one had no memory for its part.
  Status open(const WindowPart* parts, Refusal* refusal);

  // Ranks are those of the group, and may be this one.
  Status put(int dst, std::int64_t first_element, std::int64_t elements, int dtype, const void* data, Refusal* refusal);
  Status signal(int dst, Refusal* refusal);
  // With a timeout of 0 it only polls.
  Status wait_signal(int src, double timeout_s, Refusal* refusal);
  Status memory_of(int rank, void** found, Refusal* refusal);

  // Refuses later calls, and frees the blocks. Call it once no rank uses the window any more. Without it the blocks
  // stay allocated until the group ends, because a peer may still write to them.
  void end();

 private:
  struct Peer {
    char* memory = nullptr;  // null: this rank doesn't map it
    Counter* to = nullptr;   // signals to the peer
    Counter* from = nullptr;
    std::mutex mutex;  // for `sent`
    std::uint64_t sent = 0;
    std::atomic<std::uint64_t> taken{0};
  };
  class Alive;

  Status check(int rank, const char* call, Refusal* refusal) const;
  Peer& peer(int rank) const { return *peers_[static_cast<std::size_t>(rank)]; }

  const std::uint64_t group_;
  const std::shared_ptr<Handle> handle_;
  const int rank_;
  std::vector<WindowPart> parts_;
  std::vector<std::unique_ptr<Peer>> peers_;
  void* memory_ = nullptr;  // the blocks that it allocated
  void* signals_ = nullptr;
  std::atomic<bool> ended_{false};
};

}  // namespace parallel_state
