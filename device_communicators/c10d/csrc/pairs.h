#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "library.h"
#include "work.h"

namespace parallel_state {

class Pairs : public std::enable_shared_from_this<Pairs> {
 public:
  // Takes the interpreter lock.
  using Raise = std::function<std::exception_ptr(const TransferFailure&)>;
  static constexpr int kAnySource = -1;

  class Transfer final : public Operation {
   public:
    using Operation::Operation;
    std::shared_ptr<Pairs> pairs;
    at::Tensor tensor;  // contiguous; used until the transfer is released
    at::Tensor target;
    int peer = kAnySource;
    int tag = 0;
    bool is_send = false;

   protected:
    bool await(std::optional<Clock::time_point> until) override { return pairs->await(*this, until); }

   private:
    friend class Pairs;
    std::uint64_t number_ = 0;
    std::exception_ptr interruption_;  // raised by a signal handler in its wait; guarded by Pairs::mutex_
  };
  using Held = c10::intrusive_ptr<Transfer>;

  // Owns `transfers`.
  Pairs(std::shared_ptr<const Library> library, void* transfers, Raise raise, std::shared_ptr<const Hooks> hooks,
        std::shared_ptr<CallLog> calls);
  ~Pairs();

  void start(const Held& transfer, std::chrono::milliseconds timeout);
  void close(const std::exception_ptr& error);
  bool drain(Clock::time_point deadline);

 private:
  static const TransferUser kUser;

  bool await(Transfer& transfer, std::optional<Clock::time_point> until);
  int settle(Transfer& transfer, int source, const TransferFailure* failure);
  std::exception_ptr error_of(Transfer& transfer, const TransferFailure& failure);
  std::exception_ptr failure_of_all(const TransferFailure& failure);

  const std::shared_ptr<const Library> library_;
  const Raise raise_;
  const std::shared_ptr<const Hooks> hooks_;
  const std::shared_ptr<CallLog> calls_;
  void* const transfers_;
  std::mutex mutex_;
  std::exception_ptr closed_, failure_;  // guarded by mutex_
};

}  // namespace parallel_state
