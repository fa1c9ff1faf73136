// The calls of parallel_state.messages that come past Python, as calling.h has them. They return an Outcome, or the
// object's message. `self` is the address of what is told of Python; the first argument is the group's key.

#include <memory>
#include <utility>
#include <vector>

#include "calling.h"
#include "interrupt.h"
#include "messages.h"
#include "pack.h"

namespace {

using namespace parallel_state;

const Python& python_of(void* self) { return *static_cast<const Python*>(pointer_of(self)); }

int int_of(void* integer) { return static_cast<int>(number_of(integer)); }

Told told_of(void* word) { return {number_of(word), 0}; }

int source_of(Told told) { return static_cast<int>(told.word >> 32 & 255) - 1; }

std::shared_ptr<Served> served_of(const Python& python, void* key) {
  std::ptrdiff_t bytes = 0;
  const char* const text = python.utf8(key, &bytes);
  return text == nullptr ? nullptr : find_served({text, static_cast<std::size_t>(bytes)});
}

Piece head_of(const Python& python, void* head) {
  return {const_cast<char*>(python.bytes(head)), static_cast<std::uint64_t>(python.bytes_size(head))};
}

// Null where a signal's handler has raised meanwhile: that comes out of the call.
void* answer(Outcome outcome) {
  void *type = nullptr, *value = nullptr, *traceback = nullptr;
  if (outcome == Outcome::kLeft) take_exception(&type, &value, &traceback);
  if (type == nullptr) return calling.make_integer(static_cast<int>(outcome));
  calling.raise(type, value, traceback);
  return nullptr;
}

// Lets other threads run.
class Unlocked {
 public:
  Unlocked() : thread_(calling.save_thread()) {}
  ~Unlocked() { calling.restore_thread(thread_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  void* const thread_;
};

// What the packer has packed, kept: other threads may change the object meanwhile, and a signal's handler may pack
// another one on this thread.
class Kept {
 public:
  explicit Kept(const Python& python) : python_(python), pieces_(packer().pieces()), heads_(packer().heads()) {
    packer().hold();
    held_ = packer().take_held();
  }
  ~Kept() {
    if (handed_back_) return;
    packer().free();
    for (void* const object : held_) python_.let_go(object);
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  const std::vector<Piece>& pieces() const { return pieces_; }
  int heads() const { return heads_; }

  // For `ps_packed`, which tells it.
  void hand_back() {
    packer().take_back(std::move(held_));
    handed_back_ = true;
  }

 private:
  const Python& python_;
  std::vector<Piece> pieces_;
  int heads_;
  std::vector<void*> held_;
  bool handed_back_ = false;
};

// What was packed, to all ranks. Without room `ps_packed` tells it, if that is `wanted`.
Outcome broadcast(const Python& python, Served& served, Told told, bool wanted) {
  Kept kept{python};
  Outcome outcome;
  {
    const Unlocked others;
    outcome = broadcast_message(served, told, kept.pieces(), kept.heads());
  }
  if (outcome == Outcome::kNoRoom && wanted) kept.hand_back();
  return outcome;
}

// Makes Python's bytes of a message.
class BytesTaker : public Taker {
 public:
  bool take(const char* message, std::uint64_t bytes) override {
    calling.restore_thread(thread_);
    made_ = calling.make_bytes(message, static_cast<std::ptrdiff_t>(bytes));
    has_failed_ = made_ == nullptr;
    thread_ = calling.save_thread();
    return !has_failed_;
  }
  template <typename Receive>
  void* run(Receive receive) {
    thread_ = calling.save_thread();
    const Outcome outcome = receive(*this);
    calling.restore_thread(thread_);
    return outcome == Outcome::kDone || has_failed_ ? made_ : answer(Outcome::kLeft);
  }

 private:
  void* thread_ = nullptr;
  void* made_ = nullptr;  // with an error of Python's where there was no memory for it
  bool has_failed_ = false;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* ps_sending_dict(void* self, void* const* given, std::ptrdiff_t count) {  // …, dst, method, dict, form, head
  if (count != 6) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  const auto& form = *static_cast<const Form*>(pointer_of(given[4]));
  if (served == nullptr || !packer().gather(python, given[3], form, head_of(python, given[5]))) {
    return answer(Outcome::kLeft);
  }
  return answer(send_message(*served, {int_of(given[1]), int_of(given[2])}, packer().pieces(), 1));
}

void* ps_broadcasting_dict(void* self, void* const* given, std::ptrdiff_t count) {  // …, word, dict, form, head
  if (count != 5) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  const auto& form = *static_cast<const Form*>(pointer_of(given[3]));
  if (served == nullptr || !packer().gather(python, given[2], form, head_of(python, given[4]))) {
    return answer(Outcome::kLeft);
  }
  return answer(broadcast(python, *served, told_of(given[1]), false));
}

void* ps_sending_object(void* self, void* const* given, std::ptrdiff_t count) {  // …, dst, method, object, limit
  if (count != 5) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  if (served == nullptr || !packer().pack(python, given[3], python.depth, number_of(given[4]))) {
    return answer(Outcome::kLeft);
  }
  const ToOne to{int_of(given[1]), int_of(given[2])};
  const Outcome outcome = send_message(*served, to, packer().pieces(), packer().heads());
  if (outcome == Outcome::kNoRoom) packer().hold();  // `ps_packed` tells it
  return answer(outcome);
}

void* ps_broadcasting_object(void* self, void* const* given, std::ptrdiff_t count) {  // …, word, object, limit
  if (count != 4) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  if (served == nullptr || !packer().pack(python, given[2], python.depth, number_of(given[3]))) {
    return answer(Outcome::kLeft);
  }
  return answer(broadcast(python, *served, told_of(given[1]), true));
}

void* ps_receiving(void* self, void* const* given, std::ptrdiff_t count) {  // …, src, method, head, list
  if (count != 5) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  if (served == nullptr || !packer().gather(python, given[4], head_of(python, given[3]))) return answer(Outcome::kLeft);
  const ToOne from{int_of(given[1]), int_of(given[2])};
  const std::vector<Piece> pieces = packer().pieces();
  Outcome outcome;
  {
    const Unlocked others;
    outcome = receive_message(*served, from, pieces);
  }
  return answer(outcome);
}

void* ps_receiving_broadcast(void* self, void* const* given, std::ptrdiff_t count) {  // …, word, head, list
  if (count != 4) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  if (served == nullptr || !packer().gather(python, given[3], head_of(python, given[2]))) return answer(Outcome::kLeft);
  const Told told = told_of(given[1]);
  const std::vector<Piece> pieces = packer().pieces();
  Outcome outcome;
  {
    const Unlocked others;
    outcome = receive_broadcast(*served, told, source_of(told), pieces);
  }
  return answer(outcome);
}

void* ps_receiving_object(void* self, void* const* given, std::ptrdiff_t count) {  // …, src, method
  if (count != 3) return nullptr;
  const std::shared_ptr<Served> served = served_of(python_of(self), given[0]);
  if (served == nullptr) return answer(Outcome::kLeft);
  const ToOne from{int_of(given[1]), int_of(given[2])};
  return BytesTaker().run([&](Taker& taker) { return receive_object(*served, from, taker); });
}

void* ps_receiving_broadcast_object(void* self, void* const* given, std::ptrdiff_t count) {  // …, word
  if (count != 2) return nullptr;
  const std::shared_ptr<Served> served = served_of(python_of(self), given[0]);
  if (served == nullptr) return answer(Outcome::kLeft);
  const Told told = told_of(given[1]);
  return BytesTaker().run(
      [&](Taker& taker) { return receive_broadcast_object(*served, told, source_of(told), taker); });
}

}  // extern "C"
#pragma GCC visibility pop
