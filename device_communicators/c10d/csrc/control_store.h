#pragma once

#include <torch/csrc/utils/pybind.h>

namespace parallel_state {

void add_control_store(pybind11::module_& module);

}  // namespace parallel_state
