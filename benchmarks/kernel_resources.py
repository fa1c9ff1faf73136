"""Lists registers, spills, stack and shared memory of the GPU kernels on each architecture, as ptxas reports them.

    python benchmarks/kernel_resources.py [--save results/kernel_resources.json]

Needs NVRTC (`pip install parallel-state[cuda]`) but no GPU.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path

from device_communicators.peer import kernels as peer_kernels

ARCHITECTURES = ("sm_80", "sm_90")

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def read(log: str) -> dict[str, dict[str, int]]:
    found = {}
    for match in _KERNEL.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        stack = re.search(r"(\d+) bytes cumulative stack", match["rest"])  # includes called functions
        found[match["name"]] = {
            "registers": int(match["registers"]),
            "spilled_bytes": int(match["stores"]) + int(match["loads"]),
            "stack_bytes": max(int(match["stack"]), int(stack[1]) if stack else 0),
            "shared_bytes": int(shared[1]) if shared else 0,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    version = peer_kernels.nvrtc_version()
    tables = {}
    for arch in ARCHITECTURES:
        log = io.StringIO()
        cubin = peer_kernels.compile_kernels(arch, log=log)
        tables[arch] = read(log.getvalue())
        print(f"{arch}: NVRTC {version[0]}.{version[1]}, a cubin of {len(cubin) >> 10} KiB")
        print(f"  {'kernel':36s} registers  spilled  stack  shared memory")
        for name, used in sorted(tables[arch].items()):
            figures = (used["registers"], used["spilled_bytes"], used["stack_bytes"], used["shared_bytes"])
            print("  {:36s} {:9d} {:8d} {:6d} {:14d}".format(name, *figures))
    if options.save:
        content = {"nvrtc": f"{version[0]}.{version[1]}", "architectures": tables}
        options.save.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
