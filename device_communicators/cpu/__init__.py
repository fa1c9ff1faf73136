"""CPU tensors of processes: segments, connections, transfers, collectives, queues, arenas; their C++ in `csrc/`.

May import `calls`, `liveness` and what is below them; the communicator over it is `cpu_communicator`.
"""
