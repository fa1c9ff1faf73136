#include "library.h"

#include <dlfcn.h>

#include <stdexcept>

namespace parallel_state {

Library::Library(const std::string& path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed
  if (handle == nullptr)
    throw std::runtime_error(std::string("the compiled collectives can't be opened: ") + dlerror());
  const auto find = [handle](auto& function, const char* name) {
    void* const found = dlsym(handle, name);
    if (found == nullptr) throw std::runtime_error(std::string("the compiled collectives lack ") + name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
#define FIND(name) find(name, "ps_" #name)
  FIND(group_timeout);
  FIND(group_doom);
  FIND(wait_gently);
  FIND(barrier);
  FIND(all_reduce);
  FIND(reduce_scatter);
  FIND(all_gather);
  FIND(gatherv);
  FIND(broadcast);
  FIND(scatter);
  FIND(all_to_all);
  FIND(window_new);
  FIND(window_open);
  FIND(window_put);
  FIND(window_signal);
  FIND(window_wait);
  FIND(window_memory);
  FIND(window_end);
  FIND(window_delete);
  FIND(transfers_delete);
  FIND(transfers_start);
  FIND(transfers_wait);
  FIND(transfers_interrupt);
  FIND(transfers_failure);
  FIND(transfers_drain);
  FIND(transfers_close);
  FIND(store_ask);
  FIND(store_wait);
  FIND(store_take);
  FIND(store_end);
  FIND(has_signal);
#undef FIND
}

}  // namespace parallel_state
