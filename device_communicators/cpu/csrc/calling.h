// Functions of the library that Python calls itself, as METH_FASTCALL: in a fraction of the time that ctypes takes.
//
// The library is linked with no Python; what such functions need of it, all of the stable ABI, is given once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace parallel_state {

struct Calling {
  void* (*as_pointer)(void*) = nullptr;                        // PyLong_AsVoidPtr
  void* (*make_integer)(long long) = nullptr;                  // PyLong_FromLongLong
  void* (*save_thread)() = nullptr;                            // PyEval_SaveThread: lets other threads run
  void (*restore_thread)(void*) = nullptr;                     // PyEval_RestoreThread
  void* (*make_bytes)(const char*, std::ptrdiff_t) = nullptr;  // PyBytes_FromStringAndSize
  void (*raise)(void*, void*, void*) = nullptr;                // PyErr_Restore, of type, value and traceback
  const char* (*as_bytes)(void*) = nullptr;                    // PyBytes_AsString
  std::ptrdiff_t (*bytes_size)(void*) = nullptr;               // PyBytes_Size
  void (*hold)(void*) = nullptr;                               // Py_IncRef
  void (*let_go)(void*) = nullptr;                             // Py_DecRef
  void* (*no_memory)() = nullptr;                              // PyErr_NoMemory
};

extern Calling calling;  // written before any of the functions is called

inline void* pointer_of(void* integer) { return calling.as_pointer(integer); }
inline std::uint64_t number_of(void* integer) { return reinterpret_cast<std::uint64_t>(pointer_of(integer)); }

}  // namespace parallel_state
