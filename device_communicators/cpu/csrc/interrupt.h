// Handles Ctrl-C while a Python thread waits in the library. Python notes the signal, but runs its handler only on
// request. The library calls Python by function pointers.
#pragma once

#include "signals.h"

namespace parallel_state {

struct Interpreter {
  int (*take_lock)();                     // PyGILState_Ensure
  int (*check_signals)();                 // PyErr_CheckSignals: -1 if a handler raised
  void (*fetch)(void**, void**, void**);  // PyErr_Fetch
  void (*let_lock)(int);                  // PyGILState_Release
};

// `main_thread`: a pthread_t, the thread that runs signal handlers.
void set_interpreter(const Interpreter& interpreter, unsigned long main_thread);

// Set by Python; see has_signal.
SignalPipe& signal_pipe();

// Runs Python's signal handlers, under the interpreter lock, if a signal may have arrived. Returns true if a handler
// raised. `surely`: a signal did arrive. Called between two sleeps, never on the fast path.
bool interrupted(bool surely);

// Returns what the last handler raised: three references that the caller owns. Null if there is nothing, and in other
// threads.
void take_exception(void** type, void** value, void** traceback);

}  // namespace parallel_state
