#pragma once

#include <cstdint>

namespace parallel_state {

// Ranks whose programs changed this state (torch.set_flush_denormal) would reduce to different bits. The memory
// clobbers keep arithmetic inside the scope.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() : previous_(read()) {
    if (differs()) write(kDefault);
  }
  ~DefaultFloatingPoint() {
    if (differs()) write(previous_);
    else keep_order();
  }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
#if defined(__x86_64__)
  using Word = std::uint32_t;  // MXCSR
  static constexpr Word kDefault = 0x1f80;
  static constexpr Word kReported = 0x003f;
  static Word read() {
    Word word;
    asm volatile("stmxcsr %0" : "=m"(word) : : "memory");
    return word;
  }
  static void write(Word word) { asm volatile("ldmxcsr %0" : : "m"(word) : "memory"); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;  // FPCR
  static constexpr Word kDefault = 0;
  static constexpr Word kReported = 0;
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word) : : "memory");
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
  using Word = std::uint32_t;
  static constexpr Word kDefault = 0;
  static constexpr Word kReported = 0;
  static Word read() { return kDefault; }
  static void write(Word) {}
#endif
  static void keep_order() { asm volatile("" : : : "memory"); }
  bool differs() const { return (previous_ & ~kReported) != kDefault; }

  const Word previous_;
};

}  // namespace parallel_state
