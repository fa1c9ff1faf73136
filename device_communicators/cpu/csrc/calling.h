// Functions of Python, with which the library isn't linked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace parallel_state {

struct Calling {
  void* (*as_pointer)(void*) = nullptr;
  void* (*make_integer)(long long) = nullptr;
  void* (*save_thread)() = nullptr;
  void (*restore_thread)(void*) = nullptr;
  void* (*make_bytes)(const char*, std::ptrdiff_t) = nullptr;
  void (*raise)(void*, void*, void*) = nullptr;
  const char* (*as_bytes)(void*) = nullptr;
  std::ptrdiff_t (*bytes_size)(void*) = nullptr;
  void (*hold)(void*) = nullptr;
  void (*let_go)(void*) = nullptr;
  void* (*no_memory)() = nullptr;
};

extern Calling calling;

class Unlocked {
 public:
  Unlocked() : thread_(calling.save_thread()) {}
  ~Unlocked() { calling.restore_thread(thread_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  void* const thread_;
};

template <typename Function>
auto without_lock(Function function) {
  const Unlocked others;
  return function();
}

inline void* pointer_of(void* integer) { return calling.as_pointer(integer); }
inline std::uint64_t number_of(void* integer) { return reinterpret_cast<std::uint64_t>(pointer_of(integer)); }
inline int int_of(void* integer) { return static_cast<int>(number_of(integer)); }
inline double seconds_of(void* us) { return static_cast<double>(number_of(us)) / 1e6; }

// A copy of a shared_ptr at the address `integer`.
template <typename Of>
std::shared_ptr<Of> shared(void* integer) {
  return *static_cast<std::shared_ptr<Of>*>(pointer_of(integer));
}

}  // namespace parallel_state
