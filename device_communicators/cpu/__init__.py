"""All that moves CPU tensors between processes: shared memory, TCP connections, collectives and their C++ in `csrc/`.

May import `calls`, `liveness` and what these import. `cpu_communicator` makes a communicator of this package.
"""
