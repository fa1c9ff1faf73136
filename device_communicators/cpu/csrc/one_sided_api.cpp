#include <cstring>
#include <memory>
#include <new>

#include "calling.h"
#include "one_sided.h"

namespace {

using namespace parallel_state;

thread_local SharedWindow::Refusal refusal;

constexpr std::int64_t kMostLocked = 8 << 10;  // elements, which a core copies in a few microseconds

std::shared_ptr<SharedWindow> window_at(void* opened) { return *static_cast<std::shared_ptr<SharedWindow>*>(opened); }

template <typename Function>
void* unlocked(Function function) {
  return calling.make_integer(static_cast<int>(without_lock(function)));
}

}  // namespace

void* parallel_state::put_from_python(void* opened, int dst, std::int64_t first, std::int64_t elements, int dtype,
                                      const void* data, bool signals) {
  const std::shared_ptr<SharedWindow> window = window_at(opened);
  const auto put = [&] { return window->put(dst, first, elements, dtype, data, signals, &refusal); };
  if (elements <= kMostLocked && window->maps(dst)) return calling.make_integer(static_cast<int>(put()));
  return unlocked(put);
}

#pragma GCC visibility push(default)
extern "C" {

// Sets this rank's offsets in `part`. Null for an unknown group, or without memory.
void* ps_window_new(std::uint64_t group, std::int64_t* part, const void* data) {
  std::shared_ptr<Handle> handle = find(group);
  if (handle == nullptr) return nullptr;
  try {
    WindowPart given;
    std::memcpy(static_cast<void*>(&given), part, sizeof given);
    auto made = std::make_shared<SharedWindow>(group, std::move(handle), given, data);
    std::memcpy(part, &made->part(), sizeof given);
    return new std::shared_ptr<SharedWindow>(std::move(made));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

int ps_window_open(void* window, const std::int64_t* parts) {
  return static_cast<int>(window_at(window)->open(reinterpret_cast<const WindowPart*>(parts), &refusal));
}

int ps_window_put(void* window, int dst, std::int64_t first, std::int64_t elements, int dtype, const void* data) {
  return static_cast<int>(window_at(window)->put(dst, first, elements, dtype, data, false, &refusal));
}

int ps_window_signal(void* window, int dst) { return static_cast<int>(window_at(window)->signal(dst, &refusal)); }

int ps_window_wait(void* window, int src, double timeout_s) {
  return static_cast<int>(window_at(window)->wait_signal(src, timeout_s, &refusal));
}

int ps_window_memory(void* window, int rank, void** found) {
  return static_cast<int>(window_at(window)->memory_of(rank, found, &refusal));
}

void ps_window_refusal(std::int64_t* words, char* text, std::size_t capacity) {
  words[0] = refusal.loss.rank;
  words[1] = refusal.loss.reporter;
  words[2] = refusal.loss.status;
  std::memcpy(words + 3, &refusal.failure, sizeof refusal.failure);
  text[refusal.text.copy(text, capacity - 1)] = '\0';
}

int ps_window_end(void* window) { return static_cast<int>(window_at(window)->end(&refusal)); }
void ps_window_delete(void* window) { delete static_cast<std::shared_ptr<SharedWindow>*>(window); }

void* ps_window_putting(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 7) return nullptr;
  const auto word = [given](int at) { return static_cast<std::int64_t>(number_of(given[at])); };
  return put_from_python(pointer_of(given[0]), static_cast<int>(word(1)), word(2), word(3), static_cast<int>(word(4)),
                         pointer_of(given[5]), word(6) != 0);
}

void* ps_window_signalling(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 2) return nullptr;
  const std::shared_ptr<SharedWindow> window = shared<SharedWindow>(given[0]);
  const int dst = int_of(given[1]);
  if (window->maps(dst)) return calling.make_integer(static_cast<int>(window->signal(dst, &refusal)));
  return unlocked([&] { return window->signal(dst, &refusal); });
}

// Timeout in us; -1 for the group's.
void* ps_window_waiting(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 3) return nullptr;
  const std::shared_ptr<SharedWindow> window = shared<SharedWindow>(given[0]);
  const int src = int_of(given[1]);
  const auto timeout_us = static_cast<std::int64_t>(number_of(given[2]));
  const double timeout_s = timeout_us < 0 ? window->timeout_s() : static_cast<double>(timeout_us) / 1e6;
  return unlocked([&] { return window->wait_signal(src, timeout_s, &refusal); });
}

}  // extern "C"
#pragma GCC visibility pop
