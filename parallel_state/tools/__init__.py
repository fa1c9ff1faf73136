"""The commands of `python -m parallel_state`: check, plan, topology, debug, trace, bench, tune.

They may import every other module of the package; `__main__` imports them.
"""
