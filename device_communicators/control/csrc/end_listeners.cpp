#include "end_listeners.h"

#include <algorithm>

namespace parallel_state::control {

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

}  // namespace parallel_state::control
