"""Passes over compiled graphs, which replace sequences of nodes by fused calls."""
