// Python objects whose memory no transfer uses any more. A thread without the interpreter lock can't let go of them:
// the next call that has it does.
#pragma once

#include <mutex>
#include <vector>

#include "calling.h"

namespace parallel_state {

class Released {
 public:
  void add(void* const* objects, std::size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_.insert(objects_.end(), objects, objects + count);
  }
  // The caller has the interpreter lock.
  void let_go() {
    std::vector<void*> objects;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      objects.swap(objects_);
    }
    for (void* const object : objects) calling.let_go(object);
  }

 private:
  std::mutex mutex_;
  std::vector<void*> objects_;
};

inline Released& released() {
  static auto* const all = new Released;  // never deleted: the progress thread may outlive static objects
  return *all;
}

}  // namespace parallel_state
