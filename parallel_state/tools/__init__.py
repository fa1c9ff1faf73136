"""The commands of `python -m parallel_state`: check, plan, topology, debug, trace, bench, tune."""
