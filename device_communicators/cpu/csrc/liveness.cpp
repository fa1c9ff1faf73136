#include "liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "forks.h"

namespace parallel_state {
namespace {

struct Pidfds {
  std::mutex mutex;
  std::unordered_map<std::int64_t, std::weak_ptr<const Pidfd>> by_pid;
};

std::atomic<Pidfds*>& current_pidfds();

// A thread of the parent may have held the lock: a forked child begins with none, and lets go of none.
void forget_pidfds() { current_pidfds().store(new Pidfds, std::memory_order_relaxed); }

std::atomic<Pidfds*>& current_pidfds() {
  static std::atomic<Pidfds*> current{(in_forked_children(forget_pidfds), new Pidfds)};
  return current;
}

std::shared_ptr<const Pidfd> pidfd_of(std::int64_t pid) {
  Pidfds& known = *current_pidfds().load(std::memory_order_relaxed);
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::weak_ptr<const Pidfd>& place = known.by_pid[pid];
  std::shared_ptr<const Pidfd> found = place.lock();
  if (found == nullptr || !found->is_alive()) place = found = std::make_shared<const Pidfd>(pid);  // pids come again
  return found;
}

// Returns true if the process of this /proc/PID/stat has ended: it no longer exists, or is a zombie without other
// threads.
bool has_ended_by(int stat) {
  char text[1024];
  const ssize_t size = pread(stat, text, sizeof(text) - 1, 0);
  if (size < 0) return errno == ESRCH;
  text[size] = 0;
  const char* at = std::strrchr(text, ')');  // the name before it may hold anything
  if (at == nullptr || at[1] != ' ' || std::strchr("ZXx", at[2]) == nullptr) return false;
  for (int field = 0; field < 18 && at != nullptr; ++field) at = std::strchr(at + 1, ' ');  // to the number of threads
  return at != nullptr && std::atoi(at) <= 1;
}

}  // namespace

Pidfd::Pidfd(std::int64_t pid)
    : descriptor_(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0))),
      stat_(descriptor_ >= 0 ? -1 : open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC)) {}

Pidfd::~Pidfd() {
  if (descriptor_ >= 0) close(descriptor_);
  if (stat_ >= 0) close(stat_);
}

bool Pidfd::has_ended() const {
  if (descriptor_ < 0) return stat_ >= 0 && has_ended_by(stat_);
  pollfd poll_one{descriptor_, POLLIN, 0};
  return poll(&poll_one, 1, 0) > 0;
}

ProcessLiveness::ProcessLiveness(const std::int64_t* pids, int count, Member* members, int me)
    : members_(members), me_(me) {
  for (int rank = 0; rank < count; ++rank) {
    // A pid of another namespace can't be watched: others hear of its end, and note it here.
    pidfds_.push_back(pids[rank] > 0 && rank != me ? pidfd_of(pids[rank]) : nullptr);
  }
}

bool ProcessLiveness::has_ended(int rank) const {
  if ((ended_.load(std::memory_order_acquire) >> rank & 1) != 0) return true;
  return pidfds_[rank] != nullptr && pidfds_[rank]->has_ended();
}

Loss ProcessLiveness::loss(int awaited) const {
  if (has_ended(awaited) && !has_left(awaited)) return {awaited, -1, 0};
  for (int rank = 0; rank < static_cast<int>(pidfds_.size()); ++rank) {
    if (rank != me_ && has_ended(rank) && !has_left(rank)) return {rank, -1, 0};
  }
  if (is_doomed()) return {kOutside, -1, 0};
  for (int rank = 0; members_ != nullptr && rank < static_cast<int>(pidfds_.size()); ++rank) {
    const std::uint32_t failed = members_[rank].failed.load(std::memory_order_acquire);
    if (rank != me_ && failed != 0)
      return {static_cast<int>(failed & 0xffffU) - 1, rank, static_cast<int>(failed >> 16)};
  }
  return {has_left(awaited) || has_ended(awaited) ? awaited : -1, -1, 0};
}

void ProcessLiveness::leave() {
  // Release: who sees it sees all that this rank published before.
  if (members_ != nullptr) members_[me_].has_left.store(1, std::memory_order_release);
}

void ProcessLiveness::fail(int status, int suspect) {
  const auto told = static_cast<std::uint32_t>((status << 16) | (suspect + 1));
  if (members_ != nullptr) members_[me_].failed.store(told, std::memory_order_release);
}

bool ProcessLiveness::has_left(int rank) const {
  return members_ != nullptr && members_[rank].has_left.load(std::memory_order_acquire) != 0;
}

}  // namespace parallel_state
