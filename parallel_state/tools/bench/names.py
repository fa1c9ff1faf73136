"""Names of operations and candidates. Imports no torch."""

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
PING_PONG = "ping_pong"
"""Rank 0 sends a tensor to rank 1, which sends it back."""
OBJECT = "object"
"""Like PING_PONG, with the tensor in a dict."""
OWN, GLOO = "parallel_state", "gloo"
