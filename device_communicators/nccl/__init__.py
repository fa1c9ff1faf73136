"""NCCL for a group's GPU tensors, on the caller's current stream: set-up, collectives, transfers,
deadlines and aborts.
"""
