"""Functions over the groups of `state`: getters, other projects' names, graph capture, traces, recovery, helpers."""
