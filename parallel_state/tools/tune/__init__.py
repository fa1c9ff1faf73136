"""The command `tune`: measures kernels."""

SIZES = tuple(1 << power for power in range(10, 27))
"""Measured sizes, in bytes per rank."""
PROOF_CALLS = 100_000
