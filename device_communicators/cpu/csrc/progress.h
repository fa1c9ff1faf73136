// The threads of a process that move started transfers while no caller waits for them: one for rings in shared memory,
// one for connections, each started at its first use.
//
// Such a thread calls `move` of each entry, at intervals that grow from 50 us to 1 ms while nothing moves. Some 20 ms
// later it sleeps in the kernel until one of the entries can go on: it costs nothing then. A callback that may block
// makes another thread take over: see `StepOut`.
#pragma once

#include <poll.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace parallel_state {

// What a thread sleeps on.
struct Sleep {
  struct Word {
    std::uint32_t* at;
    std::uint32_t expected;
  };
  void add(std::uint32_t* at, std::uint32_t expected) { words.push_back({at, expected}); }

  std::vector<Word> words;     // of a ring
  std::vector<pollfd> polled;  // of connections
  std::int64_t until_ns = INT64_MAX;
  bool naps = false;  // something must be looked at again soon
};

class Movable {
 public:
  virtual ~Movable() = default;
  // Moves what can be moved without waiting, unless a caller does that at the moment. Returns true if anything moved.
  virtual bool move() = 0;
  // Whether anything is left to move. Called with the thread's lock held.
  virtual bool has_left() = 0;
  // Whether it sleeps on connections, else on words.
  virtual bool is_polled() const = 0;
  // Adds what the thread is to sleep on; after the sleep `wake_up` is called.
  virtual void fall_asleep(Sleep* sleep) = 0;
  virtual void wake_up() = 0;

 private:
  friend class Progress;
  bool listed_ = false;  // by the thread's lock
};

// Lists an entry until nothing of it is left, and has the thread look at it. Call it without locks that `has_left` or
// `fall_asleep` take.
void keep_moving(const std::shared_ptr<Movable>& movable);
// Has the threads look at all entries, if there are any.
void wake_progress();
// Wakes all that sleep on a word, in any process.
void wake_sleepers(std::uint32_t* word);

// While this lives on a progress thread, another thread does its work.
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
