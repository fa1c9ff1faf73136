#include "store.h"

#include <charconv>
#include <utility>

#include "hmac.h"

namespace parallel_state::control {
namespace {

constexpr std::size_t kPartBytes = 4;
constexpr std::size_t kMostHeldBytes = 64U << 10;
constexpr std::size_t kMostQuestionBytes = 64U << 10;

struct Problem {
  std::string text;
};

std::int64_t number_in(const Bytes& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return value;
  throw Problem{"add needs integers of 64 bits, but one of " + std::to_string(text.size()) + " bytes is none"};
}

void expect(std::size_t count, const std::vector<Bytes>& parts) {
  if (parts.size() == count) return;
  throw Problem{"the request takes " + std::to_string(count) + " parts, but has " + std::to_string(parts.size())};
}

}  // namespace

Bytes prove(std::string_view token, bool is_dialer, std::string_view nonce_of_dialer,
            std::string_view nonce_of_listener, Proc dialer, Proc listener) {
  Writer writer;
  writer.number(static_cast<std::uint8_t>(is_dialer)).text(nonce_of_dialer).text(nonce_of_listener);
  return hmac_sha256(token, writer.number(dialer).number(listener).take());
}

Seal::Seal(std::string_view token, bool to_listener, std::string_view nonce_of_guest,
           std::string_view nonce_of_listener) {
  Writer writer;  // its first byte differs from a proof's, so no proof equals a key
  writer.text(to_listener ? "to listener" : "to guest").text(nonce_of_guest).text(nonce_of_listener);
  key_ = hmac_sha256(token, writer.take());
}

Bytes Seal::mac(std::string_view body) { return hmac_sha256(key_, Writer().number(number_++).text(body).take()); }

Bytes Seal::seal(Bytes body) {
  const Bytes end = mac(body);
  return body.append(end);
}

bool Seal::open(Bytes* body) {
  if (body->size() < kSealBytes) return false;
  const Bytes end = body->substr(body->size() - kSealBytes);
  body->resize(body->size() - kSealBytes);
  return equal_secrets(end, mac(*body));
}

// Returns false if the request is malformed, or the guest waits and this is no kCancel.
bool Store::ask(int guest, std::string_view request, std::vector<Output>* out) {
  Guest& from = guests_.at(guest);
  std::uint8_t code = 0;
  std::vector<Bytes> parts;
  if (!decode_store(request, &code, &parts)) return false;
  const auto call = static_cast<StoreCall>(code);
  if (call == StoreCall::kCancel) {
    if (end_wait(guest)) reply(guest, encode_store(kCancelled, {}), out);
    return parts.empty();
  }
  if (!from.missing.empty()) return false;
  if (call == StoreCall::kQuestion) {
    if (parts.size() != 1 || parts[0].size() > kMostQuestionBytes) return false;
    from.asks = true;
    out->push_back({guest, parts[0], true});
  } else if (call == StoreCall::kGet || call == StoreCall::kWait) {
    from.gets = call == StoreCall::kGet;
    from.keys = std::move(parts);
    wait_for(guest, out);
  } else {
    try {
      const auto answer = carry_out(call, parts, guest, out);
      reply(guest, encode_store(kReplied, answer), out);
    } catch (const Problem& problem) {
      reply(guest, encode_store(kProblem, {problem.text}), out);
    }
  }
  return true;
}

std::vector<Bytes> Store::carry_out(StoreCall call, const std::vector<Bytes>& parts, int guest,
                                    std::vector<Output>* out) {
  const auto value_of = [&](const Bytes& key) {
    const auto found = values_.find(key);
    return found == values_.end() ? Bytes() : found->second;
  };
  switch (call) {
    case StoreCall::kSet:
      if (parts.empty() || parts.size() % 2 != 0) throw Problem{"keys and values must come in pairs"};
      for (std::size_t i = 0; i < parts.size(); i += 2) set(parts[i], parts[i + 1], out);
      return {};
    case StoreCall::kHold:
      expect(2, parts);
      if (parts[0].size() + parts[1].size() > kMostHeldBytes) throw Problem{"a held key and its value are too large"};
      set(parts[0], parts[1], out);
      holders_[parts[0]] = guest;
      return {};
    case StoreCall::kAdd: {
      expect(2, parts);
      const Bytes before = value_of(parts[0]);
      std::int64_t sum = 0;
      if (__builtin_add_overflow(before.empty() ? 0 : number_in(before), number_in(parts[1]), &sum)) {
        throw Problem{"the sum of add has more than 64 bits"};
      }
      set(parts[0], std::to_string(sum), out);
      return {std::to_string(sum)};
    }
    case StoreCall::kCheck: {
      bool all = true;
      for (const Bytes& key : parts) all = all && values_.count(key) != 0;
      return {all ? "1" : "0"};
    }
    case StoreCall::kCompareSet: {
      expect(3, parts);
      const bool is_set = values_.count(parts[0]) != 0;
      const Bytes before = value_of(parts[0]);
      if (before != parts[1]) return {is_set ? before : parts[1]};
      set(parts[0], parts[2], out);
      return {parts[2]};
    }
    case StoreCall::kDelete:
      expect(1, parts);
      holders_.erase(parts[0]);
      return {values_.erase(parts[0]) != 0 ? "1" : "0"};
    case StoreCall::kCount: expect(0, parts); return {std::to_string(values_.size())};
    case StoreCall::kAppend:
      expect(2, parts);
      set(parts[0], value_of(parts[0]) + parts[1], out);
      return {};
    default: throw Problem{"there is no request of kind " + std::to_string(static_cast<int>(call))};
  }
}

void Store::wait_for(int guest, std::vector<Output>* out) {
  Guest& from = guests_.at(guest);
  std::size_t size = 0;
  std::vector<Bytes> values;
  for (const Bytes& key : from.keys) {
    const auto found = values_.find(key);
    if (found == values_.end()) from.missing.insert(key);
    else size += found->second.size() + kPartBytes;
  }
  for (const Bytes& key : from.missing) waiting_[key].insert(guest);
  if (!from.missing.empty()) return;
  if (from.gets && size > kMostStoreBytes) {
    const std::string text = std::to_string(from.keys.size()) + " values have " + std::to_string(size);
    return reply(guest, encode_store(kProblem, {text + " bytes; request fewer keys in one call"}), out);
  }
  for (const Bytes& key : std::exchange(from.keys, {})) {
    if (from.gets) values.push_back(values_.at(key));
  }
  reply(guest, encode_store(kReplied, values), out);
}

void Store::set(const Bytes& key, Bytes value, std::vector<Output>* out) {
  if (key.size() + value.size() + 2 * kPartBytes > kMostStoreBytes) {
    throw Problem{"a value and its key must have less than " + std::to_string(kMostStoreBytes) + " bytes"};
  }
  values_[key] = std::move(value);
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return;
  const std::set<int> guests = std::move(found->second);
  waiting_.erase(found);
  for (const int guest : guests) {
    auto& missing = guests_.at(guest).missing;
    missing.erase(key);
    if (missing.empty()) wait_for(guest, out);  // another key may have been deleted
  }
}

bool Store::end_wait(int guest) {
  const auto missing = std::exchange(guests_.at(guest).missing, {});
  for (const Bytes& key : missing) {
    const auto guests = waiting_.find(key);
    guests->second.erase(guest);
    if (guests->second.empty()) waiting_.erase(guests);
  }
  return !missing.empty();
}

bool Store::admit(int guest, std::string_view token, std::string_view handed, std::vector<Output>* out) {
  const std::string_view theirs = handed.substr(0, kNonceBytes), mine = handed.substr(kNonceBytes, kNonceBytes);
  Guest& admitted = guests_[guest];
  admitted.parser = Parser::after_hello(handed.substr(2 * kNonceBytes));
  admitted.in = Seal(token, true, theirs, mine);
  admitted.out = Seal(token, false, theirs, mine);
  return take(guest, {}, out);
}

bool Store::take(int guest, std::string_view bytes, std::vector<Output>* out) {
  Guest& from = guests_.at(guest);
  from.parser.push(bytes);
  Hello hello;
  Frame frame;
  Parser::Result result;
  while ((result = from.parser.next(&hello, &frame)) == Parser::Result::kFrame) {
    if (frame.kind != FrameKind::kStoreCall || from.asks || !from.in.open(&frame.body)) return false;
    if (!ask(guest, frame.body, out)) return false;
  }
  return result == Parser::Result::kNeedsMore;
}

void Store::answer(int guest, const Bytes& bytes, std::vector<Output>* out) {
  const auto found = guests_.find(guest);
  if (found == guests_.end() || !std::exchange(found->second.asks, false)) return;
  reply(guest, encode_store(kReplied, {bytes.substr(0, kMostStoreBytes - kSealBytes)}), out);
}

void Store::drop(int guest, std::vector<Output>* out) {
  if (guests_.count(guest) == 0) return;
  end_wait(guest);
  guests_.erase(guest);
  std::vector<Bytes> held;
  for (const auto& [key, holder] : holders_) {
    if (holder == guest) held.push_back(key);
  }
  for (const Bytes& key : held) {
    holders_.erase(key);
    Bytes value = std::move(values_.at(key));
    values_.erase(key);
    try {
      set("gone/" + key, std::move(value), out);
    } catch (const Problem&) {  // beyond the size limit
      set("gone/" + key, "", out);
    }
  }
}

void Store::reply(int guest, Bytes body, std::vector<Output>* out) {
  body = guests_.at(guest).out.seal(std::move(body));
  out->push_back({guest, encode(Frame{FrameKind::kStoreReply, 0, 0, std::move(body)})});
}

}  // namespace parallel_state::control
