"""Moves CPU tensors between processes by shared memory and TCP connections. `csrc/` has the C++ code."""
