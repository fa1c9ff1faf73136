"""Imported by the fork server: inductor, and what each process asks of the C++ compiler before its first kernel."""

from __future__ import annotations

import os
from contextlib import suppress

# More would be threads of the fork server, which its forks don't have: they would wait for their kernels forever.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # scalar code: a kernel costs 0.5 s less, and no instruction set is tried

import torch
import torch._inductor.compile_fx
import torch._inductor.config

torch._inductor.config.compile_threads = 1  # where it was imported before the variable was set

with suppress(ImportError):
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # it has a thread

with suppress(Exception), torch.no_grad():  # without a C++ compiler tests say so
    torch.compile(lambda x: x.sin() + 1)(torch.ones(4))
torch._dynamo.reset()
