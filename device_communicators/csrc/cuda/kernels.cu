// The translation unit of all kernels: their names, as the host looks them up, and nothing else. Not run on a GPU.
#include "push.cuh"

#define KERNEL(NAME, BODY)                                                                                     \
  extern "C" __global__ void __launch_bounds__(parallel_state::MAX_THREADS) NAME(                              \
      const __grid_constant__ parallel_state::Call call) {                                                     \
    BODY(call);                                                                                                \
  }

#define KERNEL_OF_EACH_DTYPE(NAME)                                \
  KERNEL(NAME##_float32, parallel_state::NAME<parallel_state::Float32>) \
  KERNEL(NAME##_float16, parallel_state::NAME<parallel_state::Float16>) \
  KERNEL(NAME##_bfloat16, parallel_state::NAME<parallel_state::BFloat16>)

KERNEL_OF_EACH_DTYPE(all_reduce_push)
