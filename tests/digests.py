"""Digests of the bits that each collective returns: a change of any bit on any transport must be intended.

    python -m tests.digests --reason "float32 sums between hosts are pairwise now"      # rewrites digests.json

`digests.json` holds one digest per placement of ranks, operation, dtype and size class, and the reason of each rewrite.
Inputs come from Python's seeded generator and exact conversions, so no library matters.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.contract.cases import FLOAT8, FLOATS, MOVABLE, REDUCIBLE, bytes_of, is_defined

FILE = Path(__file__).with_suffix(".json")
REDUCTIONS = ("sum", "avg", "min", "max", "product")
COUNTS = (5, 1_000, 20_001, 150_001)
"""Elements per rank. Transports divide each of these sizes into another number of steps."""
LARGE_COUNTS = (2_300_001,)
"""Elements per rank for sums of float32 and bfloat16 only. Transports divide such large sums further."""
MOVED_COUNTS = (3, 20_001)
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


def stored() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def differences(placement: Placement, found: dict[str, str]) -> list[str]:
    expected = stored()["digests"].get(str(placement), {})
    return [
        f"{placement}, {case}: {found.get(case, 'not run')}, but {FILE.name} has {expected.get(case, 'nothing')}"
        for case in sorted(expected.keys() | found.keys())
        if expected.get(case) != found.get(case)
    ]


def combined(of_ranks: Sequence[dict[str, list[str]]]) -> dict[str, str]:
    return {
        case: " ".join(
            _digest("".join(parts).encode()) for parts in zip(*(found[case] for found in of_ranks), strict=True)
        )
        for case in of_ranks[0]
    }


def digests_of_rank(group: Any) -> dict[str, list[str]]:
    """Returns this rank's digests, by case. All ranks of `group` must call this."""
    found: dict[str, list[str]] = {}
    for case, calls in _cases(group):
        found[case] = [_digest(b"".join(bytes_of(x).numpy().tobytes() for x in call())) for call in calls]
    return found


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


def _cases(group: Any) -> Iterator[tuple[str, list[Callable[[], Sequence[Tensor]]]]]:
    yield from _reductions(group)
    yield from _moves(group)
    yield from _norms(group)


def _reductions(group: Any) -> Iterator[tuple[str, list[Callable[[], Sequence[Tensor]]]]]:
    rank, size = group.rank_in_group, group.world_size
    for dtype in REDUCIBLE:
        for op in REDUCTIONS:
            if not is_defined(dtype, op):
                continue
            large = LARGE_COUNTS if op == "sum" and dtype in (torch.float32, torch.bfloat16) else ()

            def whole(call: Callable[[Tensor], Tensor], counts: Sequence[int], dtype: Any = dtype) -> Any:
                return [lambda count=count: [call(numbers(count, dtype, rank))] for count in counts]

            def divided(call: Callable[[Tensor], Tensor], counts: Sequence[int], dtype: Any = dtype) -> Any:
                return [lambda count=count: [call(numbers(count // size * size, dtype, rank))] for count in counts]

            name = f"{op} {str(dtype).removeprefix('torch.')}"
            yield f"all_reduce {name}", whole(lambda x, op=op: group.all_reduce(x, op), (*COUNTS, *large))
            yield f"reduce_scatter {name}", divided(lambda x, op=op: group.reduce_scatter(x, 0, op), (*COUNTS, *large))
            if op in ("sum", "avg"):
                few = (COUNTS[1], COUNTS[-1])
                yield f"all_reduce_ {name}", whole(lambda x, op=op: group.all_reduce_(x, op), few)
                yield f"all_reduce_async {name}", whole(lambda x, op=op: group.all_reduce_async(x, op).wait(), few)
                yield (
                    f"reduce_scatter_async {name}",
                    divided(lambda x, op=op: group.reduce_scatter_async(x, 0, op).wait(), few),
                )
            if op == "sum":
                yield f"reduce_scatterv {name}", [lambda dtype=dtype: [_uneven(group, dtype)]]


def _uneven(group: Any, dtype: torch.dtype) -> Tensor:
    sizes = [1_000 + 77 * rank for rank in range(group.world_size)]
    return group.reduce_scatterv(numbers(sum(sizes), dtype, group.rank_in_group), 0, sizes)


def _moves(group: Any) -> Iterator[tuple[str, list[Callable[[], Sequence[Tensor]]]]]:
    rank, size = group.rank_in_group, group.world_size
    last = size - 1

    def gathered(x: Tensor) -> list[Tensor]:
        found = group.gather(x, last, 0)
        return [] if found is None else [found]

    calls: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
        "all_gather": lambda x: [group.all_gather(x, 0)],
        "all_gather_async": lambda x: [group.all_gather_async(x, 0).wait()],
        "all_gatherv": lambda x: [
            group.all_gatherv(x[: len(x) - rank].contiguous(), 0, [len(x) - r for r in range(size)])
        ],
        "gather": gathered,
        "broadcast": lambda x: [group.broadcast(x, last)],
        "broadcast_async": lambda x: [group.broadcast_async(x, last).wait()],
        "all_to_all": lambda x: [group.all_to_all(x[: len(x) // size * size].contiguous())],
    }
    for name, call in calls.items():
        for dtype in MOVABLE:
            counts = [max(count, size) for count in MOVED_COUNTS]
            yield (
                f"{name} {str(dtype).removeprefix('torch.')}",
                [lambda count=count, call=call, dtype=dtype: call(raw(count, dtype, rank)) for count in counts],
            )


def _norms(group: Any) -> Iterator[tuple[str, list[Callable[[], Sequence[Tensor]]]]]:
    rank = group.rank_in_group

    def inputs(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x = (_integers(3 * width, rank).double() / 2**28).to(dtype).view(3, width)
        residual = (_integers(3 * width, 50).double() / 2**28).to(dtype).view(3, width)
        return x, residual, (_integers(width, 51).double() / 2**30).to(dtype)

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
            yield (
                f"{name} {str(dtype).removeprefix('torch.')}",
                [lambda width=width, call=call, dtype=dtype: call(*inputs(width, dtype)) for width in WIDTHS],
            )


def main() -> None:
    from tests.contract.test_digests import found_on
    from tests.hosts import Hosts
    from tests.workers import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reason", required=True, help="why bits change; it is kept in the file")
    reason = parser.parse_args().reason
    digests: dict[str, dict[str, str]] = {}
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
    reasons = [*(stored()["reasons"] if FILE.exists() else []), reason]
    FILE.write_text(json.dumps({"reasons": reasons, "digests": digests}, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
