"""Moves CPU tensors between processes: shared memory, TCP connections, collectives and their C++ in `csrc/`."""
