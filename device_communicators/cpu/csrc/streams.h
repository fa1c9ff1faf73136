// Sends and receives between hosts, over TCP connections: of plain tensors, and of objects and tensor dicts. Each
// direction keeps the send order.
//
// A message is a frame of fixed size and a body. A send writes at once as much as the kernel accepts, and the thread
// that waits for a message reads it to where it belongs.
//
// The body of an object or dict is its head and its tensors. The receiver doesn't know their size: it reads the head,
// and nothing more from this rank until the receive's `Taker` has said where the tensors go.
//
// A body that arrives before its receive is stored in memory of its own. A sender may have only a limited number of
// bytes there; the receiver chose that number when they connected. A message over this limit is *announced*: its
// frame is sent, and its body once the receiver has asked for it (a rendezvous, in MPI's terms). Each frame also says
// how many bytes its sender has received so far, so the limit needs no messages of its own.
//
// If the receiver stopped reading instead, the kernel would keep the rest, but then a receive of a later message on the
// same connection could never finish. An announcement is short and is always read, so no limit causes a deadlock.
//
// The receiver of a tensor of more than kAnsweredBytes, or of a message that was announced, answers with the form of
// its receive. Its sender is done once the answer is there, so that it fails, too, if the two differ; the sender of a
// smaller one once the kernel has it.
//
// Windows are memory of this rank that ranks of other hosts write to. A put is a frame and its body. Its frame also has
// the number of signals that follow the body; a signal alone is a frame without a body. The thread that reads the
// connection writes the body to its place, then counts the signals. So a rank that has taken a signal sees what its
// sender put to this rank before. While a window is open, the progress thread reads all connections. A put outside of
// an open window is refused, and fails the group.
//
// Descriptors are the caller's, who closes them after `close`. No thread holds the lock while it sleeps.
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

  // Bodies from `striped_bytes` on are striped, where there is more than one connection.
  // `granted_bytes`: what each other rank may send before it is received.
  Streams(std::shared_ptr<const Losses> losses, int rank, int size, std::uint64_t granted_bytes, std::int64_t spin_ns,
          std::uint64_t striped_bytes);
  ~Streams() override;
  // Adds a connection to a rank, whose place among those is the same on the other side. Before any transfer.
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

  // Opens a window of memory that is kept until it is closed; returns its number, which the other ranks need.
  std::uint32_t open_window(std::shared_ptr<char> memory, std::uint64_t bytes);
  void close_window(std::uint32_t number);
  // Each of these waits, and returns how its wait ended. That of `put` ends once the kernel has the bytes. `signals`: a
  // signal follows them.
  int put(int dst, std::uint32_t window, std::uint64_t offset, const void* data, std::uint64_t bytes, bool signals,
          double timeout_s);
  // A signal of `src`. At its timeout nothing fails; at 0 it only looks.
  int take_signal(int src, std::uint32_t window, double timeout_s);
  // Until the ranks, by whose numbers of it the window is named, have called this, too, and all has come that they put
  // before. 0: a rank without a connection.
  int await_puts(std::uint32_t own, const std::vector<std::uint32_t>& windows, double timeout_s);

  // For tests: bytes kept for receives to come, bytes sent at once, bytes received of these, bytes taken.
  void facts(int rank, std::uint64_t* out);

 protected:
  void begin(const Held& transfer, const Early& early) override;
  bool move_all() override;
  Moved move_for(Transfer* transfer, std::int64_t until_ns) override;
  bool read_last(const Transfer& transfer, int from, int end) override;
  void stop() override;
  bool leave() override;
  void sleep_on(Sleep* sleep) override;
  void go_on(const Held& receive, const std::vector<Piece>& pieces, Done* done) override;
  bool has_unsent() override { return has_unsent_ && !has_failed(); }

 private:
  class Stream;
  struct Signals {  // of one rank
    std::uint64_t come = 0;
    std::deque<Held> awaited;
  };
  struct Window {
    std::shared_ptr<char> memory;
    std::uint64_t bytes;
    std::vector<Signals> signals;  // by rank
  };
  struct Frame {
    char magic[4];
    std::uint32_t tag;
    std::int32_t dtype;
    std::uint32_t signals;     // of a put: they follow its body
    std::uint64_t received;    // bytes that the sender of this frame has received so far
    std::uint64_t bytes;       // of the body; of an answer: of the receive
    std::uint64_t head_bytes;  // of these, the head of an object or dict; of a put, its offset
  };
  static_assert(sizeof(Frame) == 40);

  // A further connection to the same rank, for a stripe of each large body: their bytes alone, in the order of the
  // bodies.
  struct Stripe {
    int descriptor;
    StripeSends<Held> sends = {};
    Pieces missing = {};  // of the body that is read
  };

  Outcome run(const TransferCall& call, double timeout_s);
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
  const int wake_;                                  // an eventfd for the thread that polls; -1 without a descriptor
  std::atomic<bool> polls_{false}, sleeps_{false};  // a thread moves all connections; it is in `poll`
  std::vector<pollfd> polled_;                      // of that thread
  std::atomic<std::int64_t> noticed_ns_{0};         // when a loss was seen first
  std::atomic<bool> has_unsent_{false};             // answers that had no room
  std::mutex streams_mutex_;                        // taken before mutex_
  bool fails_ = false;  // a failure was noted, and no stream may be read further. By streams_mutex_
  std::vector<std::unique_ptr<Stream>> streams_;  // by rank; null without a connection. By streams_mutex_
  std::map<std::uint32_t, Window> windows_;       // this and the next: by streams_mutex_
  std::uint32_t last_window_ = 0;
  std::atomic<bool> has_windows_{false};
};

}  // namespace parallel_state
