"""The shared-memory kernels called from a C loop, beside Intel MPI in the same processes: what kernels cost alone.

    python benchmarks/kernels.py --ranks 2 --sizes 1K,8K,1M
    python benchmarks/kernels.py --ranks 4 --mpi /path/of/an/environment/with/mpi4py/and/impi-rt --touch

Ranks are pinned, round robin. Each size is checked, then timed in interleaved rounds; the slowest rank's time counts,
and of the rounds the median. `--touch`: each iteration writes the input and reads the output, whose own time is taken
off; without, a tight loop. The buffers are this process's own, but for the symmetric ones.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HEADER_BYTES = 1 << 16
ARENA_BYTES = 160 << 20
SEGMENT_BYTES = 64 << 20
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
DTYPES = {"float32": 0, "float16": 2, "bfloat16": 3}
MPI_DTYPES = {"float32": 0x4C00040A, "float16": 0x4C000246, "bfloat16": 0x4C000247}  # of Intel MPI 2021
MPI_BYTE, MPI_SUM = 0x4C00010D, 0x58000003
MPI_NAMES = ("MPI_Allreduce", "MPI_Allgather", "MPI_Reduce_scatter_block", "MPI_Bcast", "MPI_Alltoall")
THREES = {"float32": 0x40400000, "float16": 0x4200, "bfloat16": 0x4040}
"""The bits of 3.0."""


class Call(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64), ("function", ctypes.c_void_p), ("group", ctypes.c_uint64), ("out", ctypes.c_void_p),
        ("in_", ctypes.c_void_p), ("count", ctypes.c_size_t), ("dtype", ctypes.c_int64), ("op", ctypes.c_int64),
        ("comm", ctypes.c_int64), ("blocks", ctypes.POINTER(ctypes.c_size_t)),
    )  # fmt: skip


class Memory:
    """A map, shared with the other ranks where it has a path."""

    def __init__(self, size_bytes: int, path: str = "") -> None:
        if path:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), size_bytes)
        else:
            self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = (ctypes.c_char * size_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._view)


class Group(NamedTuple):
    """Of one library, on this rank."""

    library: ctypes.CDLL
    number: ctypes.c_uint64
    arena: int


class Worker:
    """One rank: its maps, a group of each library, and MPI's communicator where there is one."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank, self.size = options, rank, options.ranks
        self.loop = ctypes.CDLL(options.loop)
        self.loop.time_loop.restype = ctypes.c_double
        self.loop.time_loop.argtypes = (ctypes.POINTER(Call),) + (ctypes.c_int,) * 3 + (ctypes.c_size_t,) * 2
        self.header_memory = Memory(HEADER_BYTES, f"{options.folder}/header")
        self.header = (ctypes.c_int64 * 128).from_address(self.header_memory.address)
        self.times = (ctypes.c_double * 64).from_address(self.header_memory.address + 2048)
        self.private = Memory(2 * ARENA_BYTES)
        self.groups: dict[str, Group] = {}
        policy = self._meet()
        for index, path in enumerate(options.library.split(",")):
            name = f"ours:{Path(path).stem}" if index else "ours"
            self.groups[name] = self._group(ctypes.CDLL(path), index, *policy)
        self.mpi = self.comm = None
        if options.mpi:
            from mpi4py import MPI

            self.mpi, self.comm = ctypes.CDLL(f"{options.mpi}/lib/libmpi.so"), MPI.COMM_WORLD
            self.mpi_module = MPI

    def _meet(self) -> tuple[int, int]:
        """Until all ranks have told their pids; the waiting policy, as shared_memory.py chooses it."""
        self.header[self.rank] = os.getpid()
        deadline = time.monotonic() + 30
        while not all(self.header[: self.size]):
            if time.monotonic() > deadline:
                raise TimeoutError("the other ranks have not come")
            time.sleep(0.001)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self.rank % len(cores)]})
        yields = 100 if self.size > len(cores) else 0
        return int((self.options.spin_us or (5 if yields else 150)) * 1000), yields

    def _group(self, library: ctypes.CDLL, index: int, spin_ns: int, yields: int) -> Group:
        library.ps_segment_bytes.restype = ctypes.c_size_t
        library.ps_map.restype = ctypes.c_void_p
        library.ps_group_new.restype = ctypes.c_uint64
        segment_bytes = ctypes.c_size_t(library.ps_segment_bytes(self.size))

        def mapped(name: str, size_bytes: ctypes.c_size_t) -> ctypes.c_void_p:
            with open(f"{self.options.folder}/{name}", "r+b") as file:
                return ctypes.c_void_p(library.ps_map(file.fileno(), size_bytes, ctypes.c_size_t(0)))

        number = library.ps_group_new(
            mapped(f"segment{index}", segment_bytes), segment_bytes, self.rank, self.size,
            ctypes.c_int64(spin_ns), yields, ctypes.c_double(60),
        )  # fmt: skip
        group = Group(library, ctypes.c_uint64(number), 0)
        if "symmetric" in self.options.collectives:
            size_bytes = ctypes.c_size_t(2 * ARENA_BYTES)
            addresses = [mapped(f"arena{index}-{each}", size_bytes).value for each in range(self.size)]
            with open(f"{self.options.folder}/arena{index}-{self.rank}", "r+b") as file:
                library.ps_group_arenas(
                    group.number,
                    (ctypes.c_void_p * self.size)(*addresses),
                    size_bytes,
                    file.fileno(),
                    ctypes.c_size_t(0),
                )
            group = group._replace(arena=addresses[self.rank] or 0)
        return group

    def barrier(self) -> None:
        group = self.groups["ours"]
        if group.library.ps_barrier(group.number, 0, 0) != 0:
            raise RuntimeError("a barrier failed")

    def distance(self) -> None:
        """Returns how far apart the ranks are just now; under a hypervisor that changes, and every figure with it."""
        times = []
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(2000):
                self.barrier()
            times.append((time.perf_counter() - started) / 2000 * 1e6)
        if self.rank == 0:
            print(json.dumps({"barrier": min(times)}), flush=True)

    def slowest(self, time_us: float) -> float:
        self.times[self.rank] = time_us
        self.barrier()
        found = max(self.times[: self.size])
        if min(self.times[: self.size]) < -1e8:
            raise RuntimeError(f"a call failed: {list(self.times[: self.size])}")
        self.barrier()
        return found

    def call(self, who: str, collective: str, size_bytes: int) -> tuple[Call, int, int]:
        """Returns the call and the bytes it reads and writes. `size_bytes`: of the tensor that is whole on a rank."""
        width, dtype = WIDTHS[self.options.dtype], self.options.dtype
        group = self.groups.get(who)
        out = group.arena if group is not None and collective.endswith("symmetric") else self.private.address
        collective = collective.removesuffix("_symmetric")
        each = size_bytes // self.size
        in_bytes = each if collective == "all_gather" else size_bytes
        out_bytes = each if collective == "reduce_scatter" else size_bytes
        in_ = out if collective in ("all_reduce", "broadcast") else out + ARENA_BYTES
        blocks = (ctypes.c_size_t * self.size)(*([each] * self.size))
        counts = {"all_gather": each, "all_to_all": each, "reduce_scatter": each // width, "broadcast": size_bytes}
        count = counts.get(collective, size_bytes // width)
        call = Call(0, None, 0 if group is None else group.number.value, out, in_, count, DTYPES[dtype], 0, 0, blocks)
        if group is not None:
            call.kind = 1
            call.function = ctypes.cast(getattr(group.library, f"ps_{collective}"), ctypes.c_void_p)
        elif who.startswith("mpi"):
            call.kind = 2
            call.function = ctypes.cast(getattr(self.mpi, MPI_NAMES[COLLECTIVES.index(collective)]), ctypes.c_void_p)
            call.dtype = MPI_DTYPES[dtype] if "reduce" in collective else MPI_BYTE
            call.op, call.comm = MPI_SUM, self.mpi_module._handleof(self.comm)
        return call, in_bytes, out_bytes

    def check(self, who: str, collective: str, size_bytes: int) -> None:
        """One call on 3.0 everywhere; what isn't right ends the run."""
        call, in_bytes, out_bytes = self.call(who, collective, size_bytes)
        width = WIDTHS[self.options.dtype]
        ctypes.memset(call.out, 0, out_bytes)
        three = THREES[self.options.dtype]
        ctypes.memmove(call.in_, three.to_bytes(width, "little") * (in_bytes // width), in_bytes)
        if collective == "broadcast" and self.rank:
            ctypes.memset(call.out, 0, out_bytes)
        self.barrier()
        status = self.loop.time_loop(call, self._kernel(collective), 1, 0, in_bytes, out_bytes)
        # 3.0 times 2, 4, 8 or 16: the exponent goes up by 1 to 4.
        shift = {"float32": 23, "float16": 10, "bfloat16": 7}[self.options.dtype]
        factor = (self.size.bit_length() - 1) << shift if "reduce" in collective else 0
        expected = (three + factor).to_bytes(width, "little") * (out_bytes // width)
        if status < 0 or ctypes.string_at(call.out, out_bytes) != expected:
            raise RuntimeError(f"{who}: {collective} of {size_bytes} bytes is wrong: status {status}")

    def _kernel(self, collective: str) -> int:
        return COLLECTIVES.index(collective.removesuffix("_symmetric"))

    def timed(self, who: str, collective: str, size_bytes: int, iterations: int) -> float:
        call, in_bytes, out_bytes = self.call(who, collective, size_bytes)
        self.barrier()
        if who == "mpi4py":
            return self.slowest(self._through_mpi4py(collective, call, size_bytes, iterations))
        touch = int(self.options.touch)
        found = self.loop.time_loop(call, self._kernel(collective), iterations, touch, in_bytes, out_bytes)
        if touch and found >= 0:
            self.barrier()
            call.kind = 0
            found -= self.loop.time_loop(call, self._kernel(collective), iterations, touch, in_bytes, out_bytes)
        return self.slowest(found)

    def _through_mpi4py(self, collective: str, call: Call, size_bytes: int, iterations: int) -> float:
        if collective != "all_reduce":
            raise RuntimeError("mpi4py is timed for all_reduce only")
        buffer = (ctypes.c_char * size_bytes).from_address(call.out)
        dtype = self.mpi_module.Datatype.fromhandle(call.dtype)
        given = [buffer, size_bytes // WIDTHS[self.options.dtype], dtype]
        in_place, all_reduce = self.mpi_module.IN_PLACE, self.comm.Allreduce
        started = time.perf_counter()
        for _ in range(iterations):
            all_reduce(in_place, given)
        return (time.perf_counter() - started) / iterations * 1e6


def work(options: argparse.Namespace, rank: int) -> None:
    worker = Worker(options, rank)
    worker.distance()
    for collective in options.collectives.split(","):
        for size in map(_bytes, options.sizes.split(",")):
            rivals = list(worker.groups)
            if options.mpi and not collective.endswith("symmetric"):
                rivals += ["mpi"] + (["mpi4py"] if collective == "all_reduce" and not options.touch else [])
            rivals = [each for each in rivals if each in options.only.split(",")] if options.only else rivals
            for who in rivals:
                worker.check(who, collective, size)
            iterations = max(4, min(2000, (options.budget << 20) // (size + 8192)))
            times: dict[str, list[float]] = {who: [] for who in rivals}
            for round_ in range(options.rounds):
                for who in rivals if round_ % 2 else rivals[::-1]:
                    times[who].append(worker.timed(who, collective, size, iterations))
            if rank == 0:
                result: dict[str, Any] = {"collective": collective, "bytes": size, "us": times}
                print(json.dumps(result), flush=True)


def _bytes(text: str) -> int:
    return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0)


def _report(line: str) -> None:
    result = json.loads(line)
    if "barrier" in result:
        print(f"barrier {result['barrier']:.2f} us through ctypes")
        return
    medians = {who: statistics.median(times) for who, times in result["us"].items()}
    row = f"{result['collective']:21} {result['bytes'] >> 10:6} KiB"
    for who, median in medians.items():
        ratio = f" ({medians['ours'] / median:.2f})" if who != "ours" and "ours" in medians else ""
        row += f"  {who} {median:9.2f} [{min(result['us'][who]):.2f}]{ratio}"
    print(row, flush=True)


@contextlib.contextmanager
def _folder(ranks: int, libraries: int) -> Iterator[str]:
    """The files that the ranks map, and the compiled loop."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kernels-") as folder:
        sizes = {"header": HEADER_BYTES}
        sizes |= {f"segment{index}": SEGMENT_BYTES for index in range(libraries)}
        sizes |= {f"arena{index}-{rank}": 2 * ARENA_BYTES for index in range(libraries) for rank in range(ranks)}
        for name, size in sizes.items():
            with open(f"{folder}/{name}", "wb") as file:
                file.truncate(size)
        source = Path(__file__).with_name("kernel_loop.cpp")
        flags = ("-O2", "-mavx2", "-shared", "-fPIC")
        subprocess.run(["c++", *flags, "-o", f"{folder}/loop.so", str(source)], check=True, timeout=60)
        yield folder


def _library() -> str:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from device_communicators.cpu import native, native_build

    path, problem = native.find_or_compile(native_build.plain_recipe())
    if path is None:
        raise SystemExit(problem)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8, 16))
    parser.add_argument("--sizes", default="1K,8K,64K,256K,1M,16M,64M")
    parser.add_argument(
        "--collectives", default="all_reduce", help=", ".join(COLLECTIVES) + "; each with _symmetric too"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=WIDTHS)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--budget", type=int, default=16, help="MiB that one timing moves, as far as 2000 calls do")
    parser.add_argument("--touch", action="store_true")
    parser.add_argument("--only", default="", help="ours, mpi, mpi4py: these only")
    parser.add_argument("--spin-us", type=float, default=0.0)
    parser.add_argument("--mpi", default="", help="an environment with mpi4py and impi-rt")
    parser.add_argument("--library", default="", help="paths of compiled libraries, to compare; default: this tree's")
    for internal in ("folder", "loop", "rank"):
        parser.add_argument(f"--{internal}", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        work(options, int(options.rank or os.environ["PMI_RANK"]))
        return
    with _folder(options.ranks, options.library.count(",") + 1) as folder:
        arguments = sys.argv[1:] + [f"--folder={folder}", f"--loop={folder}/loop.so"]
        arguments += [] if options.library else [f"--library={_library()}"]
        _launch(options, arguments, _report)


def _launch(options: argparse.Namespace, arguments: list[str], report: Callable[[str], None]) -> None:
    environment = {**os.environ, "I_MPI_PIN": "0"}
    if options.mpi:
        commands = [[f"{options.mpi}/bin/mpirun", "-n", str(options.ranks), f"{options.mpi}/bin/python", __file__]]
        environment["PATH"] = f"{options.mpi}/bin:{os.environ['PATH']}"
    else:
        commands = [[sys.executable, __file__, f"--rank={rank}"] for rank in range(options.ranks)]
    running = [
        subprocess.Popen([*command, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        lines = running[0].stdout
        for line in lines or ():
            if line.startswith("{"):
                report(line)
        for process in running:
            process.wait(timeout=60)
        if any(process.returncode for process in running):
            raise SystemExit(f"a rank failed: {[process.returncode for process in running]}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
