// The interface of streams.h to Python: what a message takes as calling.h has it, the rest for ctypes.
//
// A part is four arguments: a rank, an address, a number of bytes, and the object whose memory that is, which a
// transfer keeps as long as it needs it. What may wait returns what streams.h says.

#include <algorithm>
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
std::int64_t slice_of(void* integer) { return static_cast<std::int64_t>(number_of(integer)) * 1000; }  // from us

std::string bytes_of(void* object) {
  const char* const bytes = calling.as_bytes(object);
  return bytes == nullptr ? std::string() : std::string(bytes, static_cast<std::size_t>(calling.bytes_size(object)));
}

// Parts, whose owners are held until the end of the call, and from then on by the transfers that need them.
class Parts {
 public:
  Parts(void* const* given, std::ptrdiff_t count) {
    for (std::ptrdiff_t at = 0; at + kPart <= count; at += kPart) {
      void* const* const part = given + at;
      calling.hold(part[3]);
      parts.push_back(
          {static_cast<int>(number_of(part[0])), static_cast<char*>(pointer_of(part[1])), number_of(part[2]), part[3]});
    }
  }
  ~Parts() {
    for (const Part& part : parts) {
      if (part.owner != nullptr) calling.let_go(part.owner);
    }
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  std::vector<Part> parts;
};

std::vector<std::uint64_t> numbers_of(void* const* given, std::ptrdiff_t count) {
  std::vector<std::uint64_t> numbers;
  for (std::ptrdiff_t at = 0; at < count; ++at) numbers.push_back(number_of(given[at]));
  return numbers;
}

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

void ps_streams_end_sending(void* streams, int rank) { static_cast<Streams*>(streams)->end_sending(rank); }

void ps_streams_close(void* streams) { static_cast<Streams*>(streams)->close(); }

void ps_streams_facts(void* streams, int rank, std::uint64_t* out) { static_cast<Streams*>(streams)->facts(rank, out); }

void* ps_streams_exchanging(void*, void* const* given, std::ptrdiff_t count) {  // streams, slice, head, n, n parts, …
  if (count < 4) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::int64_t slice_ns = slice_of(given[1]);
  const std::string head = bytes_of(given[2]);
  const auto sent = std::min(static_cast<std::ptrdiff_t>(number_of(given[3])) * kPart, count - 4);
  Parts out(given + 4, sent), in(given + 4 + sent, count - 4 - sent);
  return unlocked(streams, [&] { return streams.exchange(slice_ns, head, out.parts, in.parts); });
}

void* ps_streams_framing(void*, void* const* given, std::ptrdiff_t count) {  // streams, head, parts
  if (count < 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::string head = bytes_of(given[1]);
  Parts parts(given + 2, count - 2);
  return unlocked(streams, [&] { return streams.send_frames(head, parts.parts); });
}

void* ps_streams_meeting(void*, void* const* given, std::ptrdiff_t count) {  // streams, slice, head, take, parts
  if (count < 4) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::int64_t slice_ns = slice_of(given[1]);
  const std::string head = bytes_of(given[2]);
  const bool take = number_of(given[3]) != 0;
  Parts parts(given + 4, count - 4);
  return unlocked(streams, [&] { return streams.meet(slice_ns, head, take, parts.parts); });
}

void* ps_streams_sending(void*, void* const* given, std::ptrdiff_t count) {  // streams, kind, part
  if (count != 2 + kPart) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint32_t kind = kind_of(given[1]);
  Parts parts(given + 2, kPart);
  return unlocked(streams, [&] { return streams.send(parts.parts[0], kind); });
}

void* ps_streams_receiving(void*, void* const* given, std::ptrdiff_t count) {  // streams, kind, part
  if (count != 2 + kPart) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint32_t kind = kind_of(given[1]);
  Parts parts(given + 2, kPart);
  return unlocked(streams, [&] { return streams.receive(parts.parts[0], kind); });
}

void* ps_streams_pair_sending(void*, void* const* given, std::ptrdiff_t count) {  // streams, kind, text, part
  if (count != 3 + kPart) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint32_t kind = kind_of(given[1]);
  std::string text = bytes_of(given[2]);
  Parts parts(given + 3, kPart);
  return unlocked(streams, [&] { return streams.send_pair(parts.parts[0], kind, std::move(text)); });
}

void* ps_streams_pair_receiving(void*, void* const* given, std::ptrdiff_t count) {  // streams, kind, text, part
  if (count != 3 + kPart) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint32_t kind = kind_of(given[1]);
  std::string text = bytes_of(given[2]);
  Parts parts(given + 3, kPart);
  return unlocked(streams, [&] { return streams.receive_pair(parts.parts[0], kind, std::move(text)); });
}

void* ps_streams_waiting(void*, void* const* given, std::ptrdiff_t count) {  // streams, slice, all, numbers
  if (count < 3) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::int64_t slice_ns = slice_of(given[1]);
  const bool all = number_of(given[2]) != 0;
  const std::vector<std::uint64_t> numbers = numbers_of(given + 3, count - 3);
  return unlocked(streams, [&] { return streams.wait(slice_ns, all, numbers); });
}

// Has the process' progress thread move what nobody waits for, until nothing is left.
void* ps_streams_keeping_moving(void*, void* const* given, std::ptrdiff_t count) {  // streams
  if (count != 1) return nullptr;
  Streams& streams = streams_of(given[0]);
  return unlocked(streams, [&]() -> std::int64_t { return keep_moving(streams.shared_from_this()), 0; });
}

void* ps_streams_flushing(void*, void* const* given, std::ptrdiff_t count) {  // streams
  if (count != 1) return nullptr;
  Streams& streams = streams_of(given[0]);
  return unlocked(streams, [&]() -> std::int64_t { return streams.flush(), 0; });
}

// Lets go of what no transfer needs any more.
void* ps_streams_releasing(void*, void* const* given, std::ptrdiff_t count) {  // streams
  if (count != 1) return nullptr;
  return unlocked(streams_of(given[0]), []() -> std::int64_t { return 0; });
}

void* ps_streams_late(void*, void* const* given, std::ptrdiff_t count) {  // streams
  if (count != 1) return nullptr;
  Streams& streams = streams_of(given[0]);
  return unlocked(streams, [&]() -> std::int64_t { return streams.late(); });
}

// The rank of a transfer that isn't done, or -1.
void* ps_streams_rank_of(void*, void* const* given, std::ptrdiff_t count) {  // streams, number
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint64_t number = number_of(given[1]);
  return unlocked(streams, [&]() -> std::int64_t { return streams.rank_of(number); });
}

// Of a transfer that is done: the other rank's text, where that was another; once.
void* ps_streams_found(void*, void* const* given, std::ptrdiff_t count) {  // streams, number
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint64_t number = number_of(given[1]);
  return unlocked_text(streams, [&] { return streams.found(number); });
}

// The frame of a rank that nobody has taken: magic, digest, bytes of the body, text; empty where there is none.
void* ps_streams_frame(void*, void* const* given, std::ptrdiff_t count) {  // streams, rank
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const auto rank = static_cast<int>(number_of(given[1]));
  return unlocked_text(streams, [&] {
    std::string text;
    streams.frame(rank, &text);
    return text;
  });
}

void* ps_streams_error(void*, void* const* given, std::ptrdiff_t count) {  // streams, rank
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const auto rank = static_cast<int>(number_of(given[1]));
  return unlocked_text(streams, [&] { return streams.error(rank); });
}

}  // extern "C"
#pragma GCC visibility pop
