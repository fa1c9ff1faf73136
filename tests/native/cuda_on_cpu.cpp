#include "cuda_on_cpu.h"

#include <dlfcn.h>

#include "kernels.cu"

using parallel_state::Call;

namespace {

enum class End { GOOD = 0, TRAPPED = 1, NO_SUCH_KERNEL = 2, TOO_LARGE = 3 };

// Searches only this library or program: others may have kernels of the same names.
void (*find_kernel(const char* name))(Call) {
  Dl_info here;
  if (dladdr(reinterpret_cast<void*>(&find_kernel), &here) == 0) return nullptr;
  void* const library = dlopen(here.dli_fname, RTLD_NOLOAD | RTLD_NOW);
  return reinterpret_cast<void (*)(Call)>(dlsym(library == nullptr ? RTLD_DEFAULT : library, name));
}

void run_thread(void (*kernel)(Call), const Call& call, on_cpu::ThreadBlock& block, std::atomic<bool>& trapped) {
  try {
    kernel(call);
  } catch (const on_cpu::Trapped&) {
    trapped = true;
    block.break_up();
  }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int on_cpu_launch(const char* name, unsigned blocks, unsigned threads, const Call* call) {
  auto* const kernel = find_kernel(name);
  if (kernel == nullptr) return int(End::NO_SUCH_KERNEL);
  if (blocks > parallel_state::MAX_BLOCKS || threads > parallel_state::MAX_THREADS) return int(End::TOO_LARGE);
  std::atomic<bool> trapped{false};
  std::vector<std::unique_ptr<on_cpu::ThreadBlock>> teams;
  std::vector<std::thread> all;
  for (unsigned b = 0; b < blocks; ++b) {
    teams.push_back(std::make_unique<on_cpu::ThreadBlock>(threads));
    on_cpu::ThreadBlock* const team = teams.back().get();
    for (unsigned t = 0; t < threads; ++t) {
      const std::uint64_t dice = on_cpu::seed.fetch_add(0x9e3779b97f4a7c15u, std::memory_order_relaxed);
      all.emplace_back([=, &trapped] {
        on_cpu::self = {{t, 0, 0}, {b, 0, 0}, {threads, 1, 1}, {blocks, 1, 1}, team, dice};
        run_thread(kernel, *call, *team, trapped);
      });
    }
  }
  for (auto& thread : all) thread.join();
  return int(trapped ? End::TRAPPED : End::GOOD);
}

EXPORTED void on_cpu_disturb(unsigned per_mille, unsigned longest_us, std::uint64_t seed) {
  on_cpu::pauses_per_mille = per_mille;
  on_cpu::pause_us = longest_us;
  on_cpu::seed = seed;
}

// Offsets of Call's fields, then constants that Python repeats.
EXPORTED const std::uint64_t* on_cpu_layout() {
  using namespace parallel_state;
#define AT(FIELD) offsetof(Call, FIELD)
  static const std::uint64_t facts[] = {
      AT(regions),
      AT(input),
      AT(output),
      AT(residual),
      AT(residual_out),
      AT(weight),
      AT(scale),
      AT(scale_out),
      AT(report),
      AT(abort),
      AT(numel),
      AT(deadline_ns),
      AT(rank),
      AT(size),
      AT(operation),
      AT(rows),
      AT(hidden),
      AT(eps),
      sizeof(Call),
      MAX_RANKS,
      MAX_BLOCKS,
      MAX_THREADS,
      REGION_BYTES,
      PART_PACKETS,
      STAGE_BYTES,
      offsetof(Control, epoch),
      offsetof(Control, flag),
      PACKETS_OFFSET,
      STAGES_OFFSET,
  };
  return facts;
}
