"""The memory of one host, shared by its ranks: segments, collectives, message queues, arenas; their C++ in `csrc/`.

May import `calls`, `liveness` and what is below them; the communicators over it lie in `hierarchical`.
"""
