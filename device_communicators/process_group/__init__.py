"""torch's process groups as communicators: gloo with its calls compared first, NCCL by torch, torch's fake one.

May import `routing` and what is below it.
"""
