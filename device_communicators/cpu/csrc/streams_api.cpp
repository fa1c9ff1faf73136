// The interface of streams.h to Python: what a message takes as calling.h has it, the rest for ctypes.
//
// A part is three arguments: a rank, an address, a number of bytes. What may wait returns what streams.h says, or null
// where a signal's handler has raised meanwhile.

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "calling.h"
#include "interrupt.h"
#include "streams.h"

namespace {

using namespace parallel_state;

constexpr std::ptrdiff_t kPart = 3;

Streams& streams_of(void* address) { return *static_cast<Streams*>(pointer_of(address)); }
std::uint32_t kind_of(void* integer) { return static_cast<std::uint32_t>(number_of(integer)); }
std::int64_t slice_of(void* integer) { return static_cast<std::int64_t>(number_of(integer)) * 1000; }  // from us

std::string bytes_of(void* object) {
  const char* const bytes = calling.as_bytes(object);
  return bytes == nullptr ? std::string() : std::string(bytes, static_cast<std::size_t>(calling.bytes_size(object)));
}

Part part_of(void* const* given) {
  return {static_cast<int>(number_of(given[0])), static_cast<char*>(pointer_of(given[1])), number_of(given[2])};
}

std::vector<Part> parts_of(void* const* given, std::ptrdiff_t count) {
  std::vector<Part> parts;
  for (std::ptrdiff_t at = 0; at + kPart <= count; at += kPart) parts.push_back(part_of(given + at));
  return parts;
}

std::vector<std::uint64_t> numbers_of(void* const* given, std::ptrdiff_t count) {
  std::vector<std::uint64_t> numbers;
  for (std::ptrdiff_t at = 0; at < count; ++at) numbers.push_back(number_of(given[at]));
  return numbers;
}

// Calls `function` while other threads run.
template <typename Function>
void* unlocked(Function function) {
  void* const thread = calling.save_thread();
  const std::int64_t outcome = function();
  calling.restore_thread(thread);
  if (outcome != Streams::kInterrupted) return calling.make_integer(outcome);
  void *type = nullptr, *value = nullptr, *traceback = nullptr;
  take_exception(&type, &value, &traceback);
  if (type == nullptr) return calling.make_integer(Streams::kLook);
  calling.raise(type, value, traceback);
  return nullptr;
}

void* bytes_from(const std::string& text) {
  return calling.make_bytes(text.data(), static_cast<std::ptrdiff_t>(text.size()));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* ps_streams_new(std::int64_t spin_ns) { return new (std::nothrow) Streams(spin_ns); }

void ps_streams_add(void* streams, int rank, int descriptor, std::uint64_t early_bytes) {
  static_cast<Streams*>(streams)->add(rank, descriptor, early_bytes);
}

void ps_streams_delete(void* streams) { delete static_cast<Streams*>(streams); }

void ps_streams_end_sending(void* streams, int rank) { static_cast<Streams*>(streams)->end_sending(rank); }

void ps_streams_close(void* streams) { static_cast<Streams*>(streams)->close(); }

void ps_streams_facts(void* streams, int rank, std::uint64_t* out) { static_cast<Streams*>(streams)->facts(rank, out); }

void* ps_streams_exchanging(void*, void* const* given, std::ptrdiff_t count) {  // streams, slice, head, n, n parts, …
  if (count < 4) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::int64_t slice_ns = slice_of(given[1]);
  const std::string head = bytes_of(given[2]);
  const auto sent = std::min(static_cast<std::ptrdiff_t>(number_of(given[3])) * kPart, count - 4);
  const std::vector<Part> out = parts_of(given + 4, sent), in = parts_of(given + 4 + sent, count - 4 - sent);
  return unlocked([&] { return streams.exchange(slice_ns, head, out, in); });
}

void* ps_streams_framing(void*, void* const* given, std::ptrdiff_t count) {  // streams, head, parts
  if (count < 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::string head = bytes_of(given[1]);
  const std::vector<Part> parts = parts_of(given + 2, count - 2);
  return unlocked([&] { return streams.send_frames(head, parts); });
}

void* ps_streams_meeting(void*, void* const* given, std::ptrdiff_t count) {  // streams, slice, head, take, parts
  if (count < 4) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::int64_t slice_ns = slice_of(given[1]);
  const std::string head = bytes_of(given[2]);
  const bool take = number_of(given[3]) != 0;
  const std::vector<Part> parts = parts_of(given + 4, count - 4);
  return unlocked([&] { return streams.meet(slice_ns, head, take, parts); });
}

void* ps_streams_sending(void*, void* const* given, std::ptrdiff_t count) {  // streams, kind, part
  if (count != 5) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint32_t kind = kind_of(given[1]);
  const Part part = part_of(given + 2);
  return unlocked([&] { return streams.send(part, kind); });
}

void* ps_streams_receiving(void*, void* const* given, std::ptrdiff_t count) {  // streams, kind, part
  if (count != 5) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint32_t kind = kind_of(given[1]);
  const Part part = part_of(given + 2);
  return unlocked([&] { return streams.receive(part, kind); });
}

void* ps_streams_pair_sending(void*, void* const* given, std::ptrdiff_t count) {  // streams, kind, text, part
  if (count != 6) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint32_t kind = kind_of(given[1]);
  std::string text = bytes_of(given[2]);
  const Part part = part_of(given + 3);
  return unlocked([&] { return streams.send_pair(part, kind, std::move(text)); });
}

void* ps_streams_pair_receiving(void*, void* const* given, std::ptrdiff_t count) {  // streams, kind, text, part
  if (count != 6) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint32_t kind = kind_of(given[1]);
  std::string text = bytes_of(given[2]);
  const Part part = part_of(given + 3);
  return unlocked([&] { return streams.receive_pair(part, kind, std::move(text)); });
}

void* ps_streams_waiting(void*, void* const* given, std::ptrdiff_t count) {  // streams, slice, all, numbers
  if (count < 3) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::int64_t slice_ns = slice_of(given[1]);
  const bool all = number_of(given[2]) != 0;
  const std::vector<std::uint64_t> numbers = numbers_of(given + 3, count - 3);
  return unlocked([&] { return streams.wait(slice_ns, all, numbers); });
}

void* ps_streams_driving(void*, void* const* given, std::ptrdiff_t count) {  // streams, slice
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::int64_t slice_ns = slice_of(given[1]);
  return unlocked([&] { return streams.drive(slice_ns); });
}

void* ps_streams_flushing(void*, void* const* given, std::ptrdiff_t count) {  // streams
  if (count != 1) return nullptr;
  Streams& streams = streams_of(given[0]);
  return unlocked([&]() -> std::int64_t { return streams.flush(), 0; });
}

// Whether anything is to be moved.
void* ps_streams_has_left(void*, void* const* given, std::ptrdiff_t count) {  // streams
  if (count != 1) return nullptr;
  Streams& streams = streams_of(given[0]);
  return unlocked([&]() -> std::int64_t { return streams.has_left() ? 1 : 0; });
}

// The rank of a transfer that isn't done, or -1.
void* ps_streams_rank_of(void*, void* const* given, std::ptrdiff_t count) {  // streams, number
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint64_t number = number_of(given[1]);
  return unlocked([&]() -> std::int64_t { return streams.rank_of(number); });
}

// Of a transfer that is done: the other rank's text, where that was another; once.
void* ps_streams_found(void*, void* const* given, std::ptrdiff_t count) {  // streams, number
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const std::uint64_t number = number_of(given[1]);
  std::string text;
  void* const thread = calling.save_thread();
  text = streams.found(number);
  calling.restore_thread(thread);
  return bytes_from(text);
}

// The frame of a rank that nobody has taken: magic, digest, bytes of the body, text; empty where there is none.
void* ps_streams_frame(void*, void* const* given, std::ptrdiff_t count) {  // streams, rank
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const auto rank = static_cast<int>(number_of(given[1]));
  std::string text;
  void* const thread = calling.save_thread();
  streams.frame(rank, &text);
  calling.restore_thread(thread);
  return bytes_from(text);
}

void* ps_streams_error(void*, void* const* given, std::ptrdiff_t count) {  // streams, rank
  if (count != 2) return nullptr;
  Streams& streams = streams_of(given[0]);
  const auto rank = static_cast<int>(number_of(given[1]));
  std::string text;
  void* const thread = calling.save_thread();
  text = streams.error(rank);
  calling.restore_thread(thread);
  return bytes_from(text);
}

}  // extern "C"
#pragma GCC visibility pop
