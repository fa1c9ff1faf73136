"""The control plane: who is in a world, who lives, and what members agree on. docs/protocol.md describes it.

Only its core is there, in `csrc`: a C++ value without I/O. No driver runs it, and no other room uses it yet.
"""
