#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "reduce.h"

using namespace parallel_state;

namespace {

std::uint64_t state = 1;

std::uint32_t draw() {
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return static_cast<std::uint32_t>(state >> 33);
}

// Finite numbers of either sign that round at each step.
void fill(std::vector<unsigned char>& bytes, Dtype dtype) {
  const std::size_t width = size_of(dtype);
  for (std::size_t at = 0; at < bytes.size(); at += width) {
    const float x = (static_cast<float>(draw() % 200001) - 100000.0F) / static_cast<float>(1 + draw() % 5000);
    const double wide = x * 1.0000001;
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const std::uint64_t whole = (static_cast<std::uint64_t>(draw()) << 32) | draw();
    if (dtype == Dtype::kFloat32) {
      std::memcpy(&bytes[at], &x, width);
    } else if (dtype == Dtype::kFloat64) {
      std::memcpy(&bytes[at], &wide, width);
    } else if (dtype == Dtype::kBfloat16) {
      const auto half = static_cast<std::uint16_t>(bits >> 16);
      std::memcpy(&bytes[at], &half, width);
    } else if (dtype == Dtype::kFloat16) {  // exponents of 2^-14 to 2^2, so that products stay finite
      const auto half = static_cast<std::uint16_t>((draw() & 0x8000U) | ((draw() % 17) << 10) | (draw() & 0x3ffU));
      std::memcpy(&bytes[at], &half, width);
    } else {
      std::memcpy(&bytes[at], &whole, width);
    }
  }
}

}  // namespace

int main() {
  constexpr std::size_t kCount = 1031;
  for (const char* set : {"plain", "avx2", "avx512"}) {
    for (int dtype = 0; dtype <= static_cast<int>(Dtype::kUint8); ++dtype) {
      for (int op = 0; op <= static_cast<int>(ReduceOp::kTreeSum); ++op) {
        for (const int sources : {2, 3, 4, 5, 8}) {
          const ReduceFunction reduce = reduce_function(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op), set);
          if (reduce == nullptr) continue;
          state = 7 + dtype;
          const std::size_t bytes = kCount * size_of(static_cast<Dtype>(dtype));
          std::vector<std::vector<unsigned char>> inputs(sources, std::vector<unsigned char>(bytes));
          std::vector<unsigned char> first(bytes), second(bytes);
          const void* pointers[8];
          for (int source = 0; source < sources; ++source) {
            fill(inputs[source], static_cast<Dtype>(dtype));
            pointers[source] = inputs[source].data();
          }
          void* const outs[] = {first.data(), second.data()};
          reduce(outs, 2, pointers, sources, kCount);
          std::uint64_t print = 14695981039346656037ULL;
          for (const unsigned char byte : first) print = (print ^ byte) * 1099511628211ULL;
          std::printf("%s %d %d %d %016llx %d\n", set, dtype, op, sources, static_cast<unsigned long long>(print),
                      first == second);
        }
      }
    }
  }
  return 0;
}
