"""Measures several ways to do the same, each in processes of its own, in turns, and writes a page about it.

| | |
|---|---|
| `command.py` | `python -m parallel_state bench`: chooses cases and peers, measures, writes |
| `page.py`, `picture.py` | the page, its tables and its pictures |
| `peers.py` | the libraries to compare with: fetches, finds and loads them |
| `teams.py`, `worker.py` | the processes of one runtime, asked from outside; idle ones sleep |
| `rounds.py` | a case: prepare, check, calibrate, rounds in turns, check again; how busy the machine was |
| `collectives.py`, `mpi.py`, `messages.py` | the candidates: how each library is called |
| `ranks.py`, `devices.py` | for ranks that run a benchmark themselves: communicators one by one, GPUs, CUDA graphs |
| `report.py` | medians, ratios, tables, JSON |

A candidate that fails is left out alone, with its reason; figures of a wrong answer are never printed or drawn.
"""
