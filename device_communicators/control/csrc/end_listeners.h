#pragma once

#include <map>
#include <mutex>
#include <vector>

namespace parallel_state::control {

class EndListener {
 public:
  // Must not block.
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

 private:
  std::mutex mutex_;
  std::vector<EndListener*> listeners_;
  std::map<int, bool> ended_;  // true: died
};

}  // namespace parallel_state::control
