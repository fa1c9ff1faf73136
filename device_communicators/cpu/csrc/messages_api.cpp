// Sends return an Outcome, or kStarted + the number of a transfer. Receives return the object, or NotImplemented if
// Python must receive it or raise. `self` is a `Python` of pack.h. Unless noted, arguments are the group's key, the
// rank and the method of a message to one rank, or the word of a broadcast.

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "calling.h"
#include "interrupt.h"
#include "messages.h"
#include "pack.h"
#include "released.h"
#include "transfers.h"
#include "unpack.h"

namespace {

using namespace parallel_state;

const Python& python_of(void* self) { return *static_cast<const Python*>(pointer_of(self)); }

Told told_of(void* word) { return {number_of(word), 0}; }

int source_of(Told told) { return static_cast<int>(told.word >> 32 & 255) - 1; }

std::shared_ptr<Served> served_of(const Python& python, void* key) {
  std::ptrdiff_t bytes = 0;
  const char* const text = python.utf8(key, &bytes);
  return text == nullptr ? nullptr : find_served({text, static_cast<std::size_t>(bytes)});
}

Piece piece_of(void* bytes) {
  return {const_cast<char*>(calling.as_bytes(bytes)), static_cast<std::uint64_t>(calling.bytes_size(bytes))};
}

bool raises() {
  void *type = nullptr, *value = nullptr, *traceback = nullptr;
  take_exception(&type, &value, &traceback);
  if (type != nullptr) calling.raise(type, value, traceback);
  return type != nullptr;
}

void* answer(Outcome outcome) {
  if (outcome == Outcome::kLeft && raises()) return nullptr;
  return calling.make_integer(static_cast<int>(outcome));
}

// Another thread may change the packed message's object, and a signal handler may pack another message.
class Kept {
 public:
  Kept() : pieces_(packer().pieces()), heads_(packer().heads()) {
    packer().hold();
    held_ = packer().take_held();
  }
  ~Kept() {
    if (handed_back_) return;
    packer().free();
    for (void* const object : held_) calling.let_go(object);
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  const std::vector<Piece>& pieces() const { return pieces_; }
  int heads() const { return heads_; }

  void hand_back() {
    packer().take_back(std::move(held_));
    handed_back_ = true;
  }

 private:
  std::vector<Piece> pieces_;
  int heads_;
  std::vector<void*> held_;
  bool handed_back_ = false;
};

struct Lasting {
  OutgoingMessage message;
  std::vector<char> written;
  std::vector<void*> objects;

  void take_packed() {
    const std::vector<Piece>& pieces = packer().pieces();
    const int heads = packer().heads();
    packer().hold();
    objects = packer().take_held();
    packer().free();
    const auto is_written = [](int at) { return at == 0 || at % 2 == 1; };
    std::size_t bytes = 0;
    for (int at = 0; at < heads; ++at) bytes += is_written(at) ? pieces[at].bytes : 0;
    written.reserve(bytes);
    for (int at = 0; at < heads; ++at) {
      Piece piece = pieces[at];
      message.head_bytes += piece.bytes;
      if (is_written(at)) {
        const char* const from = static_cast<const char*>(piece.address);
        piece.address = written.data() + written.size();
        written.insert(written.end(), from, from + piece.bytes);
      }
      message.head.push_back(piece);
    }
    message.tensors.assign(pieces.begin() + heads, pieces.end());
  }

  static constexpr void (*kRelease)(void*) = [](void* self) {
    const std::unique_ptr<Lasting> all(static_cast<Lasting*>(self));
    released().add(all->objects.data(), all->objects.size());
  };
};
constexpr TransferUser kLasting{nullptr, nullptr, Lasting::kRelease};
constexpr long long kStarted = 4;

// Only Python moves pending receives, so this thread can't wait meanwhile.
void* send(Served& served, ToOne to, bool waits, bool may_start) {
  const std::shared_ptr<Transfers> transfers = connections_of(served, to.rank);
  if (transfers == nullptr) {
    const Outcome outcome = send_message(served, to, packer().pieces(), packer().heads());
    if (outcome == Outcome::kNoRoom && may_start) packer().hold();  // `ps_packed` returns it
    return answer(outcome);
  }
  if (waits && transfers->has_reserved()) {
    if (!may_start) return answer(Outcome::kLeft);
    waits = false;
  }
  std::int64_t number = kRefusedTransfer;
  const Released::Visit here;
  try {
    auto lasting = std::make_unique<Lasting>();
    lasting->take_packed();
    const Unlocked others;
    Lasting* const kept = lasting.release();
    number = start_message(served, *transfers, to, kept->message, &kLasting, kept, waits);
  } catch (const std::bad_alloc&) {
    return calling.no_memory();
  }
  released().let_go();
  if (number > 0) return calling.make_integer(kStarted + number);
  return answer(number == kDoneTransfer ? Outcome::kDone : Outcome::kLeft);
}

std::vector<Piece> pieces_of(void* bytes) {
  std::vector<Piece> pieces(static_cast<std::size_t>(calling.bytes_size(bytes)) / sizeof(Piece));
  if (!pieces.empty()) std::memcpy(pieces.data(), calling.as_bytes(bytes), pieces.size() * sizeof(Piece));
  return pieces;
}

template <typename Call>
Status run_between_hosts(std::uint64_t group, Call call) {
  const std::shared_ptr<Handle> handle = find(group);
  if (handle == nullptr || handle->hosts() == nullptr) return Status::kClosed;
  if (handle->is_held()) return call(*handle);
  const Entered entered{*handle};
  return entered ? call(*handle) : Status::kBusy;
}

// If there is no room, and the message is `wanted`, `ps_packed` returns it.
Outcome broadcast(Served& served, Told told, bool wanted) {
  Kept kept;
  const Outcome outcome = without_lock([&] { return broadcast_message(served, told, kept.pieces(), kept.heads()); });
  if (outcome == Outcome::kNoRoom && wanted) kept.hand_back();
  return outcome;
}

// A hook decodes heads that the library can't, and returns addresses and sizes for the tensors.
class Received final : public Taker, private Tensors {
 public:
  static constexpr std::ptrdiff_t kArguments = 8;

  // The arguments; missing ones are None or 0. Maximum bytes of a head; size of the all-gather group, and a function
  // that gathers a slice to a tensor; a dict of tensors to fill; whether tensors may be views; head and Form of the
  // expected list; the hook.
  Received(const Python& python, void* const* given, std::shared_ptr<Handle> group)
      : python_(python),
        group_(std::move(group)),
        limit_(number_of(given[0])),
        slices_(number_of(given[1])),
        gather_(given[2]),
        out_(given[3] == python.none_object ? nullptr : given[3]),
        views_(given[4] == python.true_object && python.view_tensor != nullptr),
        expected_(given[5] == python.none_object ? nullptr : given[5]),
        form_(static_cast<const Form*>(pointer_of(given[6]))),
        hook_(given[7]) {}
  ~Received() override {
    drop();
    for (void* const tensor : tensors_) let_go(tensor);
  }

  std::uint64_t most_head_bytes() const override {
    constexpr std::uint64_t kMostError = 4096;
    return std::max(kMostError, kHeadStart + limit_);
  }
  bool wants_loans() const override { return views_; }
  char* head_buffer(std::uint64_t bytes) override {
    head_.resize(bytes);
    return head_.data();
  }

  bool take_head(const Head& head, std::vector<Piece>* pieces) override {
    calling.restore_thread(thread_);
    const bool is_whole = head.bytes == head.head_bytes && head.bytes <= kHeadStart + limit_;
    const bool is_known =
        is_whole && python_.make_tensor != nullptr && (expected_ != nullptr ? plan_list(head) : plan_value(head));
    bool is_taken = is_known;
    if (!is_known && has_views_) {
      head.loans->clear();
      calling.no_memory();
    } else if (!is_known) {
      is_taken = (is_whole && expected_ == nullptr && plan_plain(head)) || ask(head, pieces);
    }
    if (is_known && head.loans->empty()) {
      for (const Piece& piece : places_) {
        if (piece.bytes != 0) pieces->push_back(piece);
      }
    }
    if (is_known) head.loans->clear();
    thread_ = head.is_at_hand ? nullptr : calling.save_thread();
    return is_taken;
  }

  template <typename Receive>
  void* run(Receive receive) {
    thread_ = calling.save_thread();
    const Outcome outcome = receive(*this);
    if (thread_ != nullptr) calling.restore_thread(thread_);
    if (outcome == Outcome::kRaised || (outcome == Outcome::kLeft && raises())) return nullptr;
    return outcome == Outcome::kDone ? result() : python_.keep(python_.not_implemented);
  }

 private:
  void let_go(void* object) const {
    if (object != nullptr) calling.let_go(object);
  }
  void drop() {
    let_go(value_);
    value_ = nullptr;
  }

  bool plan_plain(const Head& head) {
    if (python_.make_tensor == nullptr && unpacker_.read(python_, head.data, head.bytes, head.tensor_bytes, 0)) {
      value_ = unpacker_.build(*this);
    }
    return value_ != nullptr;
  }

  bool plan_value(const Head& head) {
    if (!unpacker_.read(python_, head.data, head.bytes, head.tensor_bytes, slices_)) return false;
    const std::size_t count = unpacker_.count();
    forms_.clear();
    for (std::size_t index = 0; index < count; ++index) forms_.push_back(unpacker_.form(index));
    // A trial first: a view keeps its loan, and the caller's tensors may be written only if all fit.
    if (!head.loans->empty() || out_ != nullptr) {
      is_trial_ = true;
      value_ = unpacker_.build(*this);
      is_trial_ = false;
      if (value_ == nullptr) return false;
      drop();
      fills_ = out_ != nullptr && misfits_ == 0 && fits_ == python_.dict_size(out_);
    }
    if (!prepare(head)) return false;
    value_ = unpacker_.build(*this);
    return value_ != nullptr && make_all() ? true : (drop(), false);
  }

  bool plan_list(const Head& head) {
    const auto bytes = static_cast<std::uint64_t>(calling.bytes_size(expected_));
    if (form_ == nullptr || bytes != head.bytes || std::memcmp(calling.as_bytes(expected_), head.data, bytes) != 0)
      return false;
    const std::int64_t* at = form_->layout;
    forms_.clear();
    for (std::int64_t index = 0; index < form_->count; ++index) {
      std::uint64_t size = static_cast<std::uint64_t>(python_.dtype_bytes[at[0]]);
      for (std::int64_t dim = 0; dim < at[1]; ++dim) size *= static_cast<std::uint64_t>(at[2 + dim]);
      forms_.push_back({nullptr, size, at[0], at[1], at + 2});
      at += 2 + at[1];
    }
    return prepare(head) && make_all();
  }

  bool prepare(const Head& head) {
    const std::size_t count = forms_.size();
    tensors_.assign(count, nullptr);
    places_.assign(count, Piece{nullptr, 0});
    loans_.assign(count, nullptr);
    if (head.loans->empty()) return true;
    auto loan = head.loans->begin();
    for (std::size_t index = 0; index < count; ++index) {
      if (forms_[index].bytes == 0) continue;
      if (loan == head.loans->end() || loan->bytes != forms_[index].bytes) return false;
      loans_[index] = &*loan++;
    }
    return loan == head.loans->end();
  }

  bool make_all() {
    for (std::size_t index = 0; index < forms_.size(); ++index) {
      if (at(index, nullptr) == nullptr) return false;
    }
    return true;
  }

  void* at(std::size_t index, void* key) override {
    TensorForm form = forms_[index];
    if (is_trial_) {
      void* const fit = out_ == nullptr || key == nullptr ? nullptr : buffer(key, &form);
      if (fit != nullptr) calling.let_go(fit);
      if (key != nullptr) ++(fit != nullptr ? fits_ : misfits_);
      return const_cast<void*>(python_.none_object);
    }
    if (tensors_[index] != nullptr) return tensors_[index];
    void* made = nullptr;
    if (loans_[index] != nullptr) {
      has_views_ = true;
      made = python_.view_tensor(&group_, &form, loans_[index], python_.wrap);
    } else {
      if (fills_ && key != nullptr) made = buffer(key, &form);
      if (made == nullptr) made = python_.make_tensor(&group_, &form, python_.wrap);
      places_[index] = {form.data, form.bytes};
    }
    return tensors_[index] = made;
  }

  void* buffer(void* key, TensorForm* form) const {
    void* const found = python_.dict_item(out_, key);
    TensorForm own{};
    if (found == nullptr || !is_among(type_of(python_, found), python_.others, python_.other_count)) return nullptr;
    if (!describe(python_, found, &own) || own.dtype != form->dtype || own.dims != form->dims) return nullptr;
    if (!std::equal(own.sizes, own.sizes + own.dims, form->sizes)) return nullptr;
    form->data = own.data;
    return python_.keep(found);
  }

  bool ask(const Head& head, std::vector<Piece>* pieces) {
    python_.forget_error();
    void* const arguments[] = {calling.make_bytes(head.data, static_cast<std::ptrdiff_t>(head.bytes)),
                               calling.make_integer(static_cast<long long>(head.head_bytes)),
                               calling.make_integer(static_cast<long long>(head.tensor_bytes))};
    void* answered = nullptr;
    if (arguments[0] != nullptr && arguments[1] != nullptr && arguments[2] != nullptr) {
      answered = python_.call(hook_, arguments, 3, nullptr);
    }
    for (void* const argument : arguments) let_go(argument);
    if (answered == nullptr) return false;
    const auto bytes = static_cast<std::size_t>(calling.bytes_size(answered));
    pieces->resize(bytes / sizeof(Piece));
    if (bytes != 0) std::memcpy(static_cast<void*>(pieces->data()), calling.as_bytes(answered), bytes);
    calling.let_go(answered);
    has_asked_ = true;
    return true;
  }

  void* result() {
    if (has_asked_) return python_.keep(hook_);
    if (expected_ != nullptr) {
      void* const made = python_.make_list(static_cast<std::ptrdiff_t>(tensors_.size()));
      for (std::size_t index = 0; made != nullptr && index < tensors_.size(); ++index) {
        python_.set_item(made, static_cast<std::ptrdiff_t>(index), std::exchange(tensors_[index], nullptr));
      }
      return made;
    }
    bool is_cut = false;
    for (std::size_t index = 0; index < tensors_.size(); ++index) {
      if (!unpacker_.is_cut(index)) continue;
      if (!gather(index)) return nullptr;
      is_cut = true;
    }
    if (!is_cut) return std::exchange(value_, nullptr);
    void* const made = unpacker_.build(*this);
    return made == nullptr ? calling.no_memory() : made;
  }

  bool gather(std::size_t index) {
    const std::vector<std::int64_t>& sizes = unpacker_.sizes(index);
    void* const shape = python_.make_list(static_cast<std::ptrdiff_t>(sizes.size()));
    if (shape == nullptr) return false;
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      python_.set_item(shape, static_cast<std::ptrdiff_t>(dim), calling.make_integer(sizes[dim]));
    }
    void* const arguments[] = {tensors_[index], shape};
    void* const whole = python_.call(gather_, arguments, 2, nullptr);
    calling.let_go(shape);
    if (whole == nullptr) return false;
    calling.let_go(std::exchange(tensors_[index], whole));
    return true;
  }

  const Python& python_;
  const std::shared_ptr<Handle> group_;
  const std::uint64_t limit_, slices_;
  void *const gather_, *const out_;
  const bool views_;
  void* const expected_;
  const Form* const form_;
  void* const hook_;
  void* thread_ = nullptr;  // null while this thread has the GIL
  std::vector<char> head_;
  Unpacker unpacker_;
  std::vector<TensorForm> forms_;
  std::vector<void*> tensors_;
  std::vector<Piece> places_;
  std::vector<const Loan*> loans_;
  void* value_ = nullptr;
  std::ptrdiff_t fits_ = 0, misfits_ = 0;
  bool fills_ = false;
  bool is_trial_ = false, has_views_ = false, has_asked_ = false;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* ps_sending_dict(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 6) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  const auto& form = *static_cast<const Form*>(pointer_of(given[4]));
  if (served == nullptr || !packer().gather(python, given[3], form, piece_of(given[5]))) {
    return answer(Outcome::kLeft);
  }
  return send(*served, {int_of(given[1]), int_of(given[2])}, true, false);
}

void* ps_broadcasting_dict(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 5) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  const auto& form = *static_cast<const Form*>(pointer_of(given[3]));
  if (served == nullptr || !packer().gather(python, given[2], form, piece_of(given[4]))) {
    return answer(Outcome::kLeft);
  }
  return answer(broadcast(*served, told_of(given[1]), false));
}

void* ps_sending_object(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 9) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  const Cut cut{number_of(given[5]), number_of(given[6]), given[7] == python.none_object ? nullptr : given[7]};
  if (served == nullptr || !packer().pack(python, given[3], python.depth, number_of(given[4]), cut)) {
    return answer(Outcome::kLeft);
  }
  return send(*served, {int_of(given[1]), int_of(given[2])}, given[8] == python.true_object, true);
}

void* ps_broadcasting_object(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 4) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  if (served == nullptr || !packer().pack(python, given[2], python.depth, number_of(given[3]))) {
    return answer(Outcome::kLeft);
  }
  return answer(broadcast(*served, told_of(given[1]), true));
}

void* ps_receiving(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 5) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  if (served == nullptr || !packer().gather(python, given[4], piece_of(given[3]))) return answer(Outcome::kLeft);
  const ToOne from{int_of(given[1]), int_of(given[2])};
  const std::vector<Piece> pieces = packer().pieces();
  return answer(without_lock([&] { return receive_message(*served, from, pieces); }));
}

void* ps_receiving_broadcast(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 4) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  if (served == nullptr || !packer().gather(python, given[3], piece_of(given[2]))) return answer(Outcome::kLeft);
  const Told told = told_of(given[1]);
  const std::vector<Piece> pieces = packer().pieces();
  return answer(without_lock([&] { return receive_broadcast(*served, told, source_of(told), pieces); }));
}

void* ps_receiving_value(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 3 + Received::kArguments) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  if (served == nullptr) return python.keep(python.not_implemented);
  const ToOne from{int_of(given[1]), int_of(given[2])};
  return Received(python, given + 3, served->share()).run([&](Taker& taker) {
    return receive_value(*served, from, taker);
  });
}

void* ps_receiving_broadcast_value(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 2 + Received::kArguments) return nullptr;
  const Python& python = python_of(self);
  const std::shared_ptr<Served> served = served_of(python, given[0]);
  if (served == nullptr) return python.keep(python.not_implemented);
  const Told told = told_of(given[1]);
  return Received(python, given + 2, served->share()).run([&](Taker& taker) {
    return receive_broadcast_value(*served, told, source_of(told), taker);
  });
}

// The caller keeps the end open.
void* ps_queue_receiving(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 4 + Received::kArguments) return nullptr;
  const Python& python = python_of(self);
  auto& open = *static_cast<OpenReader*>(pointer_of(given[0]));
  const std::uint64_t number = number_of(given[1]);
  const double timeout_s = python.number(given[2]);
  return Received(python, given + 4, find(number_of(given[3]))).run([&](Taker& taker) {
    return receive_value(open, number, timeout_s, taker);
  });
}

void* ps_transfers_sending(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 7) return nullptr;
  const auto transfers = shared<Transfers>(given[0]);
  const std::uint64_t more_heads = number_of(given[5]);
  std::int64_t number = kRefusedTransfer;
  const Released::Visit here;
  try {
    auto lasting = std::make_unique<Lasting>();
    OutgoingMessage& message = lasting->message;
    message.head.push_back(piece_of(given[3]));
    const std::vector<Piece> pieces = pieces_of(given[4]);
    const auto end = pieces.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(more_heads, pieces.size()));
    message.head.insert(message.head.end(), pieces.begin(), end);
    message.tensors.assign(end, pieces.end());
    std::uint64_t bytes = 0;
    for (const Piece& piece : message.head) message.head_bytes += piece.bytes;
    for (const Piece& piece : message.tensors) bytes += piece.bytes;
    calling.hold(given[6]);
    lasting->objects.push_back(given[6]);
    const int dst = int_of(given[1]), tag = int_of(given[2]);
    const Unlocked others;
    Lasting* const kept = lasting.release();
    number = transfers->start(
        {dst, 1, tag, kMessageDtype, nullptr, message.head_bytes + bytes, 0, &kLasting, kept, &kept->message}, false);
  } catch (const std::bad_alloc&) {
    return calling.no_memory();
  }
  released().let_go();
  return calling.make_integer(number);
}

// Timeout in us.
void* ps_transfers_receiving(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 6 + Received::kArguments) return nullptr;
  const Python& python = python_of(self);
  const auto transfers = shared<Transfers>(given[0]);
  const int src = int_of(given[1]), tag = int_of(given[2]);
  const double timeout_s = seconds_of(given[3]);
  auto* const report = static_cast<QueueReport*>(pointer_of(given[5]));
  return Received(python, given + 6, find(number_of(given[4]))).run([&](Taker& taker) {
    return receive_value(*transfers, src, tag, timeout_s, taker, report);
  });
}

void* ps_group_broadcasting(void*, void* const* given, std::ptrdiff_t count) {
  if (count != 6) return nullptr;
  const Told told{number_of(given[1]), number_of(given[2])};
  std::vector<Piece> pieces = pieces_of(given[4]);
  pieces.insert(pieces.begin(), piece_of(given[3]));
  const int heads = 1 + int_of(given[5]);
  const std::uint64_t group = number_of(given[0]);
  const Status status = without_lock([&] {
    return run_between_hosts(group, [&](Handle& handle) { return broadcast_entered(handle, told, pieces, heads); });
  });
  return calling.make_integer(static_cast<int>(status));
}

// The Status is in the report's `broken`.
void* ps_group_receiving(void* self, void* const* given, std::ptrdiff_t count) {
  if (count != 5 + Received::kArguments) return nullptr;
  const Told told{number_of(given[1]), number_of(given[2])};
  const std::uint64_t group = number_of(given[0]);
  const int src = int_of(given[3]);
  auto* const report = static_cast<QueueReport*>(pointer_of(given[4]));
  return Received(python_of(self), given + 5, find(group)).run([&](Taker& taker) {
    HostsGroup::Taken taken;
    const Status status =
        run_between_hosts(group, [&](Handle& handle) { return receive_entered(handle, told, src, taker, &taken); });
    report->broken = static_cast<std::int64_t>(status);
    report->head_bytes = static_cast<std::int64_t>(taken.head_bytes);
    report->total_bytes = static_cast<std::int64_t>(taken.head_bytes + taken.tensor_bytes);
    return taken.is_refused ? Outcome::kRaised : status == Status::kDone ? Outcome::kDone : Outcome::kLeft;
  });
}

}  // extern "C"
#pragma GCC visibility pop
