"""Names of measured operations and implementations."""

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
PING_PONG = "ping_pong"
"""Rank 0 sends a tensor to rank 1, and rank 1 sends the tensor back."""
OBJECT = "object"
"""Like PING_PONG, but the ranks send a dict that contains the tensor."""
OWN, GLOO = "parallel_state", "gloo"
