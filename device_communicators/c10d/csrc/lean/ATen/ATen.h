// Replaces torch's ATen/ATen.h, which c10d's headers include: all of ATen's functions take most of the compile time.
#pragma once

#include <torch/headeronly/version.h>

#if TORCH_VERSION_MAJOR == 2 && (TORCH_VERSION_MINOR == 13 || TORCH_VERSION_MINOR == 15)  // tested with these
#include <ATen/DeviceGuard.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorOptions.h>
#else
#include_next <ATen/ATen.h>
#endif
