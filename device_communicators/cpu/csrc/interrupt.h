// Python runs signal handlers only on request while its thread waits in the library.
#pragma once

#include "signals.h"

namespace parallel_state {

struct Interpreter {
  int (*take_lock)();
  int (*check_signals)();  // -1 if a handler raised
  void (*fetch)(void**, void**, void**);
  void (*let_lock)(int);
};

void set_interpreter(const Interpreter& interpreter, unsigned long main_thread);

SignalPipe& signal_pipe();

// Runs Python's signal handlers if a signal may have arrived (`surely`: did arrive). True if one raised.
bool interrupted(bool surely);

// The caller owns the three references. Null in other threads.
void take_exception(void** type, void** value, void** traceback);

}  // namespace parallel_state
