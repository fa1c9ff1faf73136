"""Runs collectives and transfers of GPU tensors over NCCL, with deadlines and aborts, on the caller's current
stream.
"""
