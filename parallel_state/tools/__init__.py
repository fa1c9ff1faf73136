"""The commands of `python -m parallel_state`: plan, topology, debug, bench, peers, tune.

May import everything of the package; nothing imports it.
"""
