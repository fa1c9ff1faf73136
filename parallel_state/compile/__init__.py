"""Passes over compiled graphs: finds what the fused calls can carry, and puts them in its place.

May import `collectives`' ops only.
"""
