// Replaces libnvidia-ml. Functions missing here are also missing in old drivers. STAND_IN=no-driver: the library
// exists, but no driver.

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kNoDriver = 9, kNotSupported = 3, kInvalid = 2;

struct Pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
};

struct Memory {
  unsigned long long total, free, used;
};

const char* kUuids[] = {"GPU-00000000-1111-2222-3333-444444444444", "GPU-55555555-6666-7777-8888-999999999999"};
const char* kPci[] = {"00000000:3B:00.0", "00000000:AF:00.0"};

long index_of(void* handle) { return reinterpret_cast<long>(handle) - 1; }

int fill(Pci* info, const char* bus_id) {
  std::memset(info, 0, sizeof *info);
  std::strcpy(info->bus_id, bus_id);
  return 0;
}

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) {
  const char* how = std::getenv("STAND_IN");
  return how != nullptr && std::strcmp(how, "no-driver") == 0 ? kNoDriver : 0;
}
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int code) { return code == kNoDriver ? "Driver Not Loaded" : "Another Error"; }
int nvmlSystemGetDriverVersion(char* text, unsigned) { return std::strcpy(text, "580.65.06") == nullptr; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return (*version = 13000) == 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { return (*count = 2) == 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = reinterpret_cast<void*>(static_cast<long>(index) + 1);
  return index < 2 ? 0 : kInvalid;
}

int nvmlDeviceGetUUID(void* handle, char* text, unsigned) {
  return std::strcpy(text, kUuids[index_of(handle)]) == nullptr;
}
int nvmlDeviceGetName(void*, char* text, unsigned) { return std::strcpy(text, "Test GPU") == nullptr; }
int nvmlDeviceGetPciInfo_v3(void* handle, Pci* info) { return fill(info, kPci[index_of(handle)]); }

int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  *memory = {80ull << 30, 80ull << 30, 0};
  return 0;
}

int nvmlDeviceGetCpuAffinity(void* handle, unsigned words, unsigned long* cores) {
  std::memset(cores, 0, words * sizeof *cores);
  cores[0] = index_of(handle) == 0 ? 0x3ul : 0xcul;
  return 0;
}

int nvmlDeviceGetMigMode(void*, unsigned*, unsigned*) { return kNotSupported; }

int nvmlDeviceGetNvLinkState(void*, unsigned link, unsigned* active) {
  *active = link != 5;
  return link < 12 ? 0 : kInvalid;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, unsigned* type) { return (*type = 0) != 0; }

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* handle, unsigned, Pci* info) {
  return fill(info, kPci[1 - index_of(handle)]);
}

int nvmlDeviceGetTopologyCommonAncestor(void*, void*, unsigned* level) { return (*level = 50) == 0; }

int nvmlDeviceGetP2PStatus(void* one, void*, unsigned capability, unsigned* status) {
  *status = capability == 1 && index_of(one) == 1 ? 4 : 0;
  return capability < 4 ? 0 : kInvalid;
}
}
