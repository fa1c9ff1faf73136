"""Conditions in which the kernel keeps a process of this host from going on: stopped, at a disk, swapped out."""

from __future__ import annotations

from pathlib import Path

_STOPPED = {
    "T": "stopped by a signal (SIGSTOP, SIGTSTP; `kill -CONT {pid}` lets it go on)",
    "t": "stopped by a debugger (pid {tracer})",
    "D": "in the kernel, in a wait that no signal ends (a disk, a network file system, a driver)",
    "Z": "ended, and not waited for by its parent",
}
"""By the state in /proc/PID/stat; of those that are missing a process runs, or sleeps until something comes."""
_SWAPPED_BYTES = 256 << 20
"""Less than this in swap is nothing that holds a process up."""


def condition_of(pid: int, proc: Path = Path("/proc")) -> str:
    """Returns what keeps a process of this host from going on, in words; empty where nothing does or none can tell."""
    try:
        state = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(") ")[2][:1]
        lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:  # it has ended, or there is no /proc
        return ""
    facts = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.split()}
    stopped = _STOPPED.get(state)
    if stopped is not None:
        return stopped.format(pid=pid, tracer=facts.get("TracerPid", "?"))
    in_swap, in_memory = (int(facts.get(name, "0")) << 10 for name in ("VmSwap", "VmRSS"))
    if in_swap > max(_SWAPPED_BYTES, in_memory):
        return f"swapped out ({in_swap >> 20} MiB of it are in swap, {in_memory >> 20} MiB in memory)"
    return ""
