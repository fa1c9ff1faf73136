"""The backend "parallel_state" of torch.distributed: collectives and transfers of CPU tensors."""

from device_communicators.c10d.registration import register

__all__ = ["register"]
