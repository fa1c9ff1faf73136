// Copies between a rank's own memory and what it shares with the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace parallel_state {

#if defined(__x86_64__)
typedef long long Vector __attribute__((vector_size(16), may_alias));

// Copies at least a vector, by loads and stores; the stores are aligned.
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

// A string move writes whole lines without first asking the other cores for what they have of them: written by
// ordinary stores, a slot that the others have read costs twice as much (64 KiB to another core and summed: 11 us
// against 5). Prefetching for writing made no difference. Short ones don't repay its start. Where the destination lies
// up to a vector behind the source within their pages, AMD's Zen 3 moves 2 to 3 GB/s, and so does glibc's memcpy, which
// moves a string as well from 4 KiB on: 40 by vectors (EPYC 7003; all other offsets are as fast as aligned ones).
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
