// Passes ends of a world's ranks to waits of this process, from the control plane's thread and without Python.
#pragma once

#include <map>
#include <mutex>
#include <vector>

namespace parallel_state::control {

class EndListener {
 public:
  // `died` is false if the rank left. Must not block: the control plane's thread calls it.
  virtual void on_end(int rank, bool died) noexcept = 0;

 protected:
  ~EndListener() = default;
};

// All functions may be called by any thread.
class EndListeners {
 public:
  // Passes all earlier ends to the listener, and each later one until `remove` returns.
  void add(EndListener* listener);
  void remove(EndListener* listener);
  void report(int rank, bool died);

 private:
  std::mutex mutex_;
  std::vector<EndListener*> listeners_;
  std::map<int, bool> ended_;  // by rank: whether it died
};

}  // namespace parallel_state::control
