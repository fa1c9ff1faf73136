"""The control plane: reports exits of ranks, lets ranks agree on values, and sends questions to ranks. docs/protocol.md
describes its protocol.
"""
