// The interface of streams.h to Python: what a message takes as calling.h has it, the rest for ctypes.
//
// A part is four arguments: a rank, an address, a number of bytes, and the object whose memory that is, which a
// transfer keeps as long as it needs it. What may wait returns what streams.h says.

#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "calling.h"
#include "streams.h"

namespace {

using namespace parallel_state;

constexpr std::ptrdiff_t kPart = 4;

Streams& streams_of(void* address) { return *static_cast<Streams*>(pointer_of(address)); }
std::uint32_t kind_of(void* integer) { return static_cast<std::uint32_t>(number_of(integer)); }

std::string bytes_of(void* object) {
  const char* const bytes = calling.as_bytes(object);
  return bytes == nullptr ? std::string() : std::string(bytes, static_cast<std::size_t>(calling.bytes_size(object)));
}

// A part whose owner is held until the end of the call, and from then on by the transfer that needs it.
class HeldPart {
 public:
  explicit HeldPart(void* const* given)
      : part{static_cast<int>(number_of(given[0])), static_cast<char*>(pointer_of(given[1])), number_of(given[2]),
             given[3]} {
    calling.hold(part.owner);
  }
  ~HeldPart() {
    if (part.owner != nullptr) calling.let_go(part.owner);
  }
  HeldPart(const HeldPart&) = delete;
  HeldPart& operator=(const HeldPart&) = delete;

  Part part;
};

// Calls `function` while other threads run, and lets go of what no transfer needs any more.
template <typename Function>
void* unlocked(Streams& streams, Function function) {
  std::vector<void*> owners;
  std::int64_t outcome = 0;
  bool has_memory = true;
  void* const thread = calling.save_thread();
  try {
    outcome = function();
    owners = streams.take_owners();
  } catch (const std::bad_alloc&) {  // where it stands, nobody knows
    has_memory = false;
    streams.fail("there was no memory for a message");
  }
  calling.restore_thread(thread);
  for (void* const owner : owners) calling.let_go(owner);
  if (!has_memory) return calling.no_memory();
  return calling.make_integer(outcome);
}

// As `unlocked`, of a function that returns a text.
template <typename Function>
void* unlocked_text(Streams& streams, Function function) {
  std::string text;
  void* const number = unlocked(streams, [&]() -> std::int64_t { return text = function(), 0; });
  if (number == nullptr) return nullptr;
  calling.let_go(number);
  return calling.make_bytes(text.data(), static_cast<std::ptrdiff_t>(text.size()));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* ps_streams_new(std::int64_t spin_ns, std::uint64_t striped_bytes) {
  const auto made = std::make_shared<Streams>(spin_ns, striped_bytes);
  made->itself = made;
  return made.get();
}

void ps_streams_add(void* streams, int rank, int descriptor, std::uint64_t early_bytes) {
  static_cast<Streams*>(streams)->add(rank, descriptor, early_bytes);
}

void ps_streams_add_stripe(void* streams, int rank, int descriptor) {
  static_cast<Streams*>(streams)->add_stripe(rank, descriptor);
}

// Not in a process that was forked, where another thread may have been changing it.
void ps_streams_delete(void* streams) {
  auto* const found = static_cast<Streams*>(streams);
  if (found != nullptr && !found->is_foreign()) const auto last = std::exchange(found->itself, nullptr);
}

void ps_streams_end_sending(void* streams) { static_cast<Streams*>(streams)->end_sending(); }

void ps_streams_close(void* streams) { static_cast<Streams*>(streams)->close(); }

void ps_streams_facts(void* streams, int rank, std::uint64_t* out) { static_cast<Streams*>(streams)->facts(rank, out); }

void* ps_streams_sending(void*, void* const* given, std::ptrdiff_t count) {  // streams, kind, text, part
  if (count != 3 + kPart) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint32_t kind = kind_of(given[1]);
  std::string text = bytes_of(given[2]);
  HeldPart held(given + 3);
  return unlocked(streams, [&] { return streams.send(held.part, kind, std::move(text)); });
}

void* ps_streams_receiving(void*, void* const* given, std::ptrdiff_t count) {  // streams, kind, text, part
  if (count != 3 + kPart) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint32_t kind = kind_of(given[1]);
  std::string text = bytes_of(given[2]);
  HeldPart held(given + 3);
  return unlocked(streams, [&] { return streams.receive(held.part, kind, std::move(text)); });
}

void* ps_streams_waiting(void*, void* const* given, std::ptrdiff_t count) {  // streams, slice in us, number
  if (count != 3) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::int64_t slice_ns = static_cast<std::int64_t>(number_of(given[1])) * 1000;
  const std::uint64_t number = number_of(given[2]);
  return unlocked(streams, [&] { return streams.wait(slice_ns, number); });
}

// Has the process' progress thread move what nobody waits for, until nothing is left.
void* ps_streams_keeping_moving(void*, void* const* given, std::ptrdiff_t count) {  // streams
  if (count != 1) return nullptr;
  Streams& streams = streams_of(given[0]);
  return unlocked(streams, [&]() -> std::int64_t { return keep_moving(streams.shared_from_this()), 0; });
}

// Lets go of what no transfer needs any more.
void* ps_streams_releasing(void*, void* const* given, std::ptrdiff_t count) {  // streams
  if (count != 1) return nullptr;
  return unlocked(streams_of(given[0]), []() -> std::int64_t { return 0; });
}

void* ps_streams_is_done(void*, void* const* given, std::ptrdiff_t count) {  // streams, number
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint64_t number = number_of(given[1]);
  return unlocked(streams, [&]() -> std::int64_t { return streams.is_done(number) ? 1 : 0; });
}

// Of a transfer that is done: the other rank's text, where that was another; once.
void* ps_streams_found(void*, void* const* given, std::ptrdiff_t count) {  // streams, number
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint64_t number = number_of(given[1]);
  return unlocked_text(streams, [&] { return streams.found(number); });
}

void* ps_streams_error(void*, void* const* given, std::ptrdiff_t count) {  // streams, rank
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const auto rank = static_cast<int>(number_of(given[1]));
  return unlocked_text(streams, [&] { return streams.error(rank); });
}

}  // extern "C"
#pragma GCC visibility pop
