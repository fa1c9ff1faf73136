// The wire format: one hello, then frames. Integers are little-endian.
//
// Only the hello is frozen. The first malformed byte ends the stream.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace parallel_state::control {

using Bytes = std::string;
using Nanos = std::int64_t;
using Proc = std::uint64_t;  // 0: none

inline constexpr std::uint16_t kVersion = 3;
inline constexpr std::uint16_t kOldestVersion = 3;
inline constexpr std::size_t kHelloBytes = 20;
inline constexpr std::size_t kHeadBytes = 24;
inline constexpr std::size_t kNonceBytes = 16;
inline constexpr std::size_t kMostBodyBytes = 32U << 20;
inline constexpr std::size_t kMostStrangerBytes = 64;
inline constexpr std::size_t kMostValueBytes = 4096;
inline constexpr std::size_t kMostTextBytes = 256;
inline constexpr std::size_t kMostMembers = 4096;

struct Hello {
  std::uint16_t version = kVersion;
  std::uint16_t oldest = kOldestVersion;
  std::uint32_t build = 0;
};

enum class FrameKind : std::uint16_t {
  kNonce = 1,
  kIdentity,  // proof of the listener's token
  kBeat,
  kState,
  kValue,
  kAsk,
  kAnswer,
  kVerdict,
  kDone,    // member -> decider: delivered
  kForget,  // decider -> members: all are done
  kStoreCall,
  kStoreReply
};

struct Frame {
  FrameKind kind = FrameKind::kBeat;
  std::uint64_t world = 0;
  Proc from = 0;
  Bytes body;
};

Bytes encode(const Hello& hello);
Bytes encode(const Frame& frame);

class Writer {
 public:
  template <typename T>
  Writer& number(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i)
      bytes_.push_back(static_cast<char>(static_cast<std::uint64_t>(value) >> 8 * i));
    return *this;
  }
  Writer& text(std::string_view value) {
    number(static_cast<std::uint32_t>(value.size()));
    bytes_.append(value);
    return *this;
  }
  Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

// Equal on all machines.
class Digest {
 public:
  template <typename T>
  Digest& number(T value) {
    value_ = (value_ ^ static_cast<std::uint64_t>(value)) * 0x9e3779b97f4a7c15;
    value_ ^= value_ >> 29;
    return *this;
  }
  Digest& text(std::string_view value) {
    number(value.size());
    for (const char each : value) number(static_cast<unsigned char>(each));
    return *this;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 1;
};

// After the first value that exceeds the body, all are empty and `ok` is false.
class Reader {
 public:
  explicit Reader(std::string_view bytes, std::size_t most_bytes = kMostValueBytes, std::size_t most = kMostMembers)
      : bytes_(bytes), most_bytes_(most_bytes), most_(most) {}

  template <typename T>
  T number() {
    if (!has(sizeof(T))) return T{};
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) value |= std::uint64_t{static_cast<unsigned char>(bytes_[i])} << 8 * i;
    bytes_.remove_prefix(sizeof(T));
    return static_cast<T>(value);
  }
  Bytes text() {
    const auto size = number<std::uint32_t>();
    if (size > most_bytes_ || !has(size)) return fail();
    Bytes value(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return value;
  }
  std::size_t count() {
    const auto value = number<std::uint32_t>();
    if (value > most_ || value > bytes_.size()) return fail(), 0;
    return value;
  }
  bool ok() const { return ok_; }
  bool finished() const { return ok_ && bytes_.empty(); }

 private:
  bool has(std::size_t size) {
    if (ok_ && bytes_.size() >= size) return true;
    fail();
    return false;
  }
  Bytes fail() {
    ok_ = false;
    bytes_ = {};
    return {};
  }

  std::string_view bytes_;
  std::size_t most_bytes_, most_;
  bool ok_ = true;
};

#define PARALLEL_STATE_FIELDS(...)                \
  auto fields() { return std::tie(__VA_ARGS__); } \
  auto fields() const { return std::tie(__VA_ARGS__); }

template <typename Sink, typename T>
void put(Sink* sink, const T& value) {
  if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) sink->number(value);
  else put(sink, value.fields());
}
template <typename Sink, typename... T>
void put(Sink* sink, const std::tuple<T...>& values) {
  std::apply([&](const auto&... each) { (put(sink, each), ...); }, values);
}
template <typename Sink>
void put(Sink* sink, const Bytes& value) {
  sink->text(value);
}
template <typename Sink, typename First, typename Second>
void put(Sink* sink, const std::pair<First, Second>& value) {
  put(sink, value.first);
  put(sink, value.second);
}
template <typename Sink, typename T>
void put(Sink* sink, const std::shared_ptr<T>& value) {
  sink->number(static_cast<std::uint8_t>(value != nullptr));
  if (value != nullptr) put(sink, *value);
}
template <typename Sink, template <typename...> class List, typename... T>
auto put(Sink* sink, const List<T...>& values) -> decltype(values.begin(), void()) {
  sink->number(static_cast<std::uint32_t>(values.size()));
  for (const auto& value : values) put(sink, value);
}

template <typename... T>
Bytes packed(const T&... values) {
  Writer writer;
  (put(&writer, values), ...);
  return writer.take();
}
template <typename... T>
std::uint64_t digest_of(const T&... values) {
  Digest digest;
  (put(&digest, values), ...);
  return digest.value();
}

template <typename T>
void get(Reader* reader, T* value) {
  if constexpr (std::is_same_v<T, bool>) *value = reader->number<std::uint8_t>() != 0;
  else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) *value = reader->number<T>();
  else get(reader, value->fields());
}
template <typename... T>
void get(Reader* reader, std::tuple<T&...> values) {
  std::apply([&](auto&... each) { (get(reader, &each), ...); }, values);
}
inline void get(Reader* reader, Bytes* value) { *value = reader->text(); }
template <typename First, typename Second>
void get(Reader* reader, std::pair<First, Second>* value) {
  get(reader, &value->first);
  get(reader, &value->second);
}
template <typename T>
void get(Reader* reader, std::shared_ptr<const T>* value) {
  auto made = std::make_shared<T>();
  if (reader->number<std::uint8_t>() == 0) return;
  get(reader, made.get());
  *value = std::move(made);
}
template <typename T>
void get(Reader* reader, std::vector<T>* values) {
  for (std::size_t i = reader->count(); i > 0 && reader->ok(); --i) get(reader, &values->emplace_back());
}
template <typename Key, typename T>
void get(Reader* reader, std::map<Key, T>* values) {
  for (std::size_t i = reader->count(); i > 0 && reader->ok(); --i) {
    std::pair<Key, T> value;
    get(reader, &value);
    values->insert(values->end(), std::move(value));
  }
}

class Parser {
 public:
  enum class Result { kNeedsMore, kHello, kFrame, kMalformed };

  void push(std::string_view bytes) { buffer_.append(bytes); }
  Result next(Hello* hello, Frame* frame);
  void trust() { most_body_bytes_ = kMostBodyBytes; }
  std::string_view rest() const { return std::string_view(buffer_).substr(offset_); }
  static Parser after_hello(std::string_view rest) {
    Parser parser;
    parser.push(rest);
    parser.trust();
    parser.has_hello_ = true;
    return parser;
  }
  PARALLEL_STATE_FIELDS(buffer_, offset_, most_body_bytes_, has_hello_, malformed_)

 private:
  Bytes buffer_;
  std::size_t offset_ = 0;
  std::size_t most_body_bytes_ = kMostStrangerBytes;
  bool has_hello_ = false;
  bool malformed_ = false;
};

}  // namespace parallel_state::control
