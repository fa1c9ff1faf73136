// The one thread of a process that moves started transfers while no caller waits for them.
//
// It sleeps while nothing is listed. Else it calls `move` of each entry, at intervals that grow from 50 us to 1 ms
// while nothing moves. A callback that may block makes another thread take over: see `StepOut`.
#pragma once

#include <memory>

namespace parallel_state {

class Movable {
 public:
  virtual ~Movable() = default;
  // Moves what can be moved without waiting, unless a caller does that at the moment. Returns true if anything moved.
  virtual bool move() = 0;
  // Whether anything is left to move. Called with the thread's lock held.
  virtual bool has_left() = 0;

 private:
  friend class Progress;
  bool listed_ = false;  // by the thread's lock
};

// Lists an entry until nothing of it is left. Call it without locks that `has_left` takes.
void keep_moving(const std::shared_ptr<Movable>& movable);

// While this lives on the progress thread, another thread does its work.
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
