// One thread moves started transfers over rings, one those over connections, while no caller waits for them. They nap
// up to 1 ms while nothing moves, and after some 20 ms sleep.
#pragma once

#include <poll.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace parallel_state {

struct Sleep {
  struct Word {
    std::uint32_t* at;
    std::uint32_t expected;
  };
  void add(std::uint32_t* at, std::uint32_t expected) { words.push_back({at, expected}); }

  std::vector<Word> words;
  std::vector<pollfd> polled;
  std::int64_t until_ns = INT64_MAX;
  bool naps = false;
};

class Movable {
 public:
  virtual ~Movable() = default;
  // Unless a caller moves it now. True if anything moved.
  virtual bool move() = 0;
  // Called with the thread's lock held.
  virtual bool has_left() = 0;
  // It sleeps on connections; else on words.
  virtual bool is_polled() const = 0;
  virtual void fall_asleep(Sleep* sleep) = 0;
  virtual void wake_up() = 0;

 private:
  friend class Progress;
  bool listed_ = false;  // guarded by the thread's lock
};

// The caller must not hold locks that `has_left` or `fall_asleep` take.
void keep_moving(const std::shared_ptr<Movable>& movable);
void wake_progress();
void wake_sleepers(std::uint32_t* word);

// On a progress thread, for a callback that may block: another thread takes over.
class StepOut {
 public:
  StepOut();
  ~StepOut();
  StepOut(const StepOut&) = delete;
  StepOut& operator=(const StepOut&) = delete;

 private:
  const bool steps_out_;
};

}  // namespace parallel_state
