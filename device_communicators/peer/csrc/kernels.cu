// kernels.py looks these names up.
#include "add_rms_norm.cuh"
#include "gather_scatter.cuh"
#include "push.cuh"
#include "staged.cuh"

// A multiprocessor needs to hold only one block.
#define KERNEL(NAME, BODY)                                                     \
  extern "C" __global__ void __launch_bounds__(parallel_state::MAX_THREADS, 1) \
      NAME(const __grid_constant__ parallel_state::Call call) {                \
    BODY(call);                                                                \
  }

#define KERNEL_OF_EACH_DTYPE(NAME)                                      \
  KERNEL(NAME##_float32, parallel_state::NAME<parallel_state::Float32>) \
  KERNEL(NAME##_float16, parallel_state::NAME<parallel_state::Float16>) \
  KERNEL(NAME##_bfloat16, parallel_state::NAME<parallel_state::BFloat16>)

KERNEL_OF_EACH_DTYPE(all_reduce_push)
KERNEL_OF_EACH_DTYPE(all_reduce_pull)
KERNEL_OF_EACH_DTYPE(all_reduce_two_shot)
KERNEL_OF_EACH_DTYPE(reduce_scatter_push)
KERNEL_OF_EACH_DTYPE(reduce_scatter_pull)
KERNEL(all_gather_push, parallel_state::all_gather_push)
KERNEL(all_gather_pull, parallel_state::all_gather_pull)
KERNEL_OF_EACH_DTYPE(all_reduce_add_rms_norm)
KERNEL_OF_EACH_DTYPE(all_reduce_add_rms_norm_static_fp8)
KERNEL_OF_EACH_DTYPE(all_reduce_add_rms_norm_token_fp8)
