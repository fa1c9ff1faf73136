// Included by memory.cuh within its namespace. PLAIN_DATA makes staged data ordinary memory, so that ThreadSanitizer
// checks whether flags order it.

// On a GPU anything may happen between two accesses, and halves are stored in any order.
inline void store_packet(u64 address, Packet packet) {
  u64* const to = reinterpret_cast<u64*>(address);
  const int first = on_cpu::pause() & 1;
  __atomic_store_n(to + first, packet.halves[first], __ATOMIC_RELAXED);
  on_cpu::pause();
  __atomic_store_n(to + 1 - first, packet.halves[1 - first], __ATOMIC_RELAXED);
}

inline Packet load_packet(u64 address) {
  on_cpu::pause();
  const u64* const from = reinterpret_cast<const u64*>(address);
  Packet packet;
  packet.halves[1] = __atomic_load_n(from + 1, __ATOMIC_RELAXED);
  packet.halves[0] = __atomic_load_n(from, __ATOMIC_RELAXED);
  return packet;
}

inline void store_shared(u64 address, const Words<4>& words) {
  on_cpu::pause();
  for (u32 w = 0; w < 4; ++w) {
#ifdef PLAIN_DATA
    reinterpret_cast<u32*>(address)[w] = words.at[w];
#else
    __atomic_store_n(reinterpret_cast<u32*>(address) + w, words.at[w], __ATOMIC_RELAXED);
#endif
  }
}

inline Words<4> load_shared(u64 address) {
  on_cpu::pause();
  Words<4> words;
  for (u32 w = 0; w < 4; ++w) {
#ifdef PLAIN_DATA
    words.at[w] = reinterpret_cast<const u32*>(address)[w];
#else
    words.at[w] = __atomic_load_n(reinterpret_cast<const u32*>(address) + w, __ATOMIC_RELAXED);
#endif
  }
  return words;
}

template <u32 COUNT>
void load_own(u64 address, Words<COUNT>& words) {
  words = *reinterpret_cast<const Words<COUNT>*>(address);
}

template <u32 COUNT>
void store_own(u64 address, const Words<COUNT>& words) {
  *reinterpret_cast<Words<COUNT>*>(address) = words;
}

inline void release_flag(u64 address, u32 value) {
  on_cpu::pause();
  __atomic_store_n(reinterpret_cast<u32*>(address), value, __ATOMIC_RELEASE);
}

inline u32 acquire_flag(u64 address) {
  on_cpu::pause();
  return __atomic_load_n(reinterpret_cast<const u32*>(address), __ATOMIC_ACQUIRE);
}

inline void clear_flag(u64 address) { __atomic_store_n(reinterpret_cast<u32*>(address), 0u, __ATOMIC_RELAXED); }

inline void store_word(u64 address, u64 value) {
  __atomic_store_n(reinterpret_cast<u64*>(address), value, __ATOMIC_RELAXED);
}

inline u64 load_word(u64 address) { return __atomic_load_n(reinterpret_cast<const u64*>(address), __ATOMIC_RELAXED); }

inline void fence_system() { on_cpu::fence(); }
inline u64 clock_ns() { return on_cpu::clock_ns(); }
[[noreturn]] inline void trap() { throw on_cpu::Trapped(); }

inline float float_of_half(u16 bits) {
  const u32 sign = u32{bits & 0x8000u} << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // The exponents' biases differ by 112. A product with 2^112 corrects it, also for subnormal numbers.
  const float value = __uint_as_float(magnitude << 13) * 0x1p112f;
  return sign ? -value : value;
}

inline u16 half_of_float(float value) {
  const u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
  if (magnitude < 0x38800000) {                       // below 2^-14, in units of 2^-24: the addition rounds to even
    return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000);
  }
  return sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
}

inline float float_of_bfloat(u16 bits) { return __uint_as_float(u32{bits} << 16); }

inline u16 bfloat_of_float(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <class T, u32 COUNT, u32 TAG = 0>
T* shared_array() {
  static char key;
  return static_cast<T*>(on_cpu::shared_memory(&key, COUNT * sizeof(T), alignof(T)));
}
