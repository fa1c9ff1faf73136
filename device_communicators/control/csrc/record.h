// Records the events of a core for replay.
//
// A record contains tokens: write it with mode 0600.
#pragma once

#include <deque>
#include <functional>
#include <string_view>

#include "core.h"

namespace parallel_state::control {

class Record {
 public:
  Record(Proc self, const std::string& token, const Config& config, std::size_t most_bytes = 64U << 10);

  // Drops the oldest events that no longer fit; those of kMeet stay.
  void add(Nanos now, const Event& event);
  Bytes bytes() const;

 private:
  Bytes head_, meets_;  // `meets_`: events of kMeet that are older than `events_`
  std::deque<std::pair<bool, Bytes>> events_;
  std::size_t bytes_ = 0, most_bytes_;
};

// Steps a new core through a record, and calls `each` after each step. If no event was dropped, the core ends with the
// digest of the one that was recorded. Returns false if the record is malformed.
bool replay(std::string_view record,
            const std::function<void(Nanos, const Event&, const std::vector<Action>&, const Core&)>& each);

}  // namespace parallel_state::control
