#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "core.h"

namespace parallel_state::control {

// The last 32 to 64 KiB, and the core before them.
class Record {
 public:
  void add(const Core& core, Nanos now, const Event& event);
  // Without tokens.
  Bytes bytes(const Core& core) const;

 private:
  struct Part {
    Core start;
    Bytes events;
  };
  std::optional<Part> older_, newer_;
};

// Returns true if `core` ends with the recorded digest; nullopt if the record is malformed or of another build.
std::optional<bool> replay(
    std::string_view record, Core* core,
    const std::function<void(Nanos, const Event&, const std::vector<Action>&, const Core&)>& each);

std::string describe(std::string_view record);

}  // namespace parallel_state::control
