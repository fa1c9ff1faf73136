"""Compiler passes that replace sequences of graph nodes by fused calls."""
