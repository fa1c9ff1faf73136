"""Communicators of CPU tensors: over one host's shared memory; over several hosts, whose first ranks are connected.

May import `routing` and what is below it.
"""
