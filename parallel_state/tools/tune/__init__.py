"""The command `tune`: measures which kernel is fastest for which size on this machine, and writes it down."""

SIZES = tuple(1 << power for power in range(10, 27))
"""Default sizes, in bytes per rank."""
PROOF_CALLS = 100_000
"""Default number of calls in the proof."""
