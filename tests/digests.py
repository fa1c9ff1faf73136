"""Digests of the bits that each collective returns: a change of any bit on any transport must be intended.

    python -m tests.digests --reason "float32 sums between hosts are pairwise now"      # rewrites the changed digests

`digests.json` holds one digest per placement of ranks, operation, dtype and size class, below the reason of its last
change. Inputs come from Python's seeded generator and exact conversions, so no library matters.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError, UnsupportedError
from tests.contract.cases import FLOAT8, FLOATS, MOVABLE, REDUCIBLE, bytes_of, in_tree_order, is_defined
from tests.extent import LONG

FILE = Path(__file__).with_suffix(".json")
REDUCTIONS = ("sum", "avg", "min", "max", "product")
COUNTS = (5, 1_000, 20_001, 150_001)
"""Elements per rank. Transports divide each of these sizes into another number of steps."""
LARGE_COUNTS = (2_300_001,)
"""Elements per rank for sums of float32 and bfloat16 only. Transports divide such large sums further."""
MOVED_COUNTS = (3, 20_001)
COMPILED_EVERYWHERE = ("bfloat16", "int64", "float8_e4m3fn")
WIDTHS = (1, 64, 1_000)


class Placement(NamedTuple):
    row: str
    hosts: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.row} {'-'.join(map(str, self.hosts))}"


PLACEMENTS = (
    *(Placement("shared_memory", (0,) * ranks) for ranks in (2, 3, 4)),
    Placement("process_group", (0, 0, 0)),
    *(Placement("hierarchical", hosts) for hosts in ((0, 1), (0, 1, 2), (0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1))),
)


Digests = dict[str, dict[str, str]]
"""Digests by placement and case."""


def stored() -> Digests:
    return merged(json.loads(FILE.read_text(encoding="utf-8")))


def merged(by_reason: dict[str, Digests]) -> Digests:
    found: Digests = {}
    for digests in by_reason.values():
        for placement, cases in digests.items():
            found.setdefault(placement, {}).update(cases)
    return found


def updated(by_reason: dict[str, Digests], found: Digests, reason: str) -> tuple[dict[str, Digests], list[str]]:
    """Returns the file's new content, with the changed digests below `reason`, and a line for each of these."""
    held, new, changes = merged(by_reason), copy.deepcopy(by_reason), list[str]()
    for placement in held | found:
        before, after = held.get(placement, {}), found.get(placement, {})
        for case in before | after:
            if before.get(case) == after.get(case):
                continue
            changes.append(f"{placement}, {case}: {before.get(case, 'new')} -> {after.get(case, 'removed')}")
            for digests in new.values():
                digests.get(placement, {}).pop(case, None)
            if case in after:
                new.setdefault(reason, {}).setdefault(placement, {})[case] = after[case]
    return new, changes


def differences(placement: Placement, found: dict[str, str], compiled: bool = False) -> list[str]:
    expected = stored().get(str(placement), {})
    if compiled:
        expected = {case: held.split(" ")[-1] for case, held in expected.items() if compiles(placement.row, case)}
    return [
        f"{placement}, {case}: {found.get(case, 'not run')}, but {FILE.name} has {expected.get(case, 'nothing')}"
        for case in sorted(expected.keys() | found.keys())
        if expected.get(case) != found.get(case)
    ]


def compiles(row: str, case: str) -> bool:
    """Returns True if tests run the case compiled, too. Started calls break a graph. To save time, most reductions are
    compiled for float32 only, and most dtypes over shared memory only.
    """
    call, *words, dtype = case.split(" ")
    if call == "isend" or call.endswith("_async"):
        return False
    has_dtype = LONG or row == "shared_memory" or dtype in COMPILED_EVERYWHERE
    return dtype == "float32" or (has_dtype and not set(words) & set(REDUCTIONS[1:]))


def combined(of_ranks: Sequence[dict[str, list[str]]]) -> dict[str, str]:
    return {
        case: " ".join(
            _digest("".join(parts).encode()) for parts in zip(*(found[case] for found in of_ranks), strict=True)
        )
        for case in of_ranks[0]
    }


class Case(NamedTuple):
    name: str
    dtype: torch.dtype
    call: Callable[..., Sequence[Tensor]]
    make: Callable[[int, int], tuple[Tensor, ...]]
    """Makes a rank's arguments of `call`, from the number of elements and the rank."""
    counts: Sequence[int]
    expected: Callable[[list[Tensor]], Tensor] | None = None
    """Computes this rank's result from the arguments of all ranks."""

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}"


def digests_of_rank(group: Any) -> dict[str, list[str]]:
    """Returns this rank's digests, by case. All ranks of `group` must call this."""
    rank, found = group.rank_in_group, {}
    for case in _cases(group):
        results = [_bytes(case.call(*case.make(count, rank))) for count in case.counts]
        for count, result in zip(case.counts, results, strict=True):
            if case.expected is not None:
                expected = case.expected([case.make(count, each)[0] for each in range(group.world_size)])
                assert result == _bytes([expected]), f"{case} of {count} elements on rank {rank}"
        found[str(case)] = [_digest(result) for result in results]
    return found


def digests_of_compiled(group: Any, row: str) -> dict[str, list[str]]:
    """Returns digests as digests_of_rank does, of each case's last size. One graph has all calls of a dtype."""
    found: dict[str, list[str]] = {}
    by_dtype: dict[torch.dtype, list[Case]] = {}
    for case in _cases(group):
        if compiles(row, str(case)):
            by_dtype.setdefault(case.dtype, []).append(case)
    for cases in by_dtype.values():
        torch._dynamo.reset()
        calls = [case.call for case in cases]

        def run(arguments: list[tuple[Tensor, ...]], calls: Any = calls) -> list[Sequence[Tensor]]:
            return [call(*given) for call, given in zip(calls, arguments, strict=True)]

        arguments = [case.make(case.counts[-1], group.rank_in_group) for case in cases]
        results = torch.compile(run, backend="aot_eager", fullgraph=True)(arguments)
        found |= {str(case): [_digest(_bytes(result))] for case, result in zip(cases, results, strict=True)}
    return found


def _bytes(tensors: Sequence[Tensor]) -> bytes:
    return b"".join(bytes_of(x).numpy().tobytes() for x in tensors)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()


@functools.lru_cache(maxsize=64)
def _integers(count: int, rank: int) -> Tensor:
    return torch.frombuffer(bytearray(random.Random(count * 64 + rank).randbytes(4 * count)), dtype=torch.int32)


def numbers(count: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Returns test values. Their sums need rounding, or overflow for integers. The first floats are special values:
    ±0, a tiny number and infinity.
    """
    integers = _integers(count, rank)
    if not dtype.is_floating_point and not dtype.is_complex:
        return (integers & 1).bool() if dtype == torch.bool else integers.to(dtype, copy=True)  # some calls write to it
    values = integers.double() / 2**24
    if dtype in FLOAT8:
        values = (values / 64).clamp(-32, 32)
    if dtype.is_complex:
        return torch.complex(values, values.flip(0)).to(dtype)
    x = values.to(dtype)
    if count >= 4 and dtype in FLOATS:
        x[0] = -0.0
        x[1] = 0.0 if rank else -0.0
        x[2] = torch.finfo(dtype).smallest_normal / 8 * (rank + 1)
        x[3] = torch.inf if rank == 0 else 1.0
    return x


def raw(count: int, dtype: torch.dtype, rank: int) -> Tensor:
    if dtype == torch.bool:
        return (_integers(count, rank) & 1).bool()
    return torch.frombuffer(bytearray(random.Random(rank).randbytes(count * dtype.itemsize)), dtype=torch.uint8).view(
        dtype
    )


def _cases(group: Any) -> Iterator[Case]:
    yield from _reductions(group)
    yield from _moves(group)
    yield from _norms(group)


def _reductions(group: Any) -> Iterator[Case]:
    rank, size = group.rank_in_group, group.world_size
    few = (COUNTS[1], COUNTS[-1])
    parts = [1_000 + 77 * each for each in range(size)]
    has_trees = _has_trees(group)
    for dtype in REDUCIBLE:

        def whole(count: int, rank: int, dtype: torch.dtype = dtype) -> tuple[Tensor]:
            return (numbers(count, dtype, rank),)

        def divided(count: int, rank: int, dtype: torch.dtype = dtype) -> tuple[Tensor]:
            return (numbers(count // size * size, dtype, rank),)

        for op in REDUCTIONS:
            if not is_defined(dtype, op):
                continue
            large = LARGE_COUNTS if op == "sum" and dtype in (torch.float32, torch.bfloat16) else ()
            counts = (*COUNTS, *large)
            calls = _calls_of_reductions(group, op)
            yield Case(f"all_reduce {op}", dtype, calls["all_reduce"], whole, counts)
            yield Case(f"reduce_scatter {op}", dtype, calls["reduce_scatter"], divided, counts)
            if op in ("sum", "avg"):
                yield Case(f"all_reduce_ {op}", dtype, calls["all_reduce_"], whole, few)
                yield Case(f"all_reduce_async {op}", dtype, calls["all_reduce_async"], whole, few)
                yield Case(f"reduce_scatter_async {op}", dtype, calls["reduce_scatter_async"], divided, few)
            if op == "sum":
                yield Case(
                    "reduce_scatterv sum", dtype, lambda x: [group.reduce_scatterv(x, 0, parts)], whole, (sum(parts),)
                )
        if has_trees and dtype in FLOATS:
            for name, call in _calls_of_reductions(group, "sum", order="tree").items():
                if name.startswith("reduce_scatter"):
                    yield Case(
                        f"{name} tree", dtype, call, divided, COUNTS, lambda xs: in_tree_order(xs).chunk(size)[rank]
                    )
                else:
                    yield Case(f"{name} tree", dtype, call, whole, COUNTS, in_tree_order)


def _calls_of_reductions(group: Any, op: str, **order: str) -> dict[str, Callable[[Tensor], Sequence[Tensor]]]:
    return {
        "all_reduce": lambda x: [group.all_reduce(x, op, **order)],
        "all_reduce_": lambda x: [group.all_reduce_(x, op, **order)],
        "all_reduce_async": lambda x: [group.all_reduce_async(x, op, **order).wait()],
        "reduce_scatter": lambda x: [group.reduce_scatter(x, 0, op, **order)],
        "reduce_scatter_async": lambda x: [group.reduce_scatter_async(x, 0, op, **order).wait()],
    }


def _has_trees(group: Any) -> bool:
    try:
        group.all_reduce(torch.ones(1), order="tree")
    except (InvalidArgumentError, UnsupportedError):
        return False
    return True


def _moves(group: Any) -> Iterator[Case]:
    rank, size = group.rank_in_group, group.world_size
    last, before, after = size - 1, (rank - 1) % size, (rank + 1) % size

    def gathered(x: Tensor) -> list[Tensor]:
        found = group.gather(x, last, 0)
        return [] if found is None else [found]

    def sent(x: Tensor) -> list[Tensor]:
        if rank < last:
            group.send(x, after)
        found = group.recv(x.shape, x.dtype, before)
        if rank == last:
            group.send(x, after)
        return [found]

    def started(x: Tensor) -> list[Tensor]:
        sending, receiving = group.isend(x, after), group.irecv(x.shape, x.dtype, before)
        sending.wait()
        return [receiving.wait()]

    def split_sizes(source: int, length: int) -> list[int]:
        weights = [(source + 2 * target) % 3 for target in range(size)]
        return [weight * (length // (2 * size)) + (target != source) for target, weight in enumerate(weights)]

    def unevenly(x: Tensor) -> list[Tensor]:
        sizes = split_sizes(rank, len(x))
        received = [split_sizes(source, len(x))[rank] for source in range(size)]
        x = x[: sum(sizes)].contiguous()
        return [group.all_to_all(x, output_split_sizes=received, input_split_sizes=sizes)]

    def from_each_unevenly(xs: list[Tensor]) -> Tensor:
        return torch.cat(
            [
                x[: sum(sizes)].split(sizes)[rank]
                for x, sizes in ((x, split_sizes(source, len(x))) for source, x in enumerate(xs))
            ]
        )

    moves: tuple[tuple[str, Callable[[Tensor], Sequence[Tensor]], Callable[[list[Tensor]], Tensor]], ...] = (
        ("all_gather", lambda x: [group.all_gather(x, 0)], torch.cat),
        ("all_gather_async", lambda x: [group.all_gather_async(x, 0).wait()], torch.cat),
        (
            "all_gatherv",
            lambda x: [group.all_gatherv(x[: len(x) - rank].contiguous(), 0, [len(x) - r for r in range(size)])],
            lambda xs: torch.cat([x[: len(x) - r] for r, x in enumerate(xs)]),
        ),
        ("gather", gathered, lambda xs: torch.cat(xs) if rank == last else xs[0][:0]),
        ("broadcast", lambda x: [group.broadcast(x, last)], lambda xs: xs[last]),
        ("broadcast_", lambda x: [group.broadcast_(x, last)], lambda xs: xs[last]),
        ("broadcast_async", lambda x: [group.broadcast_async(x, last).wait()], lambda xs: xs[last]),
        ("all_to_all", lambda x: [group.all_to_all(x)], lambda xs: torch.cat([x.chunk(size)[rank] for x in xs])),
        ("all_to_all uneven", unevenly, from_each_unevenly),
        (
            "scatter",
            lambda x: [group.scatter(x if rank == last else None, last, size=[len(x) // size], dtype=x.dtype)],
            lambda xs: xs[last].chunk(size)[rank],
        ),
        ("send", sent, lambda xs: xs[before]),
        ("isend", started, lambda xs: xs[before]),
    )
    for name, call, expected in moves:
        factor = size if name in ("all_to_all", "scatter") else 1
        for dtype in MOVABLE:

            def make(count: int, rank: int, dtype: torch.dtype = dtype, factor: int = factor) -> tuple[Tensor]:
                return (raw(count, dtype, rank)[: count // factor * factor],)

            def of_bytes(xs: list[Tensor], expected: Callable[[list[Tensor]], Tensor] = expected) -> Tensor:
                return expected([bytes_of(x).view(len(x), -1) for x in xs])

            yield Case(name, dtype, call, make, [max(count, size) for count in MOVED_COUNTS], of_bytes)


def _norms(group: Any) -> Iterator[Case]:
    calls: dict[str, Callable[..., Sequence[Tensor]]] = {
        "all_reduce_add_rms_norm": lambda x, y, w: group.all_reduce_add_rms_norm(x, y, w, 1e-5),
        "all_reduce_add_rms_norm_static_fp8_quant": lambda x, y, w: group.all_reduce_add_rms_norm_static_fp8_quant(
            x, y, w, torch.tensor(0.013), 1e-5
        ),
        "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant": lambda x, y, w: (
            group.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(x, y, w, 1e-5)
        ),
    }
    for name, call in calls.items():
        for dtype in FLOATS:

            def make(width: int, rank: int, dtype: torch.dtype = dtype) -> tuple[Tensor, Tensor, Tensor]:
                x = (_integers(3 * width, rank).double() / 2**28).to(dtype).view(3, width)
                residual = (_integers(3 * width, 50).double() / 2**28).to(dtype).view(3, width)
                return x, residual, (_integers(width, 51).double() / 2**30).to(dtype)

            yield Case(name, dtype, call, make, WIDTHS)


def main() -> None:
    from tests.contract.test_digests import found_on
    from tests.hosts import Hosts
    from tests.workers import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reason", required=True, help="why bits change; the file keeps it with each changed digest")
    reason = parser.parse_args().reason
    digests: Digests = {}
    pools: dict[int, WorkerPool] = {}
    try:
        with Hosts(3) as hosts:
            for placement in PLACEMENTS:
                if placement.row == "hierarchical":
                    with hosts.ranks(placement.hosts) as ranks:
                        digests[str(placement)] = found_on(placement, ranks)
                else:
                    pool = pools.setdefault(len(placement.hosts), WorkerPool(len(placement.hosts)))
                    digests[str(placement)] = found_on(placement, pool)
    finally:
        for pool in pools.values():
            pool.kill()
    new, changes = updated(json.loads(FILE.read_text(encoding="utf-8")), digests, reason)
    FILE.write_text(json.dumps(new, indent=0) + "\n", encoding="utf-8")
    print(*changes, f"{len(changes)} digests changed", sep="\n")


if __name__ == "__main__":
    main()
