"""The fork server imports this module, and so inductor, which then tests the C++ compiler."""

from __future__ import annotations

import os
from contextlib import suppress

# More would be threads of the fork server. Forks lack them, and would wait forever for their kernels.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # scalar code: each kernel compiles 0.5 s faster

import torch
import torch._inductor.compile_fx
import torch._inductor.config

torch._inductor.config.compile_threads = 1  # if it was imported earlier

with suppress(ImportError):
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # starts no thread

with suppress(Exception), torch.no_grad():
    torch.compile(lambda x: x.sin() + 1)(torch.ones(4))
torch._dynamo.reset()
