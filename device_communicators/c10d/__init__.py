"""torch.distributed's backend "parallel_state": collectives and transfers of CPU tensors.

May import `routing`, `cpu` and the packages that these may import. Only `parallel_state`, which registers the backend,
imports this one.
"""

from device_communicators.c10d.registration import register

__all__ = ["register"]
