"""torch's process groups as communicators: gloo, NCCL by torch, torch's fake one.

May import `routing` and what is below it.
"""
