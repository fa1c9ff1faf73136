#include "end_listeners.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <linux/sockios.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace parallel_state::control {
namespace {

// Whether the peer's kernel has received all bytes that were sent, or can't receive them any more.
bool is_received(int socket) {
  int unacknowledged = 0;
  if (ioctl(socket, SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0) return true;
  tcp_info info{};
  socklen_t size = sizeof(info);
  // After a reset the count stays as it was.
  return getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_state == TCP_CLOSE;
}

}  // namespace

void EndListeners::add(EndListener* listener) {
  const std::lock_guard<std::mutex> lock(mutex_);
  listeners_.push_back(listener);
  for (const auto& [rank, died] : ended_) listener->on_end(rank, died);
}

void EndListeners::remove(EndListener* listener) {
  const std::lock_guard<std::mutex> lock(mutex_);
  listeners_.erase(std::remove(listeners_.begin(), listeners_.end(), listener), listeners_.end());
}

void EndListeners::report(int rank, bool died) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (EndListener* const listener : listeners_) listener->on_end(rank, died);
  ended_[rank] |= died;
}

void EndListeners::linger(int socket) {
  if (is_received(socket)) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  are_received();
  const int kept = fcntl(socket, F_DUPFD_CLOEXEC, 0);
  if (kept >= 0) lingering_.push_back(kept);  // without a descriptor nothing waits for these bytes
}

void EndListeners::wait_received(std::int64_t limit_ns) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit_ns);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!are_received() && !any_died() && std::chrono::steady_clock::now() < until) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
  for (const int socket : lingering_) close(socket);
  lingering_.clear();
}

bool EndListeners::has_any_died() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return any_died();
}

// By `mutex_`.
bool EndListeners::any_died() const {
  return std::any_of(ended_.begin(), ended_.end(), [](const auto& end) { return end.second; });
}

// Closes the sockets whose bytes have been received. By `mutex_`.
bool EndListeners::are_received() {
  const auto received =
      std::partition(lingering_.begin(), lingering_.end(), [](int each) { return !is_received(each); });
  std::for_each(received, lingering_.end(), close);
  lingering_.erase(received, lingering_.end());
  return lingering_.empty();
}

}  // namespace parallel_state::control
