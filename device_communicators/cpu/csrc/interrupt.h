// Ctrl-C while a thread of a Python program waits here: the interpreter has noted the signal, and runs its handler
// only when it is asked to. The library knows Python by functions that are handed to it.
#pragma once

#include "signals.h"

namespace parallel_state {

struct Interpreter {
  int (*take_lock)();                     // PyGILState_Ensure
  int (*check_signals)();                 // PyErr_CheckSignals: -1 where a handler raised
  void (*fetch)(void**, void**, void**);  // PyErr_Fetch: what it raised
  void (*let_lock)(int);                  // PyGILState_Release
};

// `main_thread` is the one that runs handlers, a pthread_t.
void set_interpreter(const Interpreter& interpreter, unsigned long main_thread);

// See has_signal. Python sets it.
SignalPipe& signal_pipe();

// Runs Python's signal handlers, with the interpreter lock, if a signal may have arrived; else takes no lock. Returns
// true if a handler raised. `surely`: a signal did arrive. Called between two sleeps, never on the fast path.
bool interrupted(bool surely);

// What the last one raised, three references that are the caller's; null where there is nothing, and in other threads.
void take_exception(void** type, void** value, void** traceback);

}  // namespace parallel_state
