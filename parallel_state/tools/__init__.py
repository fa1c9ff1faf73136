"""The commands of `python -m parallel_state`: check, plan, topology, debug, bench, peers, tune.

May import everything of the package; nothing imports it.
"""
