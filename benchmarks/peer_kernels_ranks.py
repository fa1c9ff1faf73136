"""Simulates ranks of a group on one GPU. In an *epoch* each kernel writes data for its peers, waits for theirs and
reads it. Rank 0's kernel can be measured alone, in three steps:

1. Each peer's kernel writes one epoch's data, and exits instead of waiting, because its abort word is set.
2. The host writes the peers' barrier flags.
3. Rank 0's kernel runs. It can run again after the host has reset the epoch number. A call must fit into one epoch.

NCCL and torch's symmetric memory (`Others`) run with one rank: see SEVERAL_RANKS.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from harness.timing import host_seconds
from torch import Tensor

from device_communicators.peer.device import HostWords
from device_communicators.peer.group import DTYPES
from device_communicators.peer.kernels import (
    MAX_BLOCKS,
    MAX_RANKS,
    PACKETS_OFFSET,
    PART_PACKETS,
    REGION_ALIGNMENT,
    REGION_BYTES,
    STAGE_BYTES,
    THREADS,
    Call,
    Launcher,
    grid,
    norm_grid,
    read_report,
)
from device_communicators.peer.thresholds import ALGORITHMS
from parallel_state.tools.bench.devices import Clock, captured
from parallel_state.tools.bench.rounds import TeamError, Timing

EPOCH = 8
"""Earlier epochs differ: in the first ones a block clears the next slot."""
DEADLINE_S = 20.0
"""Only a sanitizer makes waits long."""
_REPORT, _ABORT, _IGNORED_REPORT, _ALWAYS_ABORT, _WORDS = 0, 16, 32, 48, 64
_PACKET_BYTES = 16

Launch = Callable[[int], None]


class Machine(Protocol):
    device: torch.device
    kernels: Launcher
    clock: Clock

    def words(self, count: int) -> HostWords: ...
    def stream(self) -> int: ...
    def capture_stream(self) -> Any: ...
    def together(self, launches: Sequence[Launch]) -> None:
        """Runs all launches concurrently, ordered after the current stream, which then waits for them."""


class GpuMachine:
    def __init__(self) -> None:
        from device_communicators.peer.kernels import PeerKernels

        self.device = torch.device("cuda", torch.cuda.current_device())
        self.kernels: Launcher = PeerKernels.load(torch.cuda.current_device())
        self.clock = Clock(self.device)
        self._streams = [torch.cuda.Stream(self.device) for _ in range(MAX_RANKS)]
        self._capture_stream = torch.cuda.Stream(self.device)

    def words(self, count: int) -> HostWords:
        return HostWords(count)

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def capture_stream(self) -> Any:
        return self._capture_stream

    def together(self, launches: Sequence[Launch]) -> None:
        current = torch.cuda.current_stream(self.device)
        streams = self._streams[: len(launches)]
        for stream in streams:
            stream.wait_stream(current)
        for stream, launch in zip(streams, launches, strict=True):
            launch(int(stream.cuda_stream))
        for stream in streams:
            current.wait_stream(stream)


class EmulatedMachine:
    def __init__(self) -> None:
        from tests.helpers.cuda_on_cpu import CpuKernels

        self.device = torch.device("cpu")
        self.kernels: Launcher = CpuKernels()
        self.clock = Clock(self.device)
        self._pool = ThreadPoolExecutor(MAX_RANKS)

    def words(self, count: int) -> HostWords:
        return HostWords(count, pinned=False)

    def stream(self) -> int:
        return 0

    def capture_stream(self) -> Any:
        return None

    def together(self, launches: Sequence[Launch]) -> None:
        list(self._pool.map(lambda launch: launch(0), launches))


class Regions:
    """GPU memory of simulated ranks: `sets` groups, each of `size` ranks. Each call uses another group, so that several
    calls need no reset.
    """

    def __init__(self, machine: Machine, size: int, sets: int) -> None:
        self.machine, self.size, self.sets = machine, size, sets
        whole = torch.zeros(sets * size * REGION_BYTES + REGION_ALIGNMENT, dtype=torch.uint8, device=machine.device)
        start = -whole.data_ptr() % REGION_ALIGNMENT
        self._memory = whole[start : start + sets * size * REGION_BYTES].view(sets, size, REGION_BYTES)
        control = self._memory[..., :PACKETS_OFFSET].view(torch.int32)
        self._epochs, self._flags = control[..., :MAX_BLOCKS], control[..., MAX_BLOCKS:]
        self._words = machine.words(_WORDS)
        self._words[_ALWAYS_ABORT] = 1

    def call(self, which: int, rank: int, *, never_waits: bool = False, **fields: Any) -> Call:
        """Returns the kernel argument of `rank` in the group numbered `which`. `fields`: fields of `Call`; tensors
        become addresses. `never_waits`: the kernel exits instead of waiting for peers.
        """
        call = Call(rank=rank, size=self.size, deadline_ns=int(DEADLINE_S * 1e9))
        for peer in range(self.size):
            call.regions[peer] = self._memory[which, peer].data_ptr()
        call.report = self._words.address + 8 * (_IGNORED_REPORT if never_waits else _REPORT)
        call.abort = self._words.address + 8 * (_ALWAYS_ABORT if never_waits else _ABORT)
        for name, value in fields.items():
            setattr(call, name, value.data_ptr() if isinstance(value, Tensor) else value)
        return call

    def clear(self) -> None:
        self._memory.zero_()
        self._epochs.fill_(EPOCH)

    def arrive(self, kernel: str, blocks: int, threads: int, call: Callable[[int, int], Call]) -> None:
        """Runs the kernels of rank 0's peers, which write all data that rank 0 waits for. `call(which, rank)` returns a
        peer's kernel argument, made with `never_waits=True`.
        """
        self.clear()
        for which in range(self.sets):
            for rank in range(1, self.size):
                self.machine.kernels.launch(kernel, blocks, threads, call(which, rank), self.machine.stream())
        self._flags[:, 0].fill_(EPOCH + 1)
        self.machine.clock.finish()

    def rewind(self, blocks: int, members: int) -> None:
        """Resets rank 0's regions, so that its kernel can run again. `blocks`: thread blocks of the kernel. `members`:
        blocks that share a row of the norm, else 1; clears the signals between these blocks.
        """
        self._epochs[:, 0].fill_(EPOCH)
        if members > 1:
            own = self._memory[:, 0, PACKETS_OFFSET : PACKETS_OFFSET + 2 * MAX_BLOCKS * MAX_RANKS * PART_PACKETS * 16]
            parts = own.view(self.sets, 2, MAX_BLOCKS, MAX_RANKS, 2, MAX_BLOCKS, _PACKET_BYTES)
            parts[:, (EPOCH + 1) % 2, :blocks, 0, :, :members].zero_()

    def problem(self) -> str | None:
        report = read_report(self._words[_REPORT])
        return None if report is None else f"a kernel gave up: {report}"


def takes_one_epoch(how: str, nbytes: int, blocks: int) -> bool:
    unit, most = (8, PART_PACKETS) if how == "push" else (16, STAGE_BYTES // 16)
    things = math.ceil(nbytes / unit)
    return math.ceil(things / blocks) <= most


NCCL, ONE_SHOT = "NCCL, 1 rank", "symm_mem.one_shot_all_reduce, 1 rank"
SEVERAL_RANKS = (
    "several ranks need a process each, which take turns on one GPU: on a GPU for each rank, torchrun "
    "benchmarks/collectives.py and `python -m parallel_state tune` have them in turns with these kernels"
)


class Others:
    """Runs NCCL and torch's symmetric memory with one rank. The method `of` adds unavailable ones to `refused`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._problem: str | None = "there is no GPU"
        self._own_group = False
        self._staged: dict[tuple[int, torch.dtype], Tensor] = {}
        if device.type == "cuda":
            self._problem = self._start()

    def of(self, x: Tensor, refused: dict[str, str]) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        refused["NCCL and symm_mem with several ranks"] = SEVERAL_RANKS
        found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
        for name, make in ((NCCL, self._nccl), (ONE_SHOT, self._one_shot)):
            try:
                if self._problem is not None:
                    raise RuntimeError(self._problem)
                call = make(x)
                call(torch.empty_like(x), x)
                found[name] = call
            except Exception as problem:
                refused[name] = str(problem).strip().partition("\n")[0]
        return found

    def close(self) -> None:
        self._staged.clear()
        if self._own_group:
            dist.destroy_process_group()

    def _start(self) -> str | None:
        try:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=self._device)
        except Exception as problem:
            return str(problem).strip().partition("\n")[0]
        self._own_group = True
        return None

    def _nccl(self, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        def call(out: Tensor, given: Tensor) -> Tensor:
            out.copy_(given)
            dist.all_reduce(out)
            return out

        return call

    def _one_shot(self, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        import torch.distributed._symmetric_memory as symmetric_memory

        group: Any = dist.group.WORLD
        staged = self._staged.get((x.numel(), x.dtype))
        if staged is None:
            staged = symmetric_memory.empty(x.numel(), dtype=x.dtype, device=x.device)
            symmetric_memory.rendezvous(staged, group.group_name)
            self._staged[x.numel(), x.dtype] = staged

        def call(out: Tensor, given: Tensor) -> Tensor:
            staged.copy_(given)  # its input must be in symmetric memory
            result: Tensor = torch.ops.symm_mem.one_shot_all_reduce(staged, "sum", group.group_name)
            return result

        return call


FUSED, APART = "fused", "add, rms_norm"
TOGETHER = "of all ranks at once"
EPS = 1e-5
MANY, FEW, MANY_BYTES = 20, 4, 256 << 10
"""Calls per replay, which share its cost: FEW above MANY_BYTES, else MANY."""


Check = Callable[[list[Tensor]], "str | None"]
"""Returns the problem with several calls' results, or None."""


@dataclass(frozen=True)
class Candidate:
    several: Callable[[], list[Tensor]]
    """Makes `step` calls, and returns their results."""
    step: int
    check: Check
    arrive: Callable[[], None] | None = None
    """Writes the data of rank 0's peers. Runs before the calls."""
    key: str = ""
    """Candidates with equal keys share one `arrive`."""
    each: Sequence[Callable[[], object]] = ()
    """The calls of `several`, one by one, to measure the host's time of each."""
    begin: Callable[[], object] = lambda: None
    """Resets the memory. Runs before the first of `each`."""


@dataclass(frozen=True)
class Kernel:
    name: str
    blocks: int
    threads: int
    members: int


class KernelTeam:
    """Measures rank 0 among `size` simulated ranks. Has the methods of the harness's `Team`."""

    name = "peer kernels"

    def __init__(self, machine: Machine, size: int, modes: Sequence[str], together_bytes: int, few: bool) -> None:
        """`modes`: "eager", "graph" or both. `together_bytes`: from this size on, also runs all ranks' kernels at once.
        `few`: replays CUDA graphs of two calls, instead of 4 or 20.
        """
        self.machine, self.size, self.modes = machine, size, modes
        self.others: Others | None = None
        """If set, only these are measured. The caller closes them."""
        self.pids: list[int] = []
        self.refused: dict[str, str] = {}
        """Unavailable candidate -> reason."""
        self._together_bytes, self._few = together_bytes, few
        self._regions: dict[int, Regions] = {}
        self._candidates: dict[str, Candidate] = {}
        self._there = ""

    def ask(self, method: str, *arguments: Any, timeout_s: float = 0.0) -> list[Any]:
        try:
            return [getattr(self, method)(*arguments)]
        except Exception as error:
            raise TeamError(f"{self.name}: {method} failed: {error}") from error

    def prepare(self, values: dict[str, Any]) -> list[str]:
        self._candidates.clear()
        self.refused, self._there = {}, ""
        dtype, nbytes = getattr(torch, values["dtype"]), values["bytes"]
        self.dtype, self.numel = dtype, nbytes // dtype.itemsize
        self.sets = 2 if self._few else MANY if nbytes <= MANY_BYTES else FEW
        draw = torch.Generator().manual_seed(nbytes + self.size)
        given = torch.randn(self.size, self.numel, generator=draw).to(dtype).to(self.machine.device)
        self.inputs, self.total = given, sum_in_rank_order(given)
        self.own = given[0].expand(self.sets, -1).contiguous()
        self.outs = torch.empty_like(self.own)
        self.scratch, self.ys = torch.empty_like(given), torch.empty_like(self.own)
        if self.others is not None:
            for name, call in self.others.of(self.own[0], self.refused).items():
                self._repeated(name, call)
        elif values["part"] == "norm":
            self._prepare_norm(values["hidden"], draw)
        else:
            self._prepare_all_reduce(nbytes)
        return list(self._candidates)

    def check(self, name: str) -> str | None:
        candidate = self._candidates[name]
        self._arrive(candidate, again=True)
        for each in (self.outs, self.ys, self.scratch):
            each.fill_(math.nan)
        results = candidate.several()
        self.machine.clock.finish()
        return self._problem() or candidate.check(results)

    def run(self, name: str, calls: int) -> Timing:
        candidate = self._candidates[name]
        self._arrive(candidate)
        times = -(-calls // candidate.step)
        candidate.several()
        self.machine.clock.finish()

        def run() -> None:
            for _ in range(times):
                candidate.several()

        return Timing(elapsed_s=self.machine.clock.seconds(run) / (times * candidate.step) * calls)

    def host_us(self, name: str, rounds: int = 10) -> list[float]:
        candidate, found = self._candidates[name], []
        for _ in range(rounds if candidate.each else 0):
            self._arrive(candidate)
            candidate.begin()
            self.machine.clock.finish()
            found += host_seconds(self.machine.clock, _one_after_the_other(candidate.each), len(candidate.each))
        return [each * 1e6 for each in found]

    def close(self) -> None:
        self._candidates.clear()
        self._regions.clear()

    def _arrive(self, candidate: Candidate, again: bool = False) -> None:
        if candidate.arrive is not None and (again or self._there != candidate.key):
            candidate.arrive()
            self._there = candidate.key

    def _problem(self) -> str | None:
        return next(filter(None, (regions.problem() for regions in self._regions.values())), None)

    def _regions_of(self, sets: int) -> Regions:
        if sets not in self._regions:
            self._regions[sets] = Regions(self.machine, self.size, sets)
        return self._regions[sets]

    def _prepare_all_reduce(self, nbytes: int) -> None:
        for how in ALGORITHMS:
            kernel = self._all_reduce(how, nbytes)
            if takes_one_epoch(how, nbytes, kernel.blocks):
                self._alone(how, kernel, {}, lambda k: self.outs[k], functools.partial(self._check_sum, how))
            else:
                self.refused[how] = "alone: this size takes more than one epoch, so the others must run meanwhile"
            if nbytes >= self._together_bytes:
                self._together(how, nbytes)

    def _all_reduce(self, how: str, nbytes: int, ranks_at_once: int = 1) -> Kernel:
        name = f"all_reduce_{how}_{DTYPES[self.dtype]}"
        most = self.machine.kernels.resident_blocks(name, THREADS[how]) // ranks_at_once
        return Kernel(name, *grid(how, nbytes, self.size, max(1, most)), 1)

    def _check_sum(self, how: str, found: list[Tensor]) -> str | None:
        """Compares results `found` of several calls with the sum. Returns the problem, or None. `how`: the algorithm.
        If rank 0's two_shot runs alone, only rank 0's shards are sums; the rest is its input.
        """
        right = torch.stack(found) == self.total
        if how == "two_shot":
            share = right.float().mean().item()
            right |= self.outs == self.inputs[0]
            if share < 0.9 / self.size:
                return f"of all elements {share:.0%} are sums, and 1 of {self.size} must be"
        return None if bool(right.all()) else f"{int((~right).sum())} of {right.numel()} elements are wrong"

    def _together(self, how: str, nbytes: int) -> None:
        name, regions = f"{how} {TOGETHER}, eager", self._regions_of(1)
        kernel = self._all_reduce(how, nbytes, self.size)
        calls = [
            regions.call(0, rank, input=self.inputs[rank], output=self.scratch[rank], numel=self.numel)
            for rank in range(self.size)
        ]

        def several() -> list[Tensor]:
            self.machine.together([functools.partial(self._launch, kernel, call) for call in calls])
            return list(self.scratch)

        def check(found: list[Tensor]) -> str | None:
            return None if all(torch.equal(each, self.total) for each in found) else "a rank's sum is wrong"

        self._candidates[name] = Candidate(several, 1, check, regions.clear, name)

    def _prepare_norm(self, hidden: int, draw: torch.Generator) -> None:
        rows, device = self.numel // hidden, self.machine.device
        self.residual = torch.randn(self.numel, generator=draw).to(self.dtype).to(device)
        self.weight = torch.randn(hidden, generator=draw).to(self.dtype).to(device)
        name = f"all_reduce_add_rms_norm_{DTYPES[self.dtype]}"
        limit = self.machine.kernels.resident_blocks(name, THREADS["push"])
        row_bytes = hidden * self.dtype.itemsize
        members = -(-row_bytes // (8 * PART_PACKETS))
        kernel = Kernel(name, *norm_grid(row_bytes, rows, min(limit, MAX_BLOCKS)), members)
        if kernel.blocks == 0 or kernel.blocks // members < rows:
            self.refused[FUSED] = f"alone: {rows} rows of {row_bytes} bytes take more than one epoch"
        else:
            fields = {"residual": self.residual, "weight": self.weight, "rows": rows, "hidden": hidden, "eps": EPS}
            self._alone(FUSED, kernel, fields, lambda k: self.outs[k], self._check_norm)
        for how in ("push", "pull"):
            apart = self._all_reduce(how, self.numel * self.dtype.itemsize)
            if takes_one_epoch(how, self.numel * self.dtype.itemsize, apart.blocks):
                self._alone(f"{how}, {APART}", apart, {}, self._add_and_norm, self._check_norm)

    def _add_and_norm(self, k: int) -> Tensor:
        hidden = self.weight.numel()
        torch.add(self.outs[k], self.residual, out=self.ys[k])
        normed = torch.nn.functional.rms_norm(self.ys[k].view(-1, hidden), (hidden,), self.weight, EPS)
        return normed.view(-1)

    def _check_norm(self, found: list[Tensor]) -> str | None:
        y = self.total + self.residual
        hidden = self.weight.numel()
        normed = torch.nn.functional.rms_norm(y.view(-1, hidden), (hidden,), self.weight, EPS).view(-1)
        if not torch.equal(self.ys, y.expand_as(self.ys)):
            return "the residual is wrong"
        near = torch.isclose(torch.stack(found).float(), normed.float(), rtol=2e-2, atol=2e-2)
        return None if bool(near.all()) else f"{int((~near).sum())} elements of the norm are wrong"

    def _alone(
        self,
        name: str,
        kernel: Kernel,
        fields: dict[str, Any],
        then: Callable[[int], Tensor],
        check: Check,
    ) -> None:
        regions = self._regions_of(self.sets)

        def peer(which: int, rank: int) -> Call:
            own = {"input": self.inputs[rank], "output": self.scratch[rank], "numel": self.numel}
            spare = {"residual_out": self.scratch[rank]} if fields else {}
            return regions.call(which, rank, never_waits=True, **own, **fields, **spare)

        calls = []
        for k in range(self.sets):
            call = regions.call(k, 0, input=self.own[k], output=self.outs[k], numel=self.numel)
            for field, value in {**fields, **({"residual_out": self.ys[k]} if fields else {})}.items():
                setattr(call, field, value.data_ptr() if isinstance(value, Tensor) else value)
            calls.append(call)

        def one(k: int) -> Tensor:
            self._launch(kernel, calls[k], self.machine.stream())
            return then(k)

        def begin() -> None:
            regions.rewind(kernel.blocks, kernel.members)

        self._in_modes(
            name, one, check, begin,
            lambda: regions.arrive(kernel.name, kernel.blocks, kernel.threads, peer), f"{kernel}",
        )  # fmt: skip

    def _repeated(self, name: str, call: Callable[[Tensor, Tensor], Tensor]) -> None:
        def check(found: list[Tensor]) -> str | None:
            return None if torch.equal(torch.stack(found), self.own) else "its answer isn't the input"

        self._in_modes(name, lambda k: call(self.outs[k], self.own[k]), check, lambda: None, None, "")

    def _in_modes(
        self,
        name: str,
        one: Callable[[int], Tensor],
        check: Check,
        begin: Callable[[], object],
        arrive: Callable[[], None] | None,
        key: str,
    ) -> None:
        def several() -> list[Tensor]:
            begin()
            return [one(k) for k in range(self.sets)]

        each = [functools.partial(one, k) for k in range(self.sets)]
        for mode in self.modes:
            label = f"{name}, {mode}"
            if mode == "eager":
                self._candidates[label] = Candidate(several, self.sets, check, arrive, key, each, begin)
                continue
            if arrive is not None:
                arrive()
            self._there = key
            try:
                graph = self._graph(several)
            except Exception as problem:
                if arrive is not None:
                    raise
                self.refused[label] = f"it can't be captured: {problem}".partition("\n")[0]
                continue
            self._candidates[label] = Candidate(graph.replay, self.sets, check, arrive, key)

    def _graph(self, several: Callable[[], list[Tensor]]) -> Any:
        stream = self.machine.capture_stream()
        if stream is None:
            return captured(several, None)
        self.machine.clock.finish()
        with torch.cuda.stream(stream):
            several()
        self.machine.clock.finish()
        return captured(several, stream)

    def _launch(self, kernel: Kernel, call: Call, stream: int) -> None:
        self.machine.kernels.launch(kernel.name, kernel.blocks, kernel.threads, call, stream)


def _one_after_the_other(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    left = iter(calls)
    return lambda: next(left)()


def sum_in_rank_order(inputs: Tensor) -> Tensor:
    total = inputs[0].float()
    for each in inputs[1:]:
        total = total + each.float()
    return total.to(inputs.dtype)
