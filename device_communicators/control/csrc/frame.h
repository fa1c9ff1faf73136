// The wire format of the control plane: a stream is one hello, then frames. Integers are little-endian.
//
// Only the hello is frozen. Everything after it may change with the version, and each side refuses a version that it
// doesn't know. The parser treats its input as hostile: lengths are bounded before anything is stored, and the first
// malformed byte ends the stream.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace parallel_state::control {

using Bytes = std::string;
using Nanos = std::int64_t;
using Proc = std::uint64_t;  // a process's stay in one world; 0 is none

inline constexpr std::uint16_t kVersion = 1;
inline constexpr std::uint16_t kOldestVersion = 1;
inline constexpr std::size_t kHelloBytes = 20;
inline constexpr std::size_t kHeadBytes = 40;
inline constexpr std::size_t kNonceBytes = 16;
inline constexpr std::size_t kMostBodyBytes = 32U << 20;  // of a frame
inline constexpr std::size_t kMostStrangerBytes = 64;     // of a frame before the peer is identified
inline constexpr std::size_t kMostValueBytes = 4096;      // of one member in an agreement, and of a status
inline constexpr std::size_t kMostTextBytes = 256;        // of a cause or a name
inline constexpr std::size_t kMostMembers = 4096;         // of a world

struct Hello {
  std::uint16_t version = kVersion;
  std::uint16_t oldest = kOldestVersion;
  std::uint32_t build = 0;
};

enum class FrameKind : std::uint16_t {
  kNonce = 1,  // first after the hello, in both directions: who, and a random number
  kIdentity,   // then: the proof that the sender holds the token of the listener
  kBeat,       // the sender runs; digest of its state
  kState,      // the whole state of ends
  kValue,      // agreement: member -> decider
  kAsk,        // new decider -> members: is there a verdict?
  kAnswer,     // member -> new decider: the verdict, or none
  kVerdict,    // decider -> members
  kDone,       // member -> decider: this member's caller has received the verdict
  kForget,     // decider -> members: all are done
  kQuestion,   // status: asker -> asked
  kReply,      // status: asked -> asker
  kStoreCall,  // store: guest -> listener
  kStoreReply  // store: listener -> guest
};

struct Frame {
  FrameKind kind = FrameKind::kBeat;
  std::uint64_t world = 0;
  std::uint64_t epoch = 0;
  std::uint64_t term = 0;
  Proc from = 0;
  Bytes body;
};

Bytes encode(const Hello& hello);
Bytes encode(const Frame& frame);

// Appends values to a body.
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

// Reads values from a body. After the first value that doesn't fit, all are zero or empty, and `ok` is false.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  T number() {
    if (!has(sizeof(T))) return T{};
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) value |= std::uint64_t{static_cast<unsigned char>(bytes_[i])} << 8 * i;
    bytes_.remove_prefix(sizeof(T));
    return static_cast<T>(value);
  }
  Bytes text(std::size_t most_bytes) {
    const auto size = number<std::uint32_t>();
    if (size > most_bytes || !has(size)) return fail();
    Bytes value(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return value;
  }
  // Returns a count of items that take at least `item_bytes` each: no larger than what is left can hold.
  std::size_t count(std::size_t most, std::size_t item_bytes) {
    const auto value = number<std::uint32_t>();
    if (value > most || value > bytes_.size() / item_bytes) return fail(), 0;
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
  bool ok_ = true;
};

// Cuts a stream into its hello and frames. A value: a copy goes on from the same byte.
class Parser {
 public:
  enum class Result { kNeedsMore, kHello, kFrame, kMalformed };

  void push(std::string_view bytes) { buffer_.append(bytes); }
  // Returns the next item, written to `hello` or `frame`. After kMalformed nothing else is returned.
  Result next(Hello* hello, Frame* frame);
  // Allows bodies of full size: the peer has been identified.
  void trust() { most_body_bytes_ = kMostBodyBytes; }
  std::string_view rest() const { return std::string_view(buffer_).substr(offset_); }

 private:
  Bytes buffer_;
  std::size_t offset_ = 0;
  std::size_t most_body_bytes_ = kMostStrangerBytes;
  bool has_hello_ = false;
  bool malformed_ = false;
};

}  // namespace parallel_state::control
