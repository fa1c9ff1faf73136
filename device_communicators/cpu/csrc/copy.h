#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace parallel_state {

#if defined(__x86_64__)
typedef long long Vector __attribute__((vector_size(16), may_alias));

// Copies at least one vector; stores are aligned.
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

// Long copies use a string move, which doesn't fetch the destination's lines from other cores. Ordinary stores to a
// slot that others have read cost twice as much (64 KiB copied and summed: 11 us against 5). If the destination is 1 to
// 31 bytes behind the source modulo 4 KiB, AMD's Zen 3 moves only 2-3 GB/s in this way, and so does glibc's memcpy;
// vectors move 40 GB/s (EPYC 7003).
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
