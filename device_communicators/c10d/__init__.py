"""torch.distributed's backend "parallel_state": collectives of CPU tensors, and transfers within a host.

May import `routing`, `cpu` and what is below them; only `parallel_state`, which registers it, imports it.
"""

from device_communicators.c10d.registration import register

__all__ = ["register"]
