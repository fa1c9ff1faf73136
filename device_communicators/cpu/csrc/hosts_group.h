// The collectives of a group over several hosts: shared memory within a host, connections between hosts.
//
// The lowest rank of each host is its lead, which sends small data. If all hosts have equally many ranks, large data
// uses *lanes*: rank i of each host exchanges its share with rank i of the others. Blocks from rank to rank are one
// message each. A large broadcast uses a tree of hosts.
//
// Reductions combine the ranks of a host in order, then the hosts in order, so all ranks have the same bits. Sums and
// products of 16-bit floats are sent as float32 (bfloat16 if the group is `rounded`) and rounded once. Ranks that only
// send find a mismatch at their next message. While a rank waits, all messages of its call move.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "connections.h"
#include "host_group.h"
#include "taker.h"

namespace parallel_state {

class HostsGroup final : public Group {
 public:
  // If not `meshed`, only leads are connected, and calls that need more return kUnsupported. `local` and `liveness`
  // must outlive this.
  HostsGroup(HostGroup& local, GroupLiveness& liveness, int rank, std::vector<int> host_of_rank,
             std::unique_ptr<Connections> connections, bool meshed, bool rounded, WaitPolicy policy);
  ~HostsGroup() override;

  void listen_to(std::shared_ptr<control::EndListeners> source, std::vector<int> ranks);
  void stop_listening();
  bool has_left(int rank) const;
  bool has_died(int rank) const { return end_of(rank) == kDied; }
  Loss loss(int rank) const;

  int local_size() const { return static_cast<int>(ranks_[static_cast<std::size_t>(host_)].size()); }
  const std::vector<int>& local_ranks() const { return ranks_[static_cast<std::size_t>(host_)]; }
  bool is_here(int rank) const { return host_of_rank_[static_cast<std::size_t>(rank)] == host_; }
  int place_of(int rank) const;  // -1: on another host
  Connections& connections() { return *connections_; }

  Status barrier(double timeout_s) override;
  Status all_reduce(void* out, const void* in, std::size_t count, Dtype dtype, ReduceOp op, double timeout_s) override;
  Status reduce_scatter(void* out, const void* in, std::size_t outer, std::size_t inner, Dtype dtype, ReduceOp op,
                        double timeout_s) override;
  Status all_gather(void* out, const void* in, std::size_t outer, std::size_t inner_bytes, double timeout_s) override;
  Status gatherv(void* const* outs, const std::size_t* bytes, const void* in, int dst, double timeout_s) override;
  Status broadcast(void* data, std::size_t bytes, int src, double timeout_s) override;
  Status scatter(void* out, const void* in, std::size_t bytes, int src, double timeout_s) override;
  Status all_to_all(void* out, const void* in, const std::size_t* out_bytes, const std::size_t* in_bytes,
                    double timeout_s) override;
  Status all_reduce_add_rms_norm(const AddRmsNorm& norm, double timeout_s) override;
  static constexpr std::uint64_t kPackedBytes = 64 << 10;  // small tensors are sent with the head
  Status send_message(const std::vector<Piece>& pieces, int heads, double timeout_s);
  struct Taken {
    std::uint64_t head_bytes = 0, tensor_bytes = 0;
    bool is_refused = false;
  };
  // kFailed: the taker refused a message whose tensors haven't arrived.
  Status receive_message(int src, Taker& taker, Taken* taken, double timeout_s);
  Status compare(double timeout_s) override;
  void give_up(Status status) override;
  void fail(Status status, int suspect);
  Status blame_dead();

 private:
  static constexpr int kTurns = 4;
  enum End : std::uint8_t { kAlive, kLeft, kDied };

  struct Reduction {
    Dtype dtype;
    ReduceOp op, part_op;
    bool widens;
    bool is_rounded;  // in two rounds
    std::size_t width, wide_width;
  };

  // Reused: fresh pages cost more than the calls.
  class Scratch {
   public:
    char* take(std::size_t bytes);

   private:
    std::unique_ptr<char[]> memory_;
    std::size_t bytes_ = 0;
  };

  std::uint8_t end_of(int rank) const {
    return (*ended_)[static_cast<std::size_t>(rank)].load(std::memory_order_acquire);
  }
  int at(int host) const { return ranks_[static_cast<std::size_t>(host)][0]; }
  const std::vector<int>& ranks_of(int host) const { return ranks_[static_cast<std::size_t>(host)]; }
  bool is_lead() const { return place_ == 0; }
  bool is_alone() const { return local_size() == 1; }
  Link& link(int rank) { return (*connections_)[rank]; }
  template <typename Function>
  void for_other_hosts(Function function) const {
    for (int host = 0; host < hosts_; ++host) {
      if (host != host_) function(host);
    }
  }
  template <typename Function>
  void for_remote_ranks(Function function) const {
    for (int rank = 0; rank < size_; ++rank) {
      if (!is_here(rank)) function(rank);
    }
  }

  void begin(Kind kind, std::uint64_t size, Method method, double timeout_s, std::uint64_t digest = 0,
             int reduction = -1, int root = -1);
  double left_s();
  void send(int rank, const void* body, std::uint64_t bytes) { link(rank).send(record_, body, bytes); }
  void expect(int rank, void* at, std::uint64_t bytes) { link(rank).in.expect(static_cast<char*>(at), bytes); }
  template <typename Done>
  Status wait(const Done& done) {
    return wait_until([](const void* is_done) { return (*static_cast<const Done*>(is_done))(); }, &done);
  }
  Status wait_until(bool (*is_done)(const void*), const void* what);
  Status wait_from(const std::vector<int>& ranks, std::uint32_t messages);
  Status wait_sent(const std::vector<int>& ranks, std::uint32_t messages);
  Status finish();
  void copy_meanwhile(void* out, const void* in, std::size_t bytes);
  Status ends(std::int64_t now);
  Status blame(Link& link);
  bool is_sound(const FailureNote& why) const;
  Status at_home_ended();
  Status take_failure(int reporter, int suspect, Status status);
  bool dies_soon(int rank) const;
  void learn_end(int rank);
  Status blame_broken(Link& link);
  Status pass();
  void show_difference(const CallRecord& other);
  Status at_home(Status status);

  Reduction reduction_of(Dtype dtype, ReduceOp op) const;
  bool in_one_round(const Reduction& how, std::size_t count) const;
  bool is_wide(const Reduction& how, int host, bool one_round) const;
  std::size_t travelling_width(const Reduction& how, int host, bool one_round) const {
    return is_wide(how, host, one_round) ? how.wide_width : how.width;
  }
  const void* as_it_travels(const Reduction& how, const char* part, std::size_t start, std::size_t count,
                            bool one_round, char* rounded);
  void combine(const Reduction& how, void* out, std::size_t count);
  Status reduce_all(char* out, const char* in, std::size_t count, const Reduction& how);
  Status gather_by_lanes(char* blocks, const char* in, std::size_t bytes);
  Status gather_by_leads(char* blocks, const char* in, std::size_t bytes);
  Status gather_all(void* const* outs, const std::size_t* bytes, const void* in);
  Status share_at_home(const std::vector<int>& ranks, void* const* outs, const std::size_t* bytes, const void* in);
  Status exchange_at_home(char* out, const char* in, const std::size_t* out_bytes, const std::size_t* in_bytes);
  void put_in_place(char* out, const char* blocks, std::size_t outer, std::size_t inner_bytes) const;
  void cut(char* data, std::uint64_t bytes);
  Status send_to_all(std::uint64_t bytes, int src);
  Status send_tensors(const Piece* tensors, std::size_t count, std::uint64_t bytes, int src);
  void forget_message();
  Status share_message(std::uint64_t bytes, int src, std::uint64_t most_bytes);
  void find_tree(int root, int* parent, std::vector<int>* children) const;

  HostGroup& local_;
  GroupLiveness& liveness_;
  const std::vector<int> host_of_rank_;
  std::vector<std::vector<int>> ranks_;  // by host, sorted by leads
  std::vector<int> order_;
  int hosts_ = 0, host_ = 0, place_ = 0;
  bool is_in_order_ = false;
  bool has_lanes_ = false;
  bool has_subtrees_ = false;  // the tree over the hosts' trees is the one over the ranks
  const std::unique_ptr<Connections> connections_;
  const bool meshed_, rounded_;
  WaitPolicy policy_;
  std::vector<int> peers_;
  std::vector<int> children_;

  std::unique_ptr<std::vector<std::atomic<std::uint8_t>>> ended_;
  std::atomic<bool> any_died_{false};
  std::unique_ptr<EndWatch> listener_;

  std::int64_t deadline_ns_ = 0, waits_until_ns_ = 0;
  std::int64_t noticed_ns_ = 0;

  std::vector<Scratch> parts_, received_, rounded_parts_, padded_;
  Scratch blocks_, totals_;
  std::vector<char> message_;
  std::vector<Piece> chunks_;
  bool was_left_ = false;
  std::vector<const void*> sources_;
  std::vector<bool> wide_;
  std::vector<int> pending_;
  std::vector<bool> is_table_;
  bool is_strange_ = false;
  std::vector<std::uint32_t> part_numbers_, result_numbers_, sent_numbers_;
};

}  // namespace parallel_state
