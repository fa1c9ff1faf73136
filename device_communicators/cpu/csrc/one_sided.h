// One-sided access: each rank writes the other ranks' memory without their help, and reads that of its host's ranks.
//
// Of a window each rank has two blocks in its arena, which all ranks of the host map: the memory, and a counter per
// peer, the number of signals that the rank sent to it. A rank without arenas, alone on its host, has memory of its
// own.
//
//   put copies, and fences                          what any rank of the host reads after `put` returned has the bytes
//   signal publishes the next number (release)      a peer whose `wait_signal` took it (acquire) reads what was written
//                                                   before, by this rank or by ranks whose signals it had taken
//
// A wait takes one signal. It ends as all waits do: see wait.h. Thread-safe.
//
// Between hosts puts and signals go over the connections of transfers: see streams.h. A put ends once its data may be
// changed. Then the order is that of one connection: a signal tells of the puts to the same rank.
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
  // The reason why a call did nothing.
  struct Refusal {
    std::string text;         // after kWrongArgument and kUnsupported; of a connection's end, after kBroken
    Loss loss;                // after kPeerDied
    TransferFailure failure;  // after kBroken: all transfers between hosts have failed
  };

  // `group`: the number of `handle`. The part's bytes, dtype and shape are set. `data`: a tensor's memory; null for
  // zeros. It is used as it is if it is in this rank's arena, else copied to a new block.
  SharedWindow(std::uint64_t group, std::shared_ptr<Handle> handle, const WindowPart& part, const void* data);
  ~SharedWindow();
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  const WindowPart& part() const { return part_of(rank_); }
  // Maps the parts of the other ranks of this host. `parts`: of all ranks. Call it once, before what follows. Returns
  // kUnsupported, on every rank, if one had no memory for its part.
  Status open(const WindowPart* parts, Refusal* refusal);

  // Ranks are those of the group, and may be this one.
  // `signals`: as `signal` after it, but between hosts in the same message.
  Status put(int dst, std::int64_t first_element, std::int64_t elements, int dtype, const void* data, bool signals,
             Refusal* refusal);
  Status signal(int dst, Refusal* refusal);
  // With a timeout of 0 it only polls.
  Status wait_signal(int src, double timeout_s, Refusal* refusal);
  Status memory_of(int rank, void** found, Refusal* refusal);
  bool maps(int rank) const { return rank >= 0 && rank < handle_->size() && peer(rank).memory != nullptr; }

  // Refuses later calls, awaits what other hosts' ranks have put, and frees the blocks. Call it on all ranks, once none
  // uses the window any more. Without it, or if it fails, the blocks stay allocated until the group ends, because a
  // peer may still write to them.
  Status end(Refusal* refusal);

 private:
  struct Peer {
    char* memory = nullptr;  // null: this rank doesn't map it, and reaches it over a connection if there is one
    Counter* to = nullptr;   // signals to the peer
    Counter* from = nullptr;
    std::mutex mutex;  // for `sent`
    std::uint64_t sent = 0;
    std::atomic<std::uint64_t> taken{0};
  };
  class Alive;

  std::shared_ptr<char> allocate(std::size_t bytes);
  // Whether a call with `rank` may go on. `maps`: it needs the rank's memory.
  Status check(int rank, const char* call, bool maps, Refusal* refusal) const;
  Status lost(int rank, Refusal* refusal) const;
  // Over memory if this rank maps that of `dst`, else over its connection.
  Status write(int dst, std::size_t offset, const void* data, std::size_t bytes, bool signals, const char* call,
               Refusal* refusal);
  // How a transfer with `rank`, -1 for all, ended.
  Status ended(int how, const char* call, int rank, Refusal* refusal) const;
  const WindowPart& part_of(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
  std::uint32_t number_of(int rank) const { return static_cast<std::uint32_t>(part_of(rank).number); }
  Peer& peer(int rank) const { return *peers_[static_cast<std::size_t>(rank)]; }

  const std::uint64_t group_;
  const std::shared_ptr<Handle> handle_;
  const int rank_;
  std::shared_ptr<Streams> streams_;  // null on one host, and if not all ranks are connected
  std::vector<WindowPart> parts_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::shared_ptr<char> memory_, signals_;  // this rank's blocks, each with what keeps it; null without
  bool is_given_ = false;                   // the memory is a tensor's
  std::atomic<bool> ended_{false};
};

}  // namespace parallel_state
