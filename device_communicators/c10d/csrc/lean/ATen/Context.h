// Replaces torch's ATen/Context.h, which each header of ATen/ops includes without need: it includes all intrinsics.
#pragma once

#include <torch/headeronly/version.h>

#if !(TORCH_VERSION_MAJOR == 2 && (TORCH_VERSION_MINOR == 13 || TORCH_VERSION_MINOR == 15))  // tested with these
#include_next <ATen/Context.h>
#endif
