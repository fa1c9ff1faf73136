#include "store.h"

#include <charconv>
#include <utility>

#include "hmac.h"

namespace parallel_state::control {
namespace {

constexpr std::size_t kPartBytes = 4;  // size of a part's length field
constexpr std::size_t kMostHeldBytes = 64U << 10;

// Internal: the request can't be carried out.
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
  Writer writer;  // differs from the first byte of a proof, so that no proof equals a key
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

bool Table::ask(int client, std::string_view request, std::vector<Reply>* replies) {
  std::uint8_t code = 0;
  std::vector<Bytes> parts;
  if (!decode_store(request, &code, &parts)) return false;
  const auto call = static_cast<StoreCall>(code);
  if (call == StoreCall::kCancel) {
    if (end_wait(client)) replies->push_back({client, encode_store(kCancelled, {})});
    return parts.empty();
  }
  if (waits(client)) return false;
  try {
    if (call == StoreCall::kGet || call == StoreCall::kWait) {
      wait_for(client, call == StoreCall::kGet, std::move(parts), replies);
    } else {
      Bytes reply = answer(call, parts, client, replies);
      replies->push_back({client, std::move(reply)});
    }
  } catch (const Problem& problem) {
    replies->push_back({client, encode_store(kProblem, {problem.text})});
  }
  return true;
}

Bytes Table::answer(StoreCall call, const std::vector<Bytes>& parts, int client, std::vector<Reply>* replies) {
  const auto value_of = [&](const Bytes& key) {
    const auto found = values_.find(key);
    return found == values_.end() ? Bytes() : found->second;
  };
  switch (call) {
    case StoreCall::kSet:
      if (parts.empty() || parts.size() % 2 != 0) throw Problem{"keys and values must come in pairs"};
      for (std::size_t i = 0; i < parts.size(); i += 2) set(parts[i], parts[i + 1], replies);
      return encode_store(kReplied, {});
    case StoreCall::kHold:
      expect(2, parts);
      if (parts[0].size() + parts[1].size() > kMostHeldBytes) throw Problem{"a held key and its value are too large"};
      set(parts[0], parts[1], replies);
      holders_[parts[0]] = client;
      return encode_store(kReplied, {});
    case StoreCall::kAdd: {
      expect(2, parts);
      const Bytes before = value_of(parts[0]);
      std::int64_t sum = 0;
      if (__builtin_add_overflow(before.empty() ? 0 : number_in(before), number_in(parts[1]), &sum)) {
        throw Problem{"the sum of add has more than 64 bits"};
      }
      set(parts[0], std::to_string(sum), replies);
      return encode_store(kReplied, {std::to_string(sum)});
    }
    case StoreCall::kCheck: {
      bool all = true;
      for (const Bytes& key : parts) all = all && values_.count(key) != 0;
      return encode_store(kReplied, {all ? "1" : "0"});
    }
    case StoreCall::kCompareSet: {
      expect(3, parts);
      const bool is_set = values_.count(parts[0]) != 0;
      const Bytes before = value_of(parts[0]);
      if (before != parts[1]) return encode_store(kReplied, {is_set ? before : parts[1]});
      set(parts[0], parts[2], replies);
      return encode_store(kReplied, {parts[2]});
    }
    case StoreCall::kDelete:
      expect(1, parts);
      holders_.erase(parts[0]);
      return encode_store(kReplied, {values_.erase(parts[0]) != 0 ? "1" : "0"});
    case StoreCall::kCount: expect(0, parts); return encode_store(kReplied, {std::to_string(values_.size())});
    case StoreCall::kAppend:
      expect(2, parts);
      set(parts[0], value_of(parts[0]) + parts[1], replies);
      return encode_store(kReplied, {});
    default: throw Problem{"there is no request of kind " + std::to_string(static_cast<int>(call))};
  }
}

void Table::wait_for(int client, bool gets, std::vector<Bytes> keys, std::vector<Reply>* replies) {
  Wait wait{gets, std::move(keys), {}};
  std::size_t size = 0;
  std::vector<Bytes> values;
  for (const Bytes& key : wait.keys) {
    const auto found = values_.find(key);
    if (found == values_.end()) wait.missing.insert(key);
    else size += found->second.size() + kPartBytes;
  }
  if (!wait.missing.empty()) {
    for (const Bytes& key : wait.missing) waiting_[key].insert(client);
    waits_[client] = std::move(wait);
    return;
  }
  if (gets && size > kMostStoreBytes) {
    throw Problem{std::to_string(wait.keys.size()) + " values have " + std::to_string(size) +
                  " bytes; request fewer keys in one call"};
  }
  for (const Bytes& key : wait.keys) {
    if (gets) values.push_back(values_.at(key));
  }
  replies->push_back({client, encode_store(kReplied, values)});
}

void Table::set(const Bytes& key, Bytes value, std::vector<Reply>* replies) {
  if (key.size() + value.size() + 2 * kPartBytes > kMostStoreBytes) {
    throw Problem{"a value and its key must have less than " + std::to_string(kMostStoreBytes) + " bytes"};
  }
  values_[key] = std::move(value);
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return;
  const std::set<int> clients = std::move(found->second);
  waiting_.erase(found);
  for (const int client : clients) {
    Wait& wait = waits_.at(client);
    wait.missing.erase(key);
    if (!wait.missing.empty()) continue;
    const Wait ready = std::move(wait);
    waits_.erase(client);
    try {
      wait_for(client, ready.gets, ready.keys, replies);  // another of its keys was deleted
    } catch (const Problem& problem) {
      replies->push_back({client, encode_store(kProblem, {problem.text})});
    }
  }
}

bool Table::end_wait(int client) {
  const auto wait = waits_.find(client);
  if (wait == waits_.end()) return false;
  for (const Bytes& key : wait->second.missing) {
    const auto clients = waiting_.find(key);
    clients->second.erase(client);
    if (clients->second.empty()) waiting_.erase(clients);
  }
  waits_.erase(wait);
  return true;
}

void Table::drop(int client, std::vector<Reply>* replies) {
  end_wait(client);
  std::vector<Bytes> held;
  for (const auto& [key, holder] : holders_) {
    if (holder == client) held.push_back(key);
  }
  for (const Bytes& key : held) {
    holders_.erase(key);
    Bytes value = std::move(values_.at(key));
    values_.erase(key);
    try {
      set("gone/" + key, std::move(value), replies);
    } catch (const Problem&) {  // the value grew beyond the bound
      set("gone/" + key, "", replies);
    }
  }
}

bool Store::admit(int guest, std::string_view token, std::string_view handed, std::vector<Output>* out) {
  const std::string_view theirs = handed.substr(0, kNonceBytes), mine = handed.substr(kNonceBytes, kNonceBytes);
  guests_[guest] = {Parser::after_hello(handed.substr(2 * kNonceBytes)), Seal(token, true, theirs, mine),
                    Seal(token, false, theirs, mine)};
  return take(guest, {}, out);
}

bool Store::take(int guest, std::string_view bytes, std::vector<Output>* out) {
  Guest& from = guests_.at(guest);
  from.parser.push(bytes);
  Hello hello;
  Frame frame;
  Parser::Result result;
  while ((result = from.parser.next(&hello, &frame)) == Parser::Result::kFrame) {
    std::vector<Table::Reply> replies;
    if (frame.kind != FrameKind::kStoreCall || from.asks || !from.in.open(&frame.body)) return false;
    if (!frame.body.empty() && frame.body[0] == static_cast<char>(StoreCall::kQuestion)) {
      std::uint8_t code = 0;
      std::vector<Bytes> parts;
      if (table_.waits(guest) || !decode_store(frame.body, &code, &parts) || parts.size() != 1) return false;
      if (parts[0].size() > kMostStatusBytes) return false;
      from.asks = true;
      out->push_back({guest, parts[0], true});
      continue;
    }
    if (!table_.ask(guest, frame.body, &replies)) return false;
    send(replies, out);
  }
  return result == Parser::Result::kNeedsMore;
}

void Store::answer(int guest, const Bytes& bytes, std::vector<Output>* out) {
  const auto found = guests_.find(guest);
  if (found == guests_.end() || !std::exchange(found->second.asks, false)) return;
  send({{guest, encode_store(kReplied, {bytes.substr(0, kMostStoreBytes - kSealBytes)})}}, out);
}

void Store::drop(int guest, std::vector<Output>* out) {
  std::vector<Table::Reply> replies;
  guests_.erase(guest);
  table_.drop(guest, &replies);
  send(replies, out);
}

void Store::send(const std::vector<Table::Reply>& replies, std::vector<Output>* out) {
  for (const auto& [guest, body] : replies) {
    out->push_back({guest, encode(Frame{FrameKind::kStoreReply, 0, 0, guests_.at(guest).out.seal(body)})});
  }
}

}  // namespace parallel_state::control
