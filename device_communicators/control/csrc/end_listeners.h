// Reports exits of a world's ranks to this process's waits, from the control plane's thread. Holds what this process
// sent last until it has arrived, so that the report of its own exit doesn't overtake it.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace parallel_state::control {

class EndListener {
 public:
  // `died`: false if the rank left. Must not block.
  virtual void on_end(int rank, bool died) noexcept = 0;

 protected:
  ~EndListener() = default;
};

// Thread-safe.
class EndListeners {
 public:
  // Reports all earlier ends, then each later one until `remove` returns.
  void add(EndListener* listener);
  void remove(EndListener* listener);
  void report(int rank, bool died);

  // Keeps a duplicate of `socket` until the peer's kernel has received all bytes that were sent.
  void linger(int socket);
  // Returns when the peers' kernels have received the bytes of all lingering sockets, after `limit_ns`, or at once if a
  // rank died. Closes the sockets.
  void wait_received(std::int64_t limit_ns);
  bool has_any_died();

 private:
  bool are_received();
  bool any_died() const;

  std::mutex mutex_;
  std::vector<int> lingering_;
  std::vector<EndListener*> listeners_;
  std::map<int, bool> ended_;  // true: died
};

}  // namespace parallel_state::control
