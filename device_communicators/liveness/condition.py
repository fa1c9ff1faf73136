"""Finds why a process of this host doesn't run."""

from __future__ import annotations

from pathlib import Path

_STOPPED = {
    "T": "stopped by a signal (SIGSTOP, SIGTSTP; `kill -CONT {pid}` lets it go on)",
    "t": "stopped by a debugger (pid {tracer})",
    "D": "in the kernel, in a wait that no signal ends (a disk, a network file system, a driver)",
    "Z": "exited, and its parent has not waited for it",
}
"""Descriptions of states, by letter in /proc/PID/stat. In other states, a process runs or sleeps normally."""
_SWAPPED_BYTES = 256 << 20


def condition_of(pid: int, proc: Path = Path("/proc")) -> str:
    """Returns why the process `pid` doesn't run, or "" if it runs or its state is unknown."""
    try:
        state = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(") ")[2][:1]
        lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    facts = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.split()}
    stopped = _STOPPED.get(state)
    if stopped is not None:
        return stopped.format(pid=pid, tracer=facts.get("TracerPid", "?"))
    in_swap, in_memory = (int(facts.get(name, "0")) << 10 for name in ("VmSwap", "VmRSS"))
    if in_swap > max(_SWAPPED_BYTES, in_memory):
        return f"swapped out ({in_swap >> 20} MiB of it are in swap, {in_memory >> 20} MiB in memory)"
    return ""
