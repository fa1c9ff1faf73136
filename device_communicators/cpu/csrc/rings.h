// A ring of chunks from each rank to each other. A send is done once its ring holds the whole message. An unwanted
// message is copied out when a later one is wanted.
#pragma once

#include <pthread.h>

#include "open_queue.h"
#include "transfers.h"
#include "windows.h"

namespace parallel_state {

// As `open_transfers` of cpu/channels.py.
struct TransferPlaces {
  char* control;
  Windows* windows;
  std::int64_t descriptor;
  std::uint64_t data_offset;
  std::uint64_t chunk_bytes;
  std::uint64_t chunks;
  std::int64_t kinds;  // the first queue between two ranks is for tensors
  std::int64_t spin_ns;
  std::int64_t yields;
};

class Rings final : public Transfers {
 public:
  Rings(std::shared_ptr<const Losses> losses, int rank, int size, const TransferPlaces& places);

  Outcome send_now(int dst, int dtype, std::uint64_t bytes, double timeout_s,
                   const std::function<void*()>& data) override;
  Outcome receive_now(int src, int dtype, std::uint64_t bytes, double timeout_s, const std::function<void()>& begins,
                      const std::function<void*()>& data) override;
  bool is_inside(int peer, bool sends) const override;
  bool is_polled() const override { return false; }

 protected:
  void begin(const Held& transfer, const Early& early) override;
  bool move_all() override;
  Moved move_for(Transfer* transfer, std::int64_t until_ns) override;
  bool read_last(const Transfer& transfer, int from, int end) override;
  bool leave() override;
  void sleep_on(Sleep* sleep) override;
  void end_sleep() override;

 private:
  struct End {
    Turn turn;
    std::atomic<pthread_t> holder{};
    std::atomic<RingEnd*> ring{nullptr};
    std::atomic<bool> is_broken{false};  // announced after the turn
  };
  struct Outgoing : End {
    std::unique_ptr<QueueWriter> writer;  // used in the turn, as the next
    Held current;
  };
  struct Incoming : End {
    std::unique_ptr<QueueReader> reader;  // from here on used in the turn
    std::atomic<bool> is_reading{false};
    Form form;
    Held current;  // null: the message is `early`
    Early early;
  };
  class Inside;

  Moved push(int peer, double timeout_s, Transfer* goal = nullptr);
  Moved pull(int peer, double timeout_s, Transfer* goal = nullptr);
  Moved push_in_turn(Outgoing& out, int peer, double timeout_s, Transfer* goal, Done* done);
  Moved pull_in_turn(Incoming& in, int peer, double timeout_s, Transfer* goal, Done* done);
  void sleep_on(End& end, bool is_wanted, Sleep* sleep);
  bool push_all();
  bool pull_all();
  char* open(int src, int dst, bool writes, char** control);
  template <typename Ring>
  bool open_ring(std::unique_ptr<Ring>& opened, End& end, int src, int dst, Done* done);
  template <typename Move>
  Moved in_turn(End& end, Move move);
  bool begin_message(Incoming& in, int peer, Done* done);
  void note_failure(QueueStatus status, bool sends, int peer, const RingEnd* end, const Held& first, Done* done);

  const TransferPlaces places_;
  WaitPolicy policy_;
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  std::vector<std::unique_ptr<Incoming>> incoming_;
  std::vector<Counter*> slept_on_;
};

}  // namespace parallel_state
