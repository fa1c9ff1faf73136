#include <cstddef>
#include <cstdint>

namespace {

// Lists as keys, and many numbers, can be chosen to collide: a dict then takes uninterruptible quadratic time.
class KeyCheck {
 public:
  KeyCheck(std::uint64_t nested, std::uint64_t most) : nested_(nested), most_(most) {}

  enum class Kind { kNumber, kText, kOther };
  enum class Found { kFine, kRefused, kMalformed };  // kMalformed: the decoder fails here, too

  struct Depth {
    int values;
    int extensions;
    Depth inner(int extension = 0) const { return {values - 1, extensions - extension}; }
  };

  Found value(const std::uint8_t*& at, const std::uint8_t* end, Depth depth, Kind* kind = nullptr) const {
    if (at == end) return Found::kMalformed;
    const std::uint8_t head = *at++;
    const auto tell = [kind](Kind found) {
      if (kind != nullptr) *kind = found;
    };
    const auto skip = [&at, end](std::uint64_t bytes) {
      if (bytes > static_cast<std::uint64_t>(end - at)) return Found::kMalformed;
      at += bytes;
      return Found::kFine;
    };
    std::uint64_t size = 0;
    const auto sized = [&at, end, &size](int bytes) {
      if (bytes > end - at) return false;
      for (size = 0; bytes > 0; --bytes) size = size << 8 | *at++;
      return true;
    };
    tell(Kind::kNumber);
    if (head <= 0x7f || head >= 0xe0 || head == 0xc0 || head == 0xc2 || head == 0xc3) return Found::kFine;
    if (head >= 0xca && head <= 0xd3) {
      return skip(head == 0xca ? 4 : head == 0xcb ? 8 : std::uint64_t{1} << ((head - 0xcc) & 3));
    }
    tell(Kind::kText);
    if (head >= 0xa0 && head <= 0xbf) return skip(head & 0x1f);
    if (head >= 0xc4 && head <= 0xc6) return sized(1 << (head - 0xc4)) ? skip(size) : Found::kMalformed;
    if (head >= 0xd9 && head <= 0xdb) return sized(1 << (head - 0xd9)) ? skip(size) : Found::kMalformed;
    tell(Kind::kOther);
    if (depth.values == 0) return Found::kRefused;
    if (head <= 0x8f) return map(at, end, head & 0x0f, depth.inner());
    if (head <= 0x9f) return items(at, end, head & 0x0f, depth.inner());
    if (head >= 0xdc && head <= 0xdf) {
      if (!sized((head & 1) == 0 ? 2 : 4)) return Found::kMalformed;
      return head <= 0xdd ? items(at, end, size, depth.inner()) : map(at, end, size, depth.inner());
    }
    if (head >= 0xd4 && head <= 0xd8) size = std::uint64_t{1} << (head - 0xd4);
    else if (head < 0xc7 || head > 0xc9 || !sized(1 << (head - 0xc7))) return Found::kMalformed;
    if (at == end) return Found::kMalformed;
    const std::uint8_t code = *at++;
    const std::uint8_t* inner = at;
    if (skip(size) != Found::kFine) return Found::kMalformed;
    if (code >= 64 || (nested_ >> code & 1) == 0) return Found::kFine;
    return depth.extensions == 0 ? Found::kMalformed : value(inner, at, depth.inner(1));
  }

 private:
  Found items(const std::uint8_t*& at, const std::uint8_t* end, std::uint64_t count, Depth depth) const {
    Found found = Found::kFine;
    while (count-- > 0 && found == Found::kFine) found = value(at, end, depth);
    return found;
  }

  Found map(const std::uint8_t*& at, const std::uint8_t* end, std::uint64_t count, Depth depth) const {
    Found found = Found::kFine;
    for (std::uint64_t entry = 0; entry < count && found == Found::kFine; ++entry) {
      Kind kind = Kind::kOther;
      found = value(at, end, depth, &kind);
      if (found != Found::kFine) return found;
      if (kind == Kind::kOther || (kind == Kind::kNumber && count > most_)) return Found::kRefused;
      found = value(at, end, depth);
    }
    return found;
  }

  const std::uint64_t nested_;
  const std::uint64_t most_;
};

constexpr int kDeepest = 2000;  // twice the interpreter's limit, which is the decoder's

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The keys of all maps are texts, or at most `most` numbers.
int ps_plain_keys(const std::uint8_t* data, std::uint64_t size, std::uint64_t nested, std::uint64_t most,
                  int extensions) {
  const KeyCheck::Found found = KeyCheck(nested, most).value(data, data + size, {kDeepest, extensions});
  return found != KeyCheck::Found::kRefused ? 1 : 0;
}

}  // extern "C"
#pragma GCC visibility pop
