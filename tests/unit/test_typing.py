"""A user's program under mypy --strict and pyright: errors in exactly the wrong lines, which also raise at run time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import parallel_state as ps
from device_communicators.base.errors import InvalidArgumentError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600
PROGRAM = """\
import torch
from torch import Tensor

import parallel_state as ps
from parallel_state import GroupCoordinator, LaunchConfig, PeerDiedError, get_pp_group, get_tp_group, launch


def layer(x: Tensor) -> Tensor:
    pp = get_pp_group()
    hidden: Tensor = pp.recv_tensor_dict()["hidden"]
    received = pp.recv_tensor_dict(views=True)
    if received is None:
        return hidden
    pp.send_tensor_dict({"hidden": hidden}, pp.next_rank_in_group)
    tp: GroupCoordinator = get_tp_group()
    handle = tp.all_reduce_async(x, "avg")
    ranks: list[int] = ps.get_ep_global_ranks()
    gathered = tp.all_gather(x, dim=0, async_op=False)
    return tp.all_reduce(gathered, torch.distributed.ReduceOp.MAX) + handle.wait() * len(ranks)


def main() -> None:
    ps.init_distributed_environment()
    ps.initialize_model_parallel(2, expert_model_parallel_size=2, cp=1, order="megatron")
    maybe = ps.get_cp_group(check_initialized=False)
    print(maybe and maybe.unique_name, ps.__version__)
    try:
        layer(torch.ones(2))
    except PeerDiedError as error:
        print(error.suspect_ranks)
    with ps.simulate(1, 4, tensor_model_parallel_size=2, dp_shard=2).use():
        layer(torch.ones(2))
    total: list[int] = launch(len, 2, args=["two"], timeout=30.0, config=LaunchConfig(nproc=2))
    print(total)


def wrong(x: Tensor, tp: GroupCoordinator) -> None:
    ps.initialize_model_parallel(tensor_model_parallel_sise=2)  # wrong
    ps.initialize_model_parallel(expert_parallel_size=2)  # wrong
    ps.simulate(0, 4, tensor_parallel=2)  # wrong
    launch(len, nprocs=2)  # wrong
    launch(len, nproc="2")  # wrong
    launch(len, 2, start_method="fork")  # wrong
    tp.all_reduce(x, "summ")  # wrong
    tp.reduce_scatter(x, 0, "mean")  # wrong
    tp.all_reduce(x, async_op=True)  # wrong
    tp.send(x, tp.next_rank)  # wrong
    tp.allreduce(x)  # wrong
    ps.get_expert_tensor_parallel_src_rank()  # wrong
    ps.get_tpgroup()  # wrong
"""
WRONG = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]


def _lines_with_errors(command: list[str | Path], folder: Path) -> list[int]:
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*map(str, command), "program.py"], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = re.findall(r"program\.py:(\d+)(?::\d+)?(?: -|:) error", ended.stdout)
    return sorted({int(number) for number in found})


def test_mypy(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    assert _lines_with_errors([sys.executable, "-m", "mypy"], tmp_path) == WRONG


def test_pyright(tmp_path: Path) -> None:
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    found = [path for name in ("pyright", "basedpyright") if (path := shutil.which(name, path=os.pathsep.join(places)))]
    if not found:
        pytest.skip("there is no pyright")
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"], "typeCheckingMode": "strict"}}')
    assert _lines_with_errors([found[0], "--level", "error", "--pythonpath", sys.executable], tmp_path) == WRONG


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda tp: ps.initialize_model_parallel(tensor_model_parallel_sise=2),
         r"^initialize_model_parallel\(\) has no argument 'tensor_model_parallel_sise'; did you mean 'tensor_mod"),
        (lambda tp: ps.ensure_model_parallel_initialized(odrer="vllm"), r"^ensure_.* 'odrer'; did you mean 'order'"),
        (lambda tp: ps.reinitialize([0], warm_upp=True), r"^reinitialize\(\) .* 'warm_upp'; did you mean 'warm_up'"),
        (lambda tp: ps.simulate(0, 4, tensor_parallel=2), r"^simulate\(\) has no argument 'tensor_parallel'"),
        (lambda tp: ps.launch(len, nprocs=2), r"^launch\(\) has no argument 'nprocs'; did you mean 'nproc'"),
        (lambda tp: ps.launch(len, nproc="2"), r"^nproc must be an int, but is '2'; pass 2"),
        (lambda tp: tp.all_reduce(torch.ones(2), async_op=True), "takes no async_op; call all_reduce_async"),
        (lambda tp: tp.broadcast(torch.ones(2), async_op=True), "takes no async_op; call broadcast_async"),
        (lambda tp: tp.allreduce(torch.ones(2)), "has no attribute 'allreduce'; did you mean 'all_reduce'"),
        (lambda tp: ps.allreduce(torch.ones(2)), r"no attribute 'allreduce'; call a group's method: .*\.all_reduce\("),
        (lambda tp: ps.get_tpgroup(), "'parallel_state' has no attribute 'get_tpgroup'; did you mean 'get_tp_group'"),
    ],
)  # fmt: skip
def test_a_misspelt_name_is_an_error_that_names_the_right_one(
    call: Callable[[ps.GroupCoordinator], object], named: str
) -> None:
    with ps.simulate(0, 2, 2).use(), pytest.raises((InvalidArgumentError, AttributeError), match=named):
        call(ps.get_tp_group())
