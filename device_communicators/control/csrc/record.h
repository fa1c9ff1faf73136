// Records the last events of a core, and replays them.
#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "core.h"

namespace parallel_state::control {

// Keeps the last 32 to 64 KiB of events, and a copy of the core from before them. So each replay is exact.
class Record {
 public:
  // Called before `core` takes in `event`.
  void add(const Core& core, Nanos now, const Event& event);
  // Returns the record of `core`. It has no tokens.
  Bytes bytes(const Core& core) const;

 private:
  struct Part {
    Core start;
    Bytes events;
  };
  std::optional<Part> older_, newer_;
};

// Steps a core through a record, and calls `each` after each step. `core` is then as the recorded one was; returns true
// if it has that digest. Returns nothing if the record is malformed, or of another build.
std::optional<bool> replay(
    std::string_view record, Core* core,
    const std::function<void(Nanos, const Event&, const std::vector<Action>&, const Core&)>& each);

// Returns a replay in words.
std::string describe(std::string_view record);

}  // namespace parallel_state::control
