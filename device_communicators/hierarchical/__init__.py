"""Groups over several hosts: shared memory within each, the hosts' first ranks between them.

May import `cpu`, `routing` and what is below them.
"""
