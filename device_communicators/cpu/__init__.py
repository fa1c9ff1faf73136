"""The memory of one host, shared by its ranks: segments, collectives, message queues, arenas; their C++ in `csrc/`.

May import `routing` and what is below it.
"""
