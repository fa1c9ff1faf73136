// Functions that Python calls directly (METH_FASTCALL). The library isn't linked with Python; it receives these
// pointers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace parallel_state {

struct Calling {
  void* (*as_pointer)(void*) = nullptr;                        // PyLong_AsVoidPtr
  void* (*make_integer)(long long) = nullptr;                  // PyLong_FromLongLong
  void* (*save_thread)() = nullptr;                            // PyEval_SaveThread
  void (*restore_thread)(void*) = nullptr;                     // PyEval_RestoreThread
  void* (*make_bytes)(const char*, std::ptrdiff_t) = nullptr;  // PyBytes_FromStringAndSize
  void (*raise)(void*, void*, void*) = nullptr;                // PyErr_Restore
  const char* (*as_bytes)(void*) = nullptr;                    // PyBytes_AsString
  std::ptrdiff_t (*bytes_size)(void*) = nullptr;               // PyBytes_Size
  void (*hold)(void*) = nullptr;                               // Py_IncRef
  void (*let_go)(void*) = nullptr;                             // Py_DecRef
  void* (*no_memory)() = nullptr;                              // PyErr_NoMemory
};

extern Calling calling;

inline void* pointer_of(void* integer) { return calling.as_pointer(integer); }
inline std::uint64_t number_of(void* integer) { return reinterpret_cast<std::uint64_t>(pointer_of(integer)); }

}  // namespace parallel_state
