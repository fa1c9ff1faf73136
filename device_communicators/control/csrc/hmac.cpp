#include "hmac.h"

#include <array>
#include <cstdint>

namespace parallel_state::control {
namespace {

constexpr std::size_t kBlock = 64;

constexpr std::uint32_t kRounds[] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using Hash = std::array<std::uint32_t, 8>;

std::uint32_t rotated(std::uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

void compress(Hash* hash, const char* block) {
  std::uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = 0;
    for (int byte = 0; byte < 4; ++byte) w[i] = w[i] << 8 | static_cast<unsigned char>(block[i * 4 + byte]);
  }
  for (int i = 16; i < 64; ++i) {
    const std::uint32_t low = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3;
    const std::uint32_t high = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + low + w[i - 7] + high;
  }
  auto [a, b, c, d, e, f, g, h] = *hash;
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t sum_e = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25);
    const std::uint32_t one = h + sum_e + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    const std::uint32_t sum_a = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22);
    const std::uint32_t two = sum_a + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
  }
  const Hash added{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < hash->size(); ++i) (*hash)[i] += added[i];
}

}  // namespace

std::string sha256(std::string_view message) {
  Hash hash{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string padded(message);
  padded.push_back('\x80');
  padded.resize((padded.size() + 8 + kBlock - 1) / kBlock * kBlock - 8);
  for (int i = 7; i >= 0; --i) padded.push_back(static_cast<char>(std::uint64_t{message.size()} * 8 >> 8 * i));
  for (std::size_t at = 0; at < padded.size(); at += kBlock) compress(&hash, padded.data() + at);
  std::string digest;
  for (const std::uint32_t word : hash) {
    for (int i = 3; i >= 0; --i) digest.push_back(static_cast<char>(word >> 8 * i));
  }
  return digest;
}

std::string hmac_sha256(std::string_view key, std::string_view message) {
  std::string inner = key.size() > kBlock ? sha256(key) : std::string(key);
  inner.resize(kBlock);
  std::string outer = inner;
  for (char& each : inner) each = static_cast<char>(each ^ 0x36);
  for (char& each : outer) each = static_cast<char>(each ^ 0x5c);
  return sha256(outer + sha256(inner.append(message)));
}

bool equal_secrets(std::string_view one, std::string_view other) {
  unsigned difference = one.size() == other.size() ? 0 : 1;
  for (std::size_t i = 0; i < one.size() && i < other.size(); ++i) {
    difference |= static_cast<unsigned char>(one[i] ^ other[i]);
  }
  return difference == 0;
}

}  // namespace parallel_state::control
