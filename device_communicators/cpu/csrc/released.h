// Python objects whose memory no transfer uses any more. A thread without the GIL leaves them to its caller, or to
// Py_AddPendingCall.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include "calling.h"

namespace parallel_state {

class Released {
 public:
  using AddPending = int (*)(int (*)(void*), void*);  // needs no lock

  // Keeps objects that this thread releases for its caller, which calls `let_go`.
  class Visit {
   public:
    Visit() { ++visits(); }
    ~Visit() { --visits(); }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
  };

  // Null from the interpreter's end on.
  void set_add_pending(AddPending add_pending) { add_pending_ = add_pending; }

  void add(void* const* objects, std::size_t count) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      objects_.insert(objects_.end(), objects, objects + count);
    }
    const AddPending add_pending = add_pending_;
    if (visits() > 0 || count == 0 || add_pending == nullptr || is_pending_.exchange(true)) return;
    const auto run = [](void* self) {
      static_cast<Released*>(self)->is_pending_ = false;
      static_cast<Released*>(self)->let_go();
      return 0;
    };
    if (add_pending(run, this) != 0) is_pending_ = false;  // its queue is full: the next call frees them
  }
  // The caller holds the GIL.
  void let_go() {
    std::vector<void*> objects;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      objects.swap(objects_);
    }
    for (void* const object : objects) calling.let_go(object);
  }

 private:
  static int& visits() {
    static thread_local int all = 0;
    return all;
  }

  std::mutex mutex_;
  std::vector<void*> objects_;
  std::atomic<AddPending> add_pending_{nullptr};
  std::atomic<bool> is_pending_{false};
};

inline Released& released() {
  static auto* const all = new Released;  // the progress thread may outlive static objects
  return *all;
}

}  // namespace parallel_state
