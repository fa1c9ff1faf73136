"""Measuring several ways to do the same, each in processes of its own, in turns.

| | |
|---|---|
| `teams.py` | the processes of one runtime (torch, an MPI), started and asked from outside; idle ones sleep |
| `worker.py` | what runs in such a process |
| `rounds.py` | a case: prepare, check, find how many calls a round takes, rounds in turns, check again |
| `strangers.py` | how much of the machine others used meanwhile |
| `report.py` | medians, ratios, tables, JSON with machine and commit |
| `picture.py` | microseconds over bytes, as SVG |
| `devices.py`, `graphs.py` | for ranks that run a benchmark themselves: GPUs shared, events, CUDA graphs |
| `options.py` | the command line that all benchmarks share |

Figures of a candidate whose answer was wrong are never printed or drawn.
"""
