// Stands in for libcuda in tests of the peer probe: devices are those of CUDA_VISIBLE_DEVICES, their memory is the
// host's.
//
// STAND_IN says how peer access behaves; what is given back is checked. No other thread, no stream, no error handling.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

struct Context {
  int device;
  int users = 0;
};

std::vector<std::string> uuids;
std::vector<Context> contexts;
std::set<std::pair<int, int>> peers;
std::map<uint64_t, int> owners;                          // memory -> device
std::map<uint64_t, std::vector<unsigned char>> mirrors;  // what a GPU sees of a peer's memory where that is a mirror
Context* current = nullptr;

bool behaves(const char* how) {
  const char* wanted = std::getenv("STAND_IN");
  return wanted != nullptr && std::strcmp(wanted, how) == 0;
}

void note(const char* what) {
  if (const char* path = std::getenv("STAND_IN_LOG")) {
    FILE* file = std::fopen(path, "a");
    std::fprintf(file, "%s\n", what);
    std::fclose(file);
  }
}

// A copy that `device` makes with its own loads and stores.
int copy(int device, uint64_t to, uint64_t from, size_t size) {
  auto* target = reinterpret_cast<unsigned char*>(to);
  auto* source = reinterpret_cast<unsigned char*>(from);
  bool to_peer = owners.at(to) != device, from_peer = owners.at(from) != device;
  if ((to_peer && !peers.count({device, owners.at(to)})) || (from_peer && !peers.count({device, owners.at(from)})))
    return 700;  // CUDA_ERROR_ILLEGAL_ADDRESS
  if (to_peer && behaves("drops stores")) return 0;
  if (from_peer && behaves("spoils loads")) {
    std::memset(target, 0xff, size);
    return 0;
  }
  if (to_peer && behaves("mirrors")) {
    mirrors[to].assign(source, source + size);
    return 0;
  }
  if (from_peer && behaves("mirrors") && mirrors.count(from)) {
    std::memcpy(target, mirrors[from].data(), size);
    return 0;
  }
  if (to_peer && behaves("spoils one word")) {
    std::memcpy(target, source, size);
    target[4000] ^= 1;
    return 0;
  }
  std::memcpy(target, source, size);
  return 0;
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  note("start");
  if (behaves("has no device")) return 100;
  std::stringstream list(std::getenv("CUDA_VISIBLE_DEVICES"));
  for (std::string uuid; std::getline(list, uuid, ',');) uuids.push_back(uuid);
  for (size_t device = 0; device < uuids.size(); ++device) contexts.push_back({static_cast<int>(device)});
  return 0;
}

int cuGetErrorName(int code, const char** text) {
  *text = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 221 ? "CUDA_ERROR_JIT_COMPILER_NOT_FOUND" : "CUDA_ERROR";
  return 0;
}

int cuDeviceGet(int* device, int index) {
  *device = index;
  return index < static_cast<int>(uuids.size()) ? 0 : 101;
}

int cuDeviceGetUuid(unsigned char* bytes, int device) {
  std::string digits;
  for (char each : uuids[device].substr(4))
    if (each != '-') digits += each;
  for (int place = 0; place < 16; ++place)
    bytes[place] = static_cast<unsigned char>(std::stoi(digits.substr(2 * place, 2), nullptr, 16));
  if (behaves("shows another device")) bytes[0] ^= 1;
  return 0;
}

int cuDeviceCanAccessPeer(int* able, int, int) {
  *able = !behaves("can't access");
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (behaves("is busy")) return 46;
  contexts[device].users += 1;
  *context = &contexts[device];
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  contexts[device].users -= 1;
  note(contexts[device].users ? "still used" : "released");
  return 0;
}

int cuCtxSetCurrent(void* context) {
  current = static_cast<Context*>(context);
  return 0;
}

int cuCtxSynchronize() { return 0; }

int cuCtxEnablePeerAccess(void* context, unsigned) {
  peers.insert({current->device, static_cast<Context*>(context)->device});
  if (behaves("hangs")) pause();
  if (behaves("crashes")) {
    std::puts("the driver is about to crash");
    std::fflush(stdout);
    std::abort();
  }
  if (behaves("crashes for the first pair") && current->device == 0) std::abort();
  return 0;
}

int cuCtxDisablePeerAccess(void* context) {
  peers.erase({current->device, static_cast<Context*>(context)->device});
  return 0;
}

int cuMemAlloc_v2(uint64_t* memory, size_t size) {
  *memory = reinterpret_cast<uint64_t>(std::malloc(size));
  owners[*memory] = current->device;
  return 0;
}

int cuMemFree_v2(uint64_t memory) {
  owners.erase(memory);
  std::free(reinterpret_cast<void*>(memory));
  return 0;
}

int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t size) {
  std::memcpy(reinterpret_cast<void*>(to), from, size);
  return owners.at(to) == current->device ? 0 : 1;
}

int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t size) {
  std::memcpy(to, reinterpret_cast<void*>(from), size);
  return owners.at(from) == current->device ? 0 : 1;
}

int cuMemcpyPeerAsync(uint64_t to, void*, uint64_t from, void*, size_t size, void*) {
  if (behaves("spoils copies")) size /= 2;
  return copy(current->device, to, from, size);
}

int cuModuleLoadData(void** module, const char* text) {
  *module = current;
  return behaves("can't compile") || !std::strstr(text, ".entry copy_words") ? 221 : 0;
}

int cuModuleUnload(void*) { return 0; }

int cuModuleGetFunction(void** function, void* module, const char*) {
  *function = module;
  return 0;
}

int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                   void** arguments, void**) {
  if (behaves("refuses the kernel")) return 700;
  auto to = *static_cast<uint64_t*>(arguments[0]), from = *static_cast<uint64_t*>(arguments[1]);
  return copy(static_cast<Context*>(function)->device, to, from, 4ull * *static_cast<uint32_t*>(arguments[2]));
}
}
