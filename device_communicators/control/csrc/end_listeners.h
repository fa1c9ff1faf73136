// Notifies waits of this process when ranks of a world end, from the control plane's thread and without Python.
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

// Any thread may call any function.
class EndListeners {
 public:
  // Notifies the listener of all earlier ends, then of each later one until `remove` returns.
  void add(EndListener* listener);
  void remove(EndListener* listener);
  void report(int rank, bool died);

 private:
  std::mutex mutex_;
  std::vector<EndListener*> listeners_;
  std::map<int, bool> ended_;  // by rank: whether it died
};

}  // namespace parallel_state::control
