#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace parallel_state {

enum class Kind : std::uint64_t {
  kBarrier = 1,
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kGatherv,
  kBroadcast,
  kScatter,
  kAllToAll,
  kAllReduceAddRmsNorm,
  kMessage,
  kReduce,
  kBroadcastSized,
  kPass
};

// Numbers as METHODS in user_call.py. The eight methods of a class match each other.
enum class Method : std::uint8_t {
  kNone = 0,
  kAllReduce = 8,
  kAllReduceInPlace,
  kAllGather = 16,
  kReduceScatter = 24,
  kBroadcast = 32,
  kBroadcastInPlace,
  kAllGatherv = 40,
  kReduceScatterv = 48,
  kAllToAll = 56,
  kBarrier = 64,
  kAllReduceAddRmsNorm = 72,
  kGather = 96,
  kScatter = 104,
  kBroadcastTensorDictWithSpec = 144
};
constexpr std::uint64_t kVariants = 7;

// `word`, from the lowest byte: method, dtype, reduction + 1, dim + 1, root + 1, 24 bits of digest of shape and sizes.
struct Told {
  std::uint64_t word = 0;
  std::uint64_t shape = 0;
};

inline bool operator==(Told one, Told other) { return one.word == other.word && one.shape == other.shape; }

// One call of a rank. It is the head of each message between hosts, and is published with each tick within a host.
struct CallRecord {
  static constexpr std::uint16_t kMagic = 0x3150;
  static constexpr std::uint16_t kBody = 1, kFailure = 2, kLeave = 3;

  std::uint16_t magic = kMagic;
  std::uint16_t kind = kBody;
  std::uint32_t sequence = 0;
  std::uint64_t bytes = 0;  // of the body; within a host: how many sizes of parts are published
  Told told;
  std::uint64_t history = 0;  // digest of this and all earlier calls
  std::uint64_t sizes = 0;    // all_to_all with even blocks: 1 + the bytes of each; else 0
  Told earlier;
};
static_assert(sizeof(CallRecord) == 64, "one cache line");

inline bool is_same_call(const CallRecord& own, const CallRecord& other) {
  return own.history == other.history && own.sequence == other.sequence;
}

// -1: none.
struct Misfit {
  int from = -1;
  int to = -1;
  std::uint64_t sent_bytes = 0;
  std::uint64_t expected_bytes = 0;
};

// As in user_call.py; a shape that doesn't fit becomes 15 and its number of elements.
template <typename Sizes>
std::uint64_t packed_shape(const Sizes& sizes) {
  constexpr unsigned kBits = 60;
  constexpr std::uint64_t kNoShape = 15;
  const std::uint64_t dims = sizes.size();
  const unsigned bits = dims == 0 || dims >= kNoShape ? 1 : kBits / static_cast<unsigned>(dims);
  std::uint64_t packed = 0, numel = 1;
  bool fits = dims < kNoShape;
  for (const auto size : sizes) {
    const auto length = static_cast<std::uint64_t>(size);
    fits = fits && (length >> bits) == 0;
    packed = packed << bits | length;
    numel *= length;
  }
  return fits ? dims << kBits | packed : kNoShape << kBits | (numel & ((std::uint64_t{1} << kBits) - 1));
}

template <typename Sizes>
std::uint64_t digest_of_shape(const Sizes& sizes) {
  std::uint32_t digest = 0;
  for (const auto size : sizes) digest = (digest ^ (static_cast<std::uint32_t>(size) + 1)) * 0x9e3779b1U;
  return digest >> 8;
}

template <typename Sizes>
Told told_of(Method method, const Sizes& shape, int dtype, int reduction = -1, int dim = -1, int root = -1) {
  const auto byte = [](int value) { return static_cast<std::uint64_t>(value) & 255; };
  return {byte(static_cast<int>(method)) | byte(dtype) << 8 | byte(reduction + 1) << 16 | byte(dim + 1) << 24 |
              byte(root + 1) << 32 | digest_of_shape(shape) << 40,
          packed_shape(shape)};
}

inline std::uint64_t mixed(std::uint64_t bits) {
  bits = (bits ^ (bits >> 33)) * 0xff51afd7ed558ccdULL;
  bits = (bits ^ (bits >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return bits ^ (bits >> 33);
}

inline std::uint64_t digest_of(const std::size_t* parts, int count) {
  std::uint64_t digest = 0;
  for (int part = 0; part < count; ++part) digest = mixed(digest + 0x9e3779b97f4a7c15ULL + parts[part]);
  return digest;
}

inline std::uint64_t note_of_call(Kind kind, Told told, std::uint64_t digest, int reduction, int root) {
  const std::uint64_t facts = static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(reduction + 1) << 8 |
                              static_cast<std::uint64_t>(root + 1) << 16;
  return mixed(facts * 0x9e3779b97f4a7c15ULL + (told.word & ~kVariants) + digest);
}

#define RETURN_IF_FAILED(expression)              \
  do {                                            \
    const Status status_ = (expression);          \
    if (status_ != Status::kDone) return status_; \
  } while (false)

}  // namespace parallel_state
