"""Detects deaths of other ranks, and finds why a process doesn't run and which code its threads run."""
