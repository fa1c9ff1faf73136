// Python runs signal handlers only on request while its thread waits in the library.
#pragma once

#include "signals.h"

namespace parallel_state {

struct Interpreter {
  int (*take_lock)();                     // PyGILState_Ensure
  int (*check_signals)();                 // PyErr_CheckSignals: -1 if a handler raised
  void (*fetch)(void**, void**, void**);  // PyErr_Fetch
  void (*let_lock)(int);                  // PyGILState_Release
};

// A pthread_t, which runs signal handlers.
void set_interpreter(const Interpreter& interpreter, unsigned long main_thread);

SignalPipe& signal_pipe();

// Runs Python's signal handlers, under the interpreter lock, if a signal may have arrived (`surely`: did arrive).
// Returns true if a handler raised.
bool interrupted(bool surely);

// Three references that the caller owns. Null in other threads.
void take_exception(void** type, void** value, void** traceback);

}  // namespace parallel_state
