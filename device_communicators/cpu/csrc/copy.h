#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace parallel_state {

#if defined(__x86_64__)
typedef long long Vector __attribute__((vector_size(16), may_alias));

inline void copy_by_vectors(char* out, const char* in, std::size_t bytes) {
  constexpr std::size_t kVector = sizeof(Vector), kStep = 4 * kVector;
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(out) % kVector;
  std::memcpy(out, in, kVector);
  for (out += head, in += head, bytes -= head; bytes >= kStep; out += kStep, in += kStep, bytes -= kStep) {
    Vector lanes[4];
    for (int lane = 0; lane < 4; ++lane) std::memcpy(&lanes[lane], in + lane * kVector, kVector);
    for (int lane = 0; lane < 4; ++lane) reinterpret_cast<Vector*>(out)[lane] = lanes[lane];
  }
  if (bytes != 0) std::memcpy(out, in, bytes);
}
#endif

// A string move doesn't fetch the destination's lines from other cores: 64 KiB in 5 us, not 11. Zen 3 moves 2-3 GB/s,
// not 40, if the destination is 1 to 31 bytes behind the source modulo 4 KiB.
inline void copy(void* out, const void* in, std::size_t bytes) {
#if defined(__x86_64__)
  constexpr std::size_t kString = 2048, kPage = 4096, kAlike = 32;
  if (bytes >= kString) {
    const std::size_t behind = (reinterpret_cast<std::uintptr_t>(out) - reinterpret_cast<std::uintptr_t>(in)) % kPage;
    if (behind - 1 < kAlike - 1) return copy_by_vectors(static_cast<char*>(out), static_cast<const char*>(in), bytes);
    asm volatile("rep movsb" : "+D"(out), "+S"(in), "+c"(bytes) : : "memory");
    return;
  }
#endif
  if (bytes != 0) std::memcpy(out, in, bytes);
}

}  // namespace parallel_state
