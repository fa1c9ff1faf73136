"""The installed torch has the private names of the tables, and only one file uses any."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sources import nodes_of

ROOT = Path(__file__).resolve().parents[2]
HOME = "device_communicators/base/torch_internals.py"
VERSIONS = ("2.11", "2.13", "2.15")
"""The versions of torch in which the names were looked up."""
SEEN: dict[tuple[str, ...], tuple[str, ...]] = {
    VERSIONS: (
        "torch.distributed.distributed_c10d._DistributedBackendOptions",
        "torch.distributed.distributed_c10d._abort_process_group",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._new_process_group_helper",
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "torch.distributed.distributed_c10d._world.group_count",
        "torch.distributed.distributed_c10d._world.pg_group_ranks",
        "torch.distributed.distributed_c10d._world.pg_map",
        "torch.distributed.rendezvous._create_c10d_store",
        "torch.distributed.Backend._plugins",
        "torch.distributed.ProcessGroup._allgather_base",
        "torch.distributed.ProcessGroup._device_types",
        "torch.distributed.ProcessGroup._get_backend",
        "torch.distributed.ProcessGroup._get_backend_name",
        "torch.distributed.ProcessGroup._reduce_scatter_base",
        "torch.distributed.ProcessGroup._register_backend",
        "torch.distributed.ProcessGroup._set_default_backend",
        "torch.distributed.ProcessGroup._set_group_name",
        "torch.distributed.ProcessGroup.bound_device_id",
        "torch.distributed.ProcessGroupGloo._Options._devices",
        "torch.distributed.ProcessGroupGloo._Options._timeout",
        "torch.distributed.ProcessGroupGloo._set_default_timeout",
        "torch.distributed.ProcessGroupGloo._set_sequence_number_for_group",
        "torch._C._distributed_c10d._register_process_group",
        "torch._C._distributed_c10d._unregister_process_group",
        "torch.testing._internal.distributed.fake_pg",
        "torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p",
        "torch.distributed._symmetric_memory.rendezvous",
        "torch.UntypedStorage._new_shared_cuda",
        "torch.UntypedStorage._share_cuda_",
        "torch.Tensor._base",
        "torch.Tensor._is_view",
        "torch.Tensor._is_zerotensor",
        "torch._C._AutoDispatchBelowAutograd",
        "torch._C._len_torch_dispatch_stack",
        "torch._check",
        "torch.ops.aten._fused_rms_norm.default",
        "torch.ops.aten._to_copy.default._schema",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._pytree.tree_leaves",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.cuda._sleep",
        "torch._C._dynamo.eval_frame._FrameAction.SKIP",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "torch._dynamo.backends.debugging.aot_eager",
        "torch._dynamo.backends.debugging.boxed_nop",
        "torch._inductor.custom_graph_pass.CustomGraphPass",
        "torch.autograd.graph._engine_run_backward",
        "torch._C._autograd._get_sequence_nr",
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch._C._get_obj_in_tls",
        "torch._C._is_key_in_tls",
        "torch._C._stash_obj_in_tls",
        "torch.autograd.graph.Node._sequence_nr",
        "torch._functorch.autograd_function.custom_function_call_vmap_helper",
        "torch._functorch.config.activation_memory_budget",
        "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter",
        "torch._functorch.utils.enable_single_level_autograd_function",
        "torch._subclasses.functional_tensor.FunctionalTensor",
        "torch._subclasses.functional_tensor.FunctionalTensorMode",
        "torch.fx.experimental.proxy_tensor.get_proxy_mode",
        "torch.fx.experimental.proxy_tensor.get_proxy_slot",
        "torch.autograd.forward_ad._current_level",
        "torch.autograd.forward_ad._set_fwd_grad_enabled",
        "torch.autograd.function._SingleLevelFunction",
        "torch._C._are_functorch_transforms_active",
        "torch._C._functorch.is_functorch_wrapped_tensor",
    ),
}
"""Versions -> the names that these versions have and the other ones lack."""
OF_CUDA = (
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._cuda_getDevice",
    "torch.distributed.ProcessGroupNCCL.Options._timeout",
)
"""Seen in the CUDA builds of 2.11 and 2.15; builds for the CPU lack them."""
MARKS = (
    "_dynamo_marked_constant",
    "_dynamo_static_input_type",
    "_torchdynamo_disable",
    "_torchdynamo_disable_msg",
    "_torchdynamo_disable_recursive",
)
"""Attributes that torch._dynamo reads."""
OURS = {"torch.ops._C"}


def names_of() -> list[str]:
    return [name for names in SEEN.values() for name in names]


def find(name: str) -> Any:
    parts = name.split(".")
    for at in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[at:], module)
    raise AttributeError(name)


def missing(names: Iterable[str]) -> list[str]:
    found = []
    for name in names:
        try:
            find(name)
        except AttributeError:
            found.append(name)
    return found


def expected(version: str, seen: Mapping[tuple[str, ...], tuple[str, ...]]) -> tuple[set[str], set[str]]:
    """Returns the names that this version of torch must have, and those that it must lack. A version that isn't in the
    table must have what the newest older one has.
    """
    numbers = {tuple(map(int, each.split("."))): each for versions in seen for each in versions}
    wanted = max((each for each in numbers if each <= tuple(map(int, version.split(".")[:2]))), default=min(numbers))
    has = {name for versions, names in seen.items() if numbers[wanted] in versions for name in names}
    return has, {name for names in seen.values() for name in names} - has


def test_the_installed_torch_is_as_the_table_says() -> None:
    has, lacks = expected(torch.__version__, SEEN)
    assert not missing(has)
    assert set(missing(lacks)) == lacks, "the table says that this version lacks them"


@pytest.mark.slow
def test_the_table_is_read_by_version() -> None:
    seen = {("2.11", "2.13"): ("old",), ("2.13", "2.15"): ("new",)}
    assert expected("2.11.0+cpu", seen) == ({"old"}, {"new"})
    assert expected("2.13.0", seen) == ({"old", "new"}, set())
    assert expected("2.14.1", seen) == expected("2.13.0", seen)
    assert expected("2.16.0", seen) == expected("2.15.0", seen) == ({"new"}, {"old"})
    assert expected("2.10.0", seen) == expected("2.11.0", seen)


@pytest.mark.skipif(torch.version.cuda is None, reason="this build of torch is for the CPU")
def test_a_torch_for_gpus_has_those_of_gpus() -> None:
    assert not missing(OF_CUDA)


def test_dynamo_reads_the_marks() -> None:
    sources = [path.read_text() for path in (Path(torch.__file__).parent / "_dynamo").rglob("*.py")]
    assert not [mark for mark in MARKS if not any(mark in source for source in sources)]


def test_the_table_has_all_names_of_its_file() -> None:
    listed = {part for name in (*names_of(), *OF_CUDA, *MARKS) for part in name.split(".")}
    used = {part for _, name in private_names(HOME, strict=True) for part in name.split(".") if part.startswith("_")}
    assert used <= listed | {"_C", "_getframe"}, used - listed


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    of_objects = {name.rpartition(".")[2] for name in names_of() if isinstance(find(name.rpartition(".")[0]), type)}
    of_objects = {name for name in (*of_objects, *MARKS) if name.startswith("_")}
    found = []
    for package in ("device_communicators", "parallel_state"):
        for path in (ROOT / package).rglob("*.py"):
            file = str(path.relative_to(ROOT))
            for line, name in private_names(file, strict=True) if file != HOME else ():
                is_torchs = name.startswith("torch.") or name in of_objects
                if is_torchs and name not in OURS:
                    found.append(f"{file}:{line}: {name}")
    assert not found, f"these belong into {HOME}: {found}"


def private_names(path: str, *, strict: bool = False) -> Iterator[tuple[int, str]]:
    """Yields torch's private names. `strict`: also private attributes of any other object."""
    nodes = nodes_of(ROOT / path)
    roots: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names = {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        for local, name in names.items():
            if name.partition(".")[0] == "torch":
                roots[local] = "torch" if local == "torch" else name
                if any(part.startswith("_") for part in name.split(".")):
                    yield node.lineno, name
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root, _, rest = ast.unparse(node).partition(".")
            if root in roots:
                yield node.lineno, f"{roots[root]}.{rest}"
            elif strict and root != "self":
                yield node.lineno, node.attr
