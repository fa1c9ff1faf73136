"""For `peer_kernels`: the candidates of a case, each checked and timed in this process.

`KernelTeam` is asked as `measure.teams.Team` is, so that `measure.rounds` gives all candidates their turns. Who else
can be measured on one GPU is `peer_kernels_others`. Not run on a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measure.graphs import captured
from measure.teams import TeamError
from measure.worker import Timing
from peer_kernels_others import Others
from peer_kernels_regions import Machine, Regions, takes_one_epoch
from torch import Tensor

from device_communicators.cuda.driver import MAX_BLOCKS, PART_PACKETS, THREADS, Call, grid, norm_grid
from device_communicators.peer.group import DTYPES
from device_communicators.peer.thresholds import ALGORITHMS

FUSED, APART = "fused", "add, rms_norm"
TOGETHER = "of all ranks at once"
EPS = 1e-5
MANY, FEW, MANY_BYTES = 20, 4, 256 << 10
"""Calls at one go, each in regions of its own, by which a replay's own cost is divided; of large tensors, few."""


Check = Callable[[list[Tensor]], "str | None"]
"""What is wrong with the results of several calls."""


@dataclass(frozen=True)
class Candidate:
    """`several` makes `step` calls, for which `arrive` has left everything in place; returns their results."""

    several: Callable[[], list[Tensor]]
    step: int
    check: Check
    arrive: Callable[[], None] | None = None
    key: str = ""
    """Equal where `arrive` leaves the same, so that it needn't be done again."""
    each: Sequence[Callable[[], object]] = ()
    """The calls one by one, for the host's time; `begin` before the first."""
    begin: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Kernel:
    """One kernel in one case."""

    name: str
    blocks: int
    threads: int
    members: int
    """Blocks that share a row of the norm, else 1."""


class KernelTeam:
    """Rank 0 among `size` ranks, all in this process."""

    name = "peer kernels"

    def __init__(self, machine: Machine, size: int, modes: Sequence[str], together_bytes: int, few: bool) -> None:
        """`together_bytes`: from which size on all ranks' kernels are run at once as well. `few`: calls at one go."""
        self.machine, self.size, self.modes = machine, size, modes
        self.others: Others | None = None
        """To be measured beside, where there are some; whose they are ends them."""
        self.pids: list[int] = []
        self.refused: dict[str, str] = {}
        """Candidates of the case that can't be had, and why."""
        self._together_bytes, self._few = together_bytes, few
        self._regions: dict[int, Regions] = {}
        self._candidates: dict[str, Candidate] = {}
        self._there = ""

    def ask(self, method: str, *arguments: Any, timeout_s: float = 0.0) -> list[Any]:
        """As of `measure.teams.Team`."""
        try:
            return [getattr(self, method)(*arguments)]
        except Exception as error:
            raise TeamError(f"{self.name}: {method} failed: {error}") from error

    # What measure.rounds asks for.

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
        if values["part"] == "norm":
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
        """What a call costs the host: from Python to the driver and back, the device not waited for."""
        candidate, found = self._candidates[name], []
        for _ in range(rounds if candidate.each else 0):
            self._arrive(candidate)
            candidate.begin()
            self.machine.clock.finish()
            found += self.machine.clock.host_seconds(_one_after_the_other(candidate.each), len(candidate.each))
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

    # all_reduce.

    def _prepare_all_reduce(self, nbytes: int) -> None:
        for how in ALGORITHMS:
            kernel = self._all_reduce(how, nbytes)
            if takes_one_epoch(how, nbytes, kernel.blocks):
                self._alone(how, kernel, {}, lambda k: self.outs[k], functools.partial(self._check_sum, how))
            else:
                self.refused[how] = "alone: this size takes more than one epoch, so the others must run meanwhile"
            if nbytes >= self._together_bytes:
                self._together(how, nbytes)
        others = self.others.of(self.own[0], self.refused) if self.others is not None else {}
        for name, call in others.items():
            self._repeated(name, call)

    def _all_reduce(self, how: str, nbytes: int, ranks_at_once: int = 1) -> Kernel:
        name = f"all_reduce_{how}_{DTYPES[self.dtype]}"
        most = self.machine.kernels.resident_blocks(name, THREADS[how]) // ranks_at_once
        return Kernel(name, *grid(how, nbytes, self.size, max(1, most)), 1)

    def _check_sum(self, how: str, found: list[Tensor]) -> str | None:
        """Alone, a two-shot has its own shards' sums only, and its own input where the others' would have come."""
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

    # all_reduce, add, rms_norm.

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
        near = torch.isclose(
            torch.stack(found).float(), normed.float(), rtol=2e-2, atol=2e-2
        )  # torch may round once more
        return None if bool(near.all()) else f"{int((~near).sum())} elements of the norm are wrong"

    # A candidate in each mode.

    def _alone(
        self,
        name: str,
        kernel: Kernel,
        fields: dict[str, Any],
        then: Callable[[int], Tensor],
        check: Check,
    ) -> None:
        """Rank 0's kernel and what follows it (`then`), in each set."""
        regions = self._regions_of(self.sets)

        def peer(which: int, rank: int) -> Call:
            own = {"input": self.inputs[rank], "output": self.scratch[rank], "numel": self.numel}
            spare = {"residual_out": self.scratch[rank]} if fields else {}
            return regions.call(which, rank, arriving=True, **own, **fields, **spare)

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
        """Of a group of one rank, whose sum is the input."""

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
                self.refused[label] = f"it can't be captured: {problem}".partition("\n")[0]  # one of the others'
                continue
            self._candidates[label] = Candidate(graph.replay, self.sets, check, arrive, key)

    def _graph(self, several: Callable[[], list[Tensor]]) -> Any:
        """What starts at a first use can't be captured, so all is done once before, on the capture's stream."""
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
    """In float32, rounded once: what every kernel gives, to the bit."""
    total = inputs[0].float()
    for each in inputs[1:]:
        total = total + each.float()
    return total.to(inputs.dtype)
