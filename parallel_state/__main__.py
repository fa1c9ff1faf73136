"""Runs one command of `python -m parallel_state`. Imports only that command's module, so that commands without torch
start quickly.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from device_communicators.base.interrupts import run_interruptible, signals_wait
from parallel_state import __version__
from parallel_state.tools.arguments import PROGRAM, command_parser

COMMANDS = {
    "check": (
        "parallel_state.tools.check.command",
        "tests if this job will work here, and how fast; under any launcher",
    ),
    "plan": ("parallel_state.tools.plan.command", "shows groups, warnings and a picture of a layout; starts nothing"),
    "topology": ("parallel_state.tools.topology", "shows this machine's GPUs: NVLink, PCIe, cores, peer access"),
    "debug": ("parallel_state.tools.debug", "shows each rank's last call from records in a folder, and missing ranks"),
    "trace": ("parallel_state.tools.trace", "merges the ranks' traces: arrows, and the longest waits"),
    "bench": ("parallel_state.tools.bench.command", "measures latency and bandwidth here, also of torch.distributed"),
    "build": ("parallel_state.tools.build", "compiles the native code for the installed torch, as the first use would"),
    "tune": ("parallel_state.tools.tune.command", "tests and measures the kernels on this machine's GPUs, for `auto`"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items())
    parser = command_parser(
        "", "<command> [options]", "Groups of ranks, and the transports that move tensors between them.",
        epilog=f"commands:\n{table}\n\n`{PROGRAM} <command> --help` lists a command's options.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"parallel-state {__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="command", help="one of those below")
    command = parser.parse_args(words[:1]).command
    if command is None:
        parser.print_help()
        return 0
    name, _ = COMMANDS[command]
    with signals_wait():
        module = import_module(name)
    exit_code: int = module.main(words[1:])
    return exit_code


def run() -> int:
    """Runs the command and returns its exit code, or 128 + the signal's number after SIGINT, SIGTERM or SIGPIPE."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # "×" can't be written in the encoding of LC_ALL=C
            stream.reconfigure(errors="replace")
    try:
        try:
            exit_code = run_interruptible(PROGRAM, main)
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except OSError as error:
        # A closed pipe (`… | head`) or a full disk, of the output: an error of another file has a filename.
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at its end
        if error.errno == errno.ENOSPC:
            print(f"{PROGRAM}: the output can't be written: {error.strerror}", file=sys.stderr)
            return 1
        return 128 + signal.SIGPIPE
    return exit_code


if __name__ == "__main__":
    sys.exit(run())
