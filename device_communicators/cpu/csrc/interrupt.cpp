#include "interrupt.h"

#include "calling.h"

#include <pthread.h>

#include <atomic>

namespace parallel_state {
namespace {

std::atomic<bool> known{false};  // release after `python` and `main_thread` are set, acquire before they are read
Interpreter python;
pthread_t main_thread;
void* raised[3] = {nullptr, nullptr, nullptr};  // main thread only

bool in_main_thread() { return known.load(std::memory_order_acquire) && pthread_equal(pthread_self(), main_thread); }

}  // namespace

Calling calling;

void set_interpreter(const Interpreter& interpreter, unsigned long thread) {
  if (known.load(std::memory_order_acquire)) return;
  python = interpreter;
  main_thread = static_cast<pthread_t>(thread);
  known.store(true, std::memory_order_release);
}

SignalPipe& signal_pipe() {
  static SignalPipe pipe;
  return pipe;
}

bool interrupted(bool surely) {
  if (!in_main_thread() || !(has_signal(signal_pipe()) || surely)) return false;
  const int lock = python.take_lock();
  const bool raises = python.check_signals() != 0;
  if (raises) python.fetch(&raised[0], &raised[1], &raised[2]);
  python.let_lock(lock);
  return raises;
}

void take_exception(void** type, void** value, void** traceback) {
  *type = *value = *traceback = nullptr;
  if (!in_main_thread()) return;
  *type = raised[0];
  *value = raised[1];
  *traceback = raised[2];
  raised[0] = raised[1] = raised[2] = nullptr;
}

}  // namespace parallel_state
