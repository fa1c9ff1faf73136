"""Functions over this process's groups: getters, other projects' names, graph capture, traces, recovery, helpers."""
