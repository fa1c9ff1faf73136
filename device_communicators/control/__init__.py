"""The control plane: exits of ranks, agreements among ranks, questions to a rank. docs/protocol.md describes it.

`csrc` has the core, a C++ state machine without I/O, and the driver that runs it. `plane` is the interface in Python.
"""
