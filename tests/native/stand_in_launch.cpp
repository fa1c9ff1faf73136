// Replaces libcuda: one device, and a record of the last launch.
#include <cstdint>
#include <cstring>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

struct Attribute {
  int id, padding, value[16];
};

struct Config {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const Attribute* attributes;
  unsigned attribute_count;
};

constexpr int INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500;
int version = 13000, capability = 90, context, module, depth, launches, loaded;
char names[256][64];
std::int64_t last[9];
thread_local void* current;

}  // namespace

EXPORTED void stand_in_is(int driver_version, int compute_capability) {
  version = driver_version;
  capability = compute_capability;
}

// Launches; the last one's kernel, blocks, threads, stream, first field of its argument, and whether it may start
// early; kernels whose attributes were read; contexts that are still pushed.
EXPORTED const std::int64_t* stand_in_last() {
  last[0] = launches, last[7] = loaded, last[8] = depth;
  return last;
}

EXPORTED const char* stand_in_name(int kernel) { return names[kernel]; }

EXPORTED void* stand_in_context() { return current; }
EXPORTED void stand_in_enters(void* own) { current = own; }

EXPORTED int cuInit(unsigned) { return 0; }

EXPORTED int cuDriverGetVersion(int* to) {
  *to = version;
  return 0;
}

EXPORTED int cuGetErrorName(int error, const char** to) {
  *to = error == INVALID_IMAGE   ? "CUDA_ERROR_INVALID_IMAGE"
        : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
                                 : nullptr;
  return *to == nullptr;
}

EXPORTED int cuDeviceGet(int* to, int ordinal) {
  *to = ordinal;
  return ordinal == 0 ? 0 : 101;
}

EXPORTED int cuDeviceGetAttribute(int* to, int which, int) {
  *to = which == 16 ? 132 : which == 75 ? capability / 10 : which == 76 ? capability % 10 : -1;
  return *to < 0;
}

EXPORTED int cuDevicePrimaryCtxRetain(void** to, int) {
  *to = &context;
  return 0;
}

EXPORTED int cuCtxGetCurrent(void** to) {
  *to = current;
  return 0;
}

EXPORTED int cuCtxSetCurrent(void* set) {
  current = set;
  return set == &context ? 0 : INVALID_CONTEXT;
}

EXPORTED int cuCtxPushCurrent_v2(void* pushed) {
  ++depth;
  return pushed == &context ? 0 : INVALID_CONTEXT;
}

EXPORTED int cuCtxPopCurrent_v2(void** to) {
  *to = &context;
  return --depth < 0;
}

EXPORTED int cuModuleLoadData(void** to, const void* image) {
  if (depth == 0) return INVALID_CONTEXT;
  *to = &module;
  return std::memcmp(image,
                     "\x7f"
                     "ELF",
                     4) == 0
             ? 0
             : INVALID_IMAGE;
}

EXPORTED int cuModuleGetFunction(void** to, void* from, const char* name) {
  static int count = 0;
  if (depth == 0 || from != &module || count == 256) return NOT_FOUND;
  std::strncpy(names[count], name, sizeof names[0] - 1);
  *to = names[count++];
  return 0;
}

EXPORTED int cuFuncGetAttribute(int* to, int which, void*) {
  *to = 64;
  ++loaded;
  return which == 4 ? 0 : INVALID_VALUE;
}

EXPORTED int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* to, void*, int threads, std::size_t) {
  *to = 1024 / threads;
  return depth == 0 ? INVALID_CONTEXT : 0;
}

EXPORTED int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void** extra) {
  if (config->grid[0] == 0 || config->grid[1] * config->grid[2] * config->block[1] * config->block[2] != 1 || extra ||
      config->shared_bytes != 0)
    return INVALID_VALUE;
  if (current == nullptr) return INVALID_CONTEXT;
  ++launches;
  last[1] = (static_cast<char*>(function) - names[0]) / 64;
  last[2] = config->grid[0];
  last[3] = config->block[0];
  last[4] = reinterpret_cast<std::int64_t>(config->stream);
  std::memcpy(&last[5], arguments[0], sizeof last[5]);
  last[6] = config->attribute_count == 1 && config->attributes->id == 6 && config->attributes->value[0] == 1;
  return 0;
}
