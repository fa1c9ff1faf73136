// Transfers between hosts over TCP connections: a frame and a body each, in the order of the sends.
//
// The receiver of an object or dict reads its head, and nothing more from this rank until its `Taker` has returned the
// addresses for the tensors.
//
// The receiver limits the bytes per sender that arrive before their receives. A message over this limit is *announced*:
// its body is sent after the receiver asked for it. Announcements are always read, so no limit causes a deadlock.
//
// The receiver of an announced message, or of a tensor of more than kAnsweredBytes, answers with the form of its
// receive. The sender waits for that, so it fails too if the forms differ. A smaller message is done when the kernel
// has the bytes.
//
// Windows are memory that ranks of other hosts write to. The reading thread writes a put's body to its place, then
// counts its signals: a rank that has taken a signal sees its sender's earlier puts. While a window is open, the
// progress thread reads all connections. A put outside of an open window fails the group.
//
// `close` sends a last frame to each peer, unless the group has failed or data is unsent. A transfer that needs the
// closed rank then fails with kPeerDied; after a connection that ends without this frame it fails with kBroken.
//
// The caller owns the descriptors, and closes them after `close`. No thread holds the lock while it sleeps.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pieces.h"
#include "sockets.h"
#include "transfers.h"

namespace parallel_state {

class Streams final : public Transfers {
 public:
  static constexpr std::uint64_t kAnsweredBytes = 64 << 10;

  // `granted_bytes`: limit of bytes that each rank may send before their receive.
  Streams(std::shared_ptr<const Losses> losses, int rank, int size, std::uint64_t granted_bytes, std::int64_t spin_ns,
          std::uint64_t striped_bytes);
  ~Streams() override;
  // Connections of one pair in the same order on both sides, before any transfer.
  void add(int rank, int descriptor, std::uint64_t early_bytes);

  bool has_left() override;
  Outcome send_now(int dst, int dtype, std::uint64_t bytes, double timeout_s,
                   const std::function<void*()>& data) override;
  Outcome receive_now(int src, int dtype, std::uint64_t bytes, double timeout_s, const std::function<void()>& begins,
                      const std::function<void*()>& data) override;
  bool is_inside(int, bool) const override { return in_handler(); }
  bool end_together() const override { return true; }
  bool carries_messages() const override { return true; }
  bool is_polled() const override { return true; }

  // Keeps the memory until `close_window`. The other ranks need the number.
  std::uint32_t open_window(std::shared_ptr<char> memory, std::uint64_t bytes);
  void close_window(std::uint32_t number);
  // Returns how the wait ended, as do the following. `put` ends once the kernel has the bytes.
  int put(int dst, std::uint32_t window, std::uint64_t offset, const void* data, std::uint64_t bytes, bool signals,
          double timeout_s);
  // At its timeout nothing fails; at 0 it only polls.
  int take_signal(int src, std::uint32_t window, double timeout_s);
  // Collective. When it returns, all earlier puts have arrived. `windows`: the number of each rank's window, or 0 for a
  // rank without a connection.
  int await_puts(std::uint32_t own, const std::vector<std::uint32_t>& windows, double timeout_s);

  // For tests: bytes kept for later receives, bytes sent at once, received of these, and taken.
  void facts(int rank, std::uint64_t* out);

 protected:
  void begin(const Held& transfer, const Early& early) override;
  bool move_all() override;
  Moved move_for(Transfer* transfer, std::int64_t until_ns) override;
  bool read_last(const Transfer& transfer, int from, int end) override;
  void stop(bool leaves) override;
  bool leave() override;
  void sleep_on(Sleep* sleep) override;
  void go_on(const Held& receive, const std::vector<Piece>& pieces, Done* done) override;
  bool has_unsent() override { return has_unsent_ && !has_failed(); }

 private:
  class Stream;
  struct Signals {
    std::uint64_t come = 0;
    std::deque<Held> awaited;
  };
  struct Window {
    std::shared_ptr<char> memory;
    std::uint64_t bytes;
    std::vector<Signals> signals;
  };
  struct Frame {
    char magic[4];
    std::uint32_t tag;
    std::int32_t dtype;
    std::uint32_t signals;
    std::uint64_t received;
    std::uint64_t bytes;       // of the body; in an answer: of the receive
    std::uint64_t head_bytes;  // of `bytes`; in a put: its offset
  };
  static_assert(sizeof(Frame) == 40);

  // An additional connection to a rank: only stripes of large bodies, in their order.
  struct Stripe {
    int descriptor;
    StripeSends<Held> sends = {};
    Pieces missing = {};
  };

  int carry(const TransferCall& call, double timeout_s);
  void match_signals(Window& window, int src, Done* done);
  bool step(Done* done);
  bool sleep(std::int64_t until_ns);
  void wake();
  void note_broken(Done* done);
  void note_unsent();

  const std::uint64_t granted_bytes_;
  const std::int64_t spin_ns_;
  const std::uint64_t striped_bytes_;
  const int wake_;                                  // an eventfd; -1: none
  std::atomic<bool> polls_{false}, sleeps_{false};  // a thread moves all connections; it is in `poll`
  std::vector<pollfd> polled_;
  std::atomic<std::int64_t> noticed_ns_{0};
  std::atomic<bool> has_unsent_{false};           // answers without room in the kernel's buffer
  std::mutex streams_mutex_;                      // taken before mutex_
  bool fails_ = false;                            // no stream may be read. Guarded by streams_mutex_
  std::vector<std::unique_ptr<Stream>> streams_;  // by rank; guarded by streams_mutex_
  std::map<std::uint32_t, Window> windows_;       // this and the next: guarded by streams_mutex_
  std::uint32_t last_window_ = 0;
  std::atomic<bool> has_windows_{false};
};

}  // namespace parallel_state
