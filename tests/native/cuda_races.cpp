// With PLAIN_DATA, staged data is ordinary memory, so a flag that doesn't order it is a race. Kernels with stages then
// run in their own sequence: between two pushes only time orders a stage's reads and writes.
#include "cuda_on_cpu.cpp"

#include <cstdio>

namespace {

constexpr unsigned SIZE = 3, BLOCKS = 2, THREADS = 2;

struct Rank {
  std::vector<float> input, output;
  std::uint64_t report = 0;
};

struct Step {
  const char* kernel;
  unsigned numel;
};

#ifdef PLAIN_DATA
constexpr Step STEPS[] = {{"all_reduce_pull_float32", 37},     {"all_reduce_two_shot_float32", 37},
                          {"reduce_scatter_pull_float32", 11}, {"all_gather_pull", 9},
                          {"all_reduce_two_shot_float32", 2},  {"all_reduce_pull_float32", 18000}};
#else
constexpr Step STEPS[] = {{"all_reduce_push_float32", 37}, {"all_reduce_pull_float32", 5},
                          {"all_gather_push", 9},          {"reduce_scatter_push_float32", 1100},
                          {"all_reduce_push_float32", 2},  {"all_reduce_two_shot_float32", 9}};
#endif

bool is_right(const Step& step, const std::vector<Rank>& ranks, unsigned rank) {
  const bool gather = std::strncmp(step.kernel, "all_gather", 10) == 0;
  const unsigned row = std::strncmp(step.kernel, "reduce_scatter", 14) == 0 ? rank : 0;
  for (unsigned i = 0; i < (gather ? SIZE : 1) * step.numel; ++i) {
    float expected = 0;
    for (unsigned r = 0; r < SIZE; ++r) expected += ranks[r].input[row * step.numel + i];
    if (gather) expected = ranks[i / step.numel].input[i % step.numel];
    if (ranks[rank].output[i] != expected) return false;
  }
  return true;
}

}  // namespace

int main() {
  std::vector<std::vector<char>> memory(SIZE, std::vector<char>(parallel_state::REGION_BYTES + 256));
  std::uint64_t abort_word = 0;
  on_cpu_disturb(20, 50, 3);
  int wrong = 0;
  std::vector<std::vector<Rank>> all;  // ranks run ahead of each other
  std::vector<Step> steps;
  for (int round = 0; round < 12; ++round) steps.insert(steps.end(), std::begin(STEPS), std::end(STEPS));
  for (const Step& step : steps) {
    all.emplace_back(SIZE);
    for (unsigned r = 0; r < SIZE; ++r) {
      for (unsigned i = 0; i < SIZE * step.numel; ++i) all.back()[r].input.push_back(float((i * 7 + r * 13) % 101));
      all.back()[r].output.assign(SIZE * step.numel, -1);
    }
  }
  std::vector<std::thread> threads;
  for (unsigned r = 0; r < SIZE; ++r) {
    threads.emplace_back([&, r] {
      for (std::size_t at = 0; at < steps.size(); ++at) {
        Call call{};
        for (unsigned other = 0; other < SIZE; ++other) {
          call.regions[other] = (reinterpret_cast<std::uint64_t>(memory[other].data()) + 255) / 256 * 256;
        }
        Rank& mine = all[at][r];
        call.input = reinterpret_cast<std::uint64_t>(mine.input.data());
        call.output = reinterpret_cast<std::uint64_t>(mine.output.data());
        call.report = reinterpret_cast<std::uint64_t>(&mine.report);
        call.abort = reinterpret_cast<std::uint64_t>(&abort_word);
        call.numel = steps[at].numel * (std::strncmp(steps[at].kernel, "all_gather", 10) == 0 ? 4 : 1);
        call.deadline_ns = 60000000000u;
        call.rank = r;
        call.size = SIZE;
        if (on_cpu_launch(steps[at].kernel, BLOCKS, THREADS, &call) != 0) std::abort();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (std::size_t at = 0; at < steps.size(); ++at) {
    for (unsigned r = 0; r < SIZE; ++r) wrong += !is_right(steps[at], all[at], r);
  }
  std::printf("%zu calls, %d wrong results\n", steps.size(), wrong);
  return wrong != 0;
}
