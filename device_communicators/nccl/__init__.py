"""NCCL on the caller's current stream: a group's communicator, links between pairs, set-up, deadlines and aborts.

May import `cuda`, `routing` and the packages below them.
"""
