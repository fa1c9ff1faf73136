"""The kernels of peer/csrc on a CPU. Each CUDA thread is a CPU thread, so blocks are small."""

from __future__ import annotations

import ctypes
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from device_communicators.cpu import native_build
from device_communicators.peer.kernels import (
    KERNELS,
    MAX_BLOCKS,
    MAX_RANKS,
    MAX_THREADS,
    PACKETS_OFFSET,
    PART_PACKETS,
    REGION_BYTES,
    STAGE_BYTES,
    STAGES_OFFSET,
    Call,
    grid,
)
from tests.helpers.compiled import kept
from tests.helpers.cuda_on_cpu import CUDA_SOURCES, DEADLINE_S, EMULATION, CpuKernels, KernelTrappedError
from tests.internals.cuda_ranks import CpuRanks, bits, sum_in_rank_order

pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HOWS = ("push", "pull", "two_shot")
BLOCKS, THREADS = 2, 3
SEVERAL_EPOCHS = {"push": 3 * BLOCKS * PART_PACKETS * 8 + 5, "pull": 2 * BLOCKS * STAGE_BYTES + 5}
SEVERAL_EPOCHS["two_shot"] = SEVERAL_EPOCHS["pull"]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def made(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-6, 4, (numel,), generator=generator)
    for i, special in enumerate((-0.0, float("inf"), 1e-7, 65504.0)):
        if numel > 8 * i + 7:
            values[8 * i + 7] = special
    return values.to(dtype)


def all_reduce(ranks: CpuRanks, how: str, inputs: list[torch.Tensor], in_place: bool = False) -> list[torch.Tensor]:
    outputs = inputs if in_place else [torch.full_like(each, 77) for each in inputs]
    kernel = f"all_reduce_{how}_{name_of(inputs[0].dtype)}"

    def body(rank: int) -> None:
        call = ranks.call(rank, input=inputs[rank], output=outputs[rank], numel=inputs[0].numel())
        ranks.kernels.launch(kernel, BLOCKS, THREADS, call)

    assert set(ranks.run(body).values()) == {None}
    return outputs


def test_python_and_cpp_agree_about_the_layout() -> None:
    names = [name for name, *_ in Call._fields_]
    expected = [getattr(Call, name).offset for name in names]
    expected += [ctypes.sizeof(Call), MAX_RANKS, MAX_BLOCKS, MAX_THREADS, REGION_BYTES, PART_PACKETS, STAGE_BYTES]
    expected += [0, 4 * MAX_BLOCKS, PACKETS_OFFSET, STAGES_OFFSET]
    assert CpuKernels().layout(len(expected)) == expected


def test_all_kernels_are_there() -> None:
    library = CpuKernels()._library
    for name in KERNELS:
        assert getattr(library, name)
    with pytest.raises(ValueError, match="can't be launched"):
        CpuKernels().launch("no_such_kernel", 1, 1, Call())


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("how", HOWS)
def test_all_reduce_gives_all_ranks_the_bits_of_a_sum_in_rank_order(how: str, size: int) -> None:
    ranks = CpuRanks(size)
    for dtype in DTYPES:
        several = SEVERAL_EPOCHS[how] // dtype.itemsize
        for numel in (1, 2, 3, 8, 17, 1001, several):
            inputs = [made(rank, numel, dtype, numel) for rank in range(size)]
            expected = sum_in_rank_order(inputs)
            for output in all_reduce(ranks, how, inputs):
                assert torch.equal(bits(output), bits(expected)), (dtype, numel)


@pytest.mark.parametrize("how", HOWS)
def test_all_reduce_in_place_and_of_nothing(how: str) -> None:
    ranks = CpuRanks(4)
    inputs = [made(rank, 5001, torch.bfloat16) for rank in range(4)]
    expected = sum_in_rank_order(inputs)
    assert all(torch.equal(output, expected) for output in all_reduce(ranks, how, inputs, in_place=True))
    before = ranks.epochs(0)
    all_reduce(ranks, how, [torch.empty(0, dtype=torch.bfloat16) for _ in range(4)])
    assert ranks.epochs(0) == before, "a block without a share takes no epoch"


@pytest.mark.parametrize("how", HOWS)
def test_nothing_is_written_past_the_end(how: str) -> None:
    ranks = CpuRanks(3)
    for numel in range(1, 20):
        inputs = [made(rank, numel, torch.float16) for rank in range(3)]
        outputs = [torch.full((numel + 16,), 77.0, dtype=torch.float16) for _ in range(3)]

        def body(rank: int, numel: int = numel, inputs: Any = inputs, outputs: Any = outputs) -> None:
            call = ranks.call(rank, input=inputs[rank], output=outputs[rank], numel=numel)
            ranks.kernels.launch(f"all_reduce_{how}_float16", BLOCKS, THREADS, call)

        assert set(ranks.run(body).values()) == {None}
        for output in outputs:
            assert torch.equal(output[:numel], sum_in_rank_order(inputs))
            assert (output[numel:] == 77).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_every_16_bit_number_is_itself_plus_minus_zero(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    minus_zero = torch.full_like(every, -0.0)
    for output in all_reduce(CpuRanks(2), "pull", [every, minus_zero]):
        assert torch.equal(output.isnan(), every.isnan())
        assert torch.equal(bits(output[~every.isnan()]), bits(every[~every.isnan()]))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("how", ["push", "pull"])
def test_all_gather_moves_any_number_of_bytes(how: str, size: int) -> None:
    ranks = CpuRanks(size)
    for nbytes in (1, 7, 8, 16, 33, 1000, SEVERAL_EPOCHS[how]):
        inputs = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for _ in range(size)]
        outputs = [torch.full((size * nbytes + 16,), 77, dtype=torch.uint8) for _ in range(size)]

        def body(rank: int, nbytes: int = nbytes, inputs: Any = inputs, outputs: Any = outputs) -> None:
            call = ranks.call(rank, input=inputs[rank], output=outputs[rank], numel=nbytes)
            ranks.kernels.launch(f"all_gather_{how}", BLOCKS, THREADS, call)

        assert set(ranks.run(body).values()) == {None}
        for output in outputs:
            assert torch.equal(output[: size * nbytes], torch.cat(inputs))
            assert (output[size * nbytes :] == 77).all()


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("how", ["push", "pull"])
def test_reduce_scatter_gives_each_rank_its_row_of_the_sum(how: str, size: int) -> None:
    ranks = CpuRanks(size)
    for dtype in DTYPES:
        for numel in (1, 3, 8, 129, SEVERAL_EPOCHS[how] // dtype.itemsize):
            inputs = [made(rank, size * numel, dtype, numel) for rank in range(size)]
            outputs = [torch.full((numel + 8,), 77.0, dtype=dtype) for _ in range(size)]

            def body(rank: int, numel: int = numel, inputs: Any = inputs, outputs: Any = outputs) -> None:
                call = ranks.call(rank, input=inputs[rank], output=outputs[rank], numel=numel)
                ranks.kernels.launch(f"reduce_scatter_{how}_{name_of(inputs[0].dtype)}", BLOCKS, THREADS, call)

            assert set(ranks.run(body).values()) == {None}
            rows = sum_in_rank_order(inputs).view(size, numel)
            for row, output in zip(rows, outputs, strict=True):
                assert torch.equal(bits(output[:numel]), bits(row)), (dtype, numel)
                assert (output[numel:] == 77).all()


def steps_of(seed: int, count: int) -> list[tuple[str, int, int]]:
    dice = random.Random(seed)
    kernels = [f"all_reduce_{how}_float32" for how in HOWS]
    kernels += [f"{what}_{how}" for what in ("all_gather", "reduce_scatter") for how in ("push", "pull")]
    large = BLOCKS * PART_PACKETS * 2 + 9
    sizes = (1, 2, 5, 16, 60, large)
    return [
        (dice.choice(kernels), dice.choices(sizes, (3, 3, 3, 3, 2, 1))[0], dice.randint(1, BLOCKS))
        for _ in range(count)
    ]


def run_steps(ranks: CpuRanks, steps: list[tuple[str, int, int]], seed: int) -> None:
    size = ranks.size
    rows = [[torch.randint(-99, 99, (size * numel,)).float() + rank for rank in range(size)] for _, numel, _ in steps]
    outputs = [[torch.full((size * numel,), 77.0) for _ in range(size)] for _, numel, _ in steps]

    def body(rank: int) -> None:
        for (kernel, numel, blocks), inputs, results in zip(steps, rows, outputs, strict=True):
            call = ranks.call(rank, input=inputs[rank], output=results[rank], numel=numel)
            if kernel.startswith("all_gather"):
                call.numel = 4 * numel
            name = kernel + "_float32" if kernel.startswith("reduce_scatter") else kernel
            ranks.kernels.launch(name, blocks, THREADS, call)

    ranks.kernels.disturb(30, 100, seed)
    try:
        assert set(ranks.run(body).values()) == {None}
    finally:
        ranks.kernels.disturb(0)
    for number, ((kernel, numel, _), inputs, results) in enumerate(zip(steps, rows, outputs, strict=True)):
        for rank, result in enumerate(results):
            if kernel.startswith("all_reduce"):
                expected = sum_in_rank_order([each[:numel] for each in inputs])
            elif kernel.startswith("reduce_scatter"):
                expected = sum_in_rank_order(inputs).view(size, numel)[rank]
            else:
                expected = torch.cat([each[:numel] for each in inputs])
            assert torch.equal(result[: expected.numel()], expected), (number, kernel, numel, rank)


@pytest.mark.parametrize("size", [2, 4])
def test_kernels_and_sizes_follow_each_other_in_any_order(size: int) -> None:
    run_steps(CpuRanks(size), steps_of(size, 400), size)


@pytest.mark.parametrize("how", HOWS)
def test_a_thousand_replays(how: str) -> None:
    run_steps(CpuRanks(3), [(f"all_reduce_{how}_float32", 21, 1)] * 1000, 1)


@pytest.mark.parametrize("first", [2**30 - 3, 2**32 - 4, 2**32 - 5])
def test_what_is_left_from_long_ago_is_not_taken_for_new(first: int) -> None:
    """Flags and packets in both slots hold the next epochs, as after 2^32 epochs: slots must be cleared."""
    steps = [("all_reduce_push_float32", 1, 1)] * 8
    steps += [("all_reduce_push_float32", 40, 1)] * 2 + [("all_reduce_pull_float32", 5, 1)] * 2
    ranks = CpuRanks(3)
    ranks.set_epochs(first)
    coming = [first + 1 + at for at in range(len(steps))]
    coming = [epoch if epoch < 2**32 else epoch - 2**32 + 2 for epoch in coming]
    for region in ranks.regions:
        flags = (ctypes.c_uint32 * (2 * 2 * MAX_BLOCKS * MAX_RANKS)).from_address(region + 4 * MAX_BLOCKS)
        packets = (ctypes.c_uint32 * ((STAGES_OFFSET - PACKETS_OFFSET) // 4)).from_address(region + PACKETS_OFFSET)
        for places, epochs, step in ((packets, coming[-4:-2], 2), (flags, coming[-2:], 1)):
            half = len(places) // 2
            for epoch in epochs:
                begin = half * (epoch % 2)
                places[begin + step - 1 : begin + half : step] = [epoch] * (half // step)
    run_steps(ranks, steps, 5)
    assert ranks.epochs(1)[0] == coming[-1]


def test_a_deadline_outlasts_the_count_of_looks() -> None:
    """2^32 polls take minutes to an hour, and the deadline may be later."""
    compiler = native_build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    flags = (*compiler, "-std=c++17", "-O1", "-pthread")
    includes = (f"-I{CUDA_SOURCES}", f"-I{EMULATION}")

    def build(path: Path) -> None:
        command = [*flags, *includes, str(EMULATION / "cuda_patience.cpp"), "-o", str(path)]
        subprocess.run(command, check=True, timeout=DEADLINE_S)

    sources = [path for folder in (CUDA_SOURCES, EMULATION) for path in folder.glob("*.*")]
    program = kept("patience", flags, sources, build)
    assert subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout == "kept\n"


@pytest.mark.parametrize("how", HOWS)
def test_a_rank_that_never_comes_is_named_at_the_deadline(how: str) -> None:
    kernel = f"all_reduce_{how}_float32"
    ranks = CpuRanks(4, deadline_s=0.7)
    tensors = [torch.ones(40) for _ in range(4)]

    def body(rank: int) -> None:
        ranks.kernels.launch(kernel, 1, THREADS, ranks.call(rank, input=tensors[rank], output=tensors[rank], numel=40))

    results = ranks.run(body, ranks=[0, 1, 3])
    for rank in (0, 1, 3):
        assert isinstance(results[rank], KernelTrappedError)
        report = ranks.report(rank)
        assert report is not None
        assert (report.reason, report.peer, report.kernel, report.block, report.epoch) == ("deadline", 2, kernel, 0, 1)
    assert ranks.report(2) is None


@pytest.mark.parametrize("how", HOWS)
def test_an_abort_ends_the_kernel_without_a_trap(how: str) -> None:
    ranks = CpuRanks(3)
    tensors = [torch.ones(40) for _ in range(3)]
    ranks.aborts[:] = [1, 1, 1]

    def body(rank: int) -> None:
        call = ranks.call(rank, input=tensors[rank], output=tensors[rank], numel=40)
        ranks.kernels.launch(f"all_reduce_{how}_float32", 1, THREADS, call)

    assert ranks.run(body, ranks=[0, 2]) == {0: None, 2: None}
    for rank in (0, 2):
        report = ranks.report(rank)
        assert report is not None
        assert report.reason == "abort"
        assert report.peer in {0, 1, 2} - {rank}
        assert ranks.epochs(rank)[0] == 0, "the epoch wasn't ended"


def test_a_rank_that_stopped_gives_nobody_a_result() -> None:
    """If rank 0 went on after its aborted barrier, the others would add its old data."""
    ranks = CpuRanks(3, deadline_s=0.5)
    tensors = [torch.ones(40) for _ in range(3)]
    ranks.aborts[0] = 1

    def launch(rank: int) -> None:
        call = ranks.call(rank, input=tensors[rank], output=tensors[rank], numel=40)
        ranks.kernels.launch("all_reduce_two_shot_float32", 1, THREADS, call)

    assert ranks.run(launch, ranks=[0]) == {0: None}
    results = ranks.run(launch, ranks=[1, 2])
    assert [type(results[rank]) for rank in (1, 2)] == [KernelTrappedError] * 2
    reports = [ranks.report(rank) for rank in (1, 2)]
    assert {report.peer for report in reports if report} == {0}


def test_a_grid_has_what_the_data_needs_and_never_more_than_fits() -> None:
    assert grid("push", 0, 8, 128) == (0, 256)
    assert grid("push", 1, 8, 128) == (1, 256)
    assert grid("push", 8192, 8, 128) == (4, 256)
    assert grid("push", 1 << 30, 8, 128) == (128, 256)
    assert grid("pull", 1 << 20, 8, 16) == (16, 512)
    assert grid("two_shot", 1 << 20, 2, 1000) == (64, 512)
    assert grid("two_shot", 1 << 20, 8, 1000) == (32, 512)
