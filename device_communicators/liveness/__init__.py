"""Detects deaths of other ranks. Finds why a process doesn't run, and which code its threads run."""
