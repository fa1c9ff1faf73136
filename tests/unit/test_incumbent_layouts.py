"""Our rank lists equal those of Megatron-core, torchtitan and torch's DeviceMesh. A thousand cases, 10,000
with FAILURE_TESTS=long; LAYOUT_CASES sets their number and LAYOUT_SEED the seed. With fewer, a test may
fail for lack of a kind of case."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from device_communicators.base.errors import LayoutError
from parallel_state import PRESETS, Layout, resolve_layout
from parallel_state.layout.axes import DEFAULT_ORDER
from tests.extent import LONG
from tests.programs import Program
from tests.references import TORCHTITAN

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("LAYOUT_CASES", "10000" if LONG else "1000"))
SEED = int(os.environ.get("LAYOUT_SEED", "0"))
MIN_SHARE = 0.2  # of accepted and of refused cases
RARE_SHARE = 0.01  # of each single reason to refuse
DEADLINE_S = 120

Groups = list[list[int]]


def refusal_of(resolve: Callable[[], Layout]) -> str:
    try:
        layout = resolve()
    except LayoutError as error:
        return str(error)
    pytest.fail(f"this was not refused: {layout!r}")


MEGATRON_TOKENS = ("tp", "cp", "ep", "dp", "pp")

MEGATRON_GROUPS = {
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "DATA_PARALLEL_GROUP": "dp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "model",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "embedding",
    "POSITION_EMBEDDING_GROUP": "position_embedding",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
}
INSTANCE_GROUPS = {
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": "intra_edp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": "inter_dist_opt",
}
EXPERT_NAMES = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}

REFUSALS = (
    "is not divisible by",
    "divisible by expert_tensor_model_pipeline_parallel size",
    "specified the order",
    "When not using pp-last rank ordering",
    "Pipeline parallel groups are expected to be the same",
    "Data parallel size should be divisible by partial DistOpt shard factor",
    "Expert data parallel size should be divisible by partial DistOpt shard factor",
)


class MegatronCase(NamedTuple):
    world_size: int
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    order: str
    instances: int = 1

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.world_size // (self.etp * self.ep * self.pp)

    def ours(self, order: str = "", **options: int) -> Layout:
        sizes = {
            **self._asdict_of("tp", "cp", "pp", "ep", "etp"),
            "num_distributed_optimizer_instances": self.instances,
        }
        return resolve_layout(self.world_size, sizes, order or self.order, **options)

    def ours_without_experts(self) -> Layout:
        return resolve_layout(self.world_size, self._asdict_of("tp", "cp", "pp"), self.order)

    def _asdict_of(self, *names: str) -> dict[str, int]:
        return {name: getattr(self, name) for name in names}


class Megatron:
    """Only this file of megatron-core is loaded, with a recorder of groups: importing `megatron.core` takes seconds."""

    def __init__(self, path: Path) -> None:
        utils = ModuleType("layout_reference.utils")
        vars(utils).update(
            GlobalMemoryBuffer=object, GlobalSymmetricMemoryBuffer=object, is_torch_min_version=lambda _: True
        )
        spec = importlib.util.spec_from_file_location("layout_reference.parallel_state", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        package = ModuleType("layout_reference")
        package.__path__ = []
        stand_ins = {"layout_reference": package, "layout_reference.utils": utils}
        sys.modules.update(stand_ins)
        try:
            spec.loader.exec_module(module)
        finally:
            for name in stand_ins:
                del sys.modules[name]
        self._module = module
        self._fresh = dict(vars(module))
        self._made: dict[str, Groups] = {}
        self._world_size = 0
        self._fresh["create_group"] = self._write_down
        self._fresh["os"] = SimpleNamespace(environ={})  # it would delete a variable of the real one
        # Any other use of torch fails the test.
        self._fresh["torch"] = SimpleNamespace(
            distributed=SimpleNamespace(
                is_initialized=lambda: True, get_world_size=lambda: self._world_size, get_rank=lambda: 0
            )
        )
        self.rank_generator = module.RankGenerator
        self.initialize_model_parallel = module.initialize_model_parallel

    def _write_down(self, ranks: list[int], group_desc: str, **_: object) -> tuple[str, tuple[int, ...]]:
        self._made.setdefault(group_desc, []).append(list(ranks))
        return group_desc, tuple(ranks)

    def groups(self, case: MegatronCase) -> dict[str, Groups] | str:
        vars(self._module).update(self._fresh)  # its groups and ranks are globals
        self._made, self._world_size = {}, case.world_size
        try:
            self._module.initialize_model_parallel(
                tensor_model_parallel_size=case.tp,
                pipeline_model_parallel_size=case.pp,
                context_parallel_size=case.cp,
                expert_model_parallel_size=case.ep,
                expert_tensor_parallel_size=case.etp,
                order=case.order,
                num_distributed_optimizer_instances=case.instances,
                create_gloo_process_groups=False,
            )
        except (AssertionError, RuntimeError) as error:
            return str(error)
        return self._made

    def decoder(self, case: MegatronCase, rank_offset: int = 0) -> SimpleNamespace:
        return self.rank_generator(case.tp, 1, case.dp, case.pp, case.cp, case.order, rank_offset)

    def experts(self, case: MegatronCase, rank_offset: int = 0) -> SimpleNamespace:
        return self.rank_generator(case.etp, case.ep, case.edp, case.pp, 1, case.order, rank_offset)


@pytest.fixture(scope="module")
def megatron() -> Megatron:
    return load_megatron()


def load_megatron() -> Megatron:
    spec = importlib.util.find_spec("megatron")  # a namespace: finding it imports nothing
    paths = [Path(place, "core", "parallel_state.py") for place in (spec and spec.submodule_search_locations) or ()]
    found = [path for path in paths if path.exists()]
    if not found or importlib.util.find_spec("einops") is None:
        pytest.skip("megatron-core isn't installed; pip install --no-deps megatron-core==0.16.1 einops")
    return Megatron(found[0])


def megatron_order(random_: random.Random, sizes: dict[str, int]) -> str:
    tokens = list(MEGATRON_TOKENS)
    random_.shuffle(tokens)
    if random_.random() < 0.6:
        tokens.sort(key=lambda token: token == "pp")
    chance = random_.random()
    if chance < 0.3:
        tokens = [token for token in tokens if sizes[token] > 1 or random_.random() < 0.5]
    elif chance < 0.4:
        tokens.remove(random_.choice(tokens))
    return "-".join(tokens) or "tp"  # Megatron splits "" into one axis without a name


def megatron_case(random_: random.Random, largest_world: int = 48) -> MegatronCase:
    small = (1, 1, 1, 2, 2, 3, 4)
    while True:
        tp, cp, dp, pp = (random_.choice(small) for _ in range(4))
        world_size = tp * cp * dp * pp
        if world_size <= largest_world:
            break
    fitting = [size for size in range(1, tp * cp * dp + 1) if (tp * cp * dp) % size == 0]
    ep = random_.choice(fitting)
    fitting = [size for size in fitting if (tp * cp * dp) % (size * ep) == 0]
    etp = tp if tp in fitting and random_.random() < 0.6 else random_.choice(fitting)
    chance = random_.random()
    if chance < 0.05:
        world_size = random_.randint(1, largest_world)
    elif chance < 0.1:
        ep, etp = random_.choice(((ep, random_.choice((2, 3, 5))), (random_.choice((2, 3, 5)), etp)))
    sizes = {"tp": max(tp, etp), "cp": cp, "ep": ep, "dp": dp, "pp": pp}
    instances = random_.choice([size for size in range(2, dp * cp + 1) if dp * cp % size == 0] or [1])
    instances = random_.choice((1, 1, 1, instances, instances, instances, 2))
    return MegatronCase(world_size, tp, cp, pp, ep, etp, megatron_order(random_, sizes), instances)


def megatron_cases(count: int, seed: object, largest_world: int = 48) -> Iterator[MegatronCase]:
    random_ = random.Random(f"{SEED} {seed}")
    return (megatron_case(random_, largest_world) for _ in range(count))


def test_every_group_that_megatron_makes_and_every_refusal(megatron: Megatron) -> None:
    outcomes: Counter[str] = Counter()
    for case in megatron_cases(CASES, "groups"):
        theirs = megatron.groups(case)
        if isinstance(theirs, str):
            assert refusal_of(case.ours), f"{case}, {theirs}"
            outcomes["refused"] += 1
            outcomes.update(reason for reason in REFUSALS if reason in theirs)
            continue
        layout = case.ours()
        _check_groups(case, layout, theirs)
        outcomes["accepted"] += 1
        outcomes["several instances"] += case.instances > 1
        outcomes["instances that cut dp and cp"] += case.dp % case.instances > 0
        outcomes["instances with dp before cp"] += min(case.instances, case.dp, case.cp) > 1 and (
            case.order.find("dp") < case.order.find("cp")
        )
        outcomes["with experts"] += layout.size("ep") > 1 or layout.size("etp") != layout.size("tp")
        outcomes["pp isn't last"] += case.pp > 1 and not case.order.endswith("pp")
    assert min(outcomes["accepted"], outcomes["refused"]) >= MIN_SHARE * CASES, outcomes
    assert outcomes["with experts"] >= MIN_SHARE * outcomes["accepted"], outcomes
    assert outcomes["several instances"] >= MIN_SHARE * outcomes["accepted"], outcomes
    for kind in ("pp isn't last", "instances that cut dp and cp", "instances with dp before cp"):
        assert outcomes[kind] >= RARE_SHARE * CASES, outcomes
    assert all(outcomes[reason] >= RARE_SHARE * CASES for reason in REFUSALS), outcomes


def _check_groups(case: MegatronCase, layout: Layout, theirs: dict[str, Groups]) -> None:
    names = {**MEGATRON_GROUPS, **(INSTANCE_GROUPS if case.instances > 1 else {})}
    for name, groups in theirs.items():
        assert layout.groups(names[name]) == sorted(sorted(ranks) for ranks in groups), f"{names[name]} of {case}"
    assert theirs.keys() == names.keys()


@pytest.mark.parametrize("preset", ["megatron", "torchtitan"])
def test_every_group_that_megatron_makes_by_default(megatron: Megatron, preset: str) -> None:
    compared = 0
    for case in megatron_cases(CASES // 3, "defaults"):
        case = case._replace(order=DEFAULT_ORDER)
        theirs = megatron.groups(case)
        if isinstance(theirs, str):
            assert refusal_of(partial(case.ours, preset)), f"{case}, {theirs}"
            continue
        _check_groups(case, case.ours(preset), theirs)
        compared += 1
    assert compared >= MIN_SHARE * CASES // 3


def test_groups_that_span_any_of_megatrons_tokens_from_any_rank_on(megatron: Megatron) -> None:
    random_, compared = random.Random(f"{SEED} tokens"), 0
    for case in megatron_cases(CASES // 3, "tokens"):
        if isinstance(megatron.groups(case), str):
            continue
        offset = random_.choice((0, 1, case.world_size, random_.randint(0, 10_000)))
        layout = case.ours(rank_offset=offset)
        dense = random_.sample(("tp", "cp", "dp", "pp"), random_.randint(1, 4))
        assert layout.groups(*dense) == megatron.decoder(case, offset).get_ranks("-".join(dense)), (case, dense)
        experts = random_.sample(tuple(EXPERT_NAMES), random_.randint(1, 4))
        ours = layout.groups(*(EXPERT_NAMES[token] for token in experts))
        assert ours == megatron.experts(case, offset).get_ranks("-".join(experts)), (case, experts)
        compared += 1
    assert compared >= MIN_SHARE * CASES // 3


def test_without_experts_the_dense_groups_are_megatrons_whatever_its_expert_layers_would_need(
    megatron: Megatron,
) -> None:
    outcomes: Counter[str] = Counter()
    for case in megatron_cases(CASES // 3, "no experts"):
        case = case._replace(ep=1, etp=case.tp, instances=1)
        dense_tokens = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp")
        try:
            generator = megatron.decoder(case) if case.world_size % (case.tp * case.cp * case.pp) == 0 else None
        except RuntimeError:
            generator = None
        if generator is None:
            assert refusal_of(case.ours_without_experts)
            outcomes["refused"] += 1
            continue
        layout = case.ours_without_experts()
        for token in dense_tokens:
            assert layout.groups(*token.split("-")) == generator.get_ranks(token), (case, token)
        theirs = megatron.groups(case)
        if isinstance(theirs, str):
            assert {"ep", "etp", "edp", "tp_ep", "tp_ep_pp"} <= layout.missing.keys(), (case, theirs)
            with pytest.raises(LayoutError, match=r"expert layers"):
                layout.groups("edp")
            outcomes["only dense"] += 1
        else:
            for name in ("EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP", "EXPERT_TENSOR_PARALLEL_GROUP"):
                assert layout.groups(MEGATRON_GROUPS[name]) == theirs[name], case
            outcomes["both"] += 1
    assert min(outcomes.values()) >= RARE_SHARE * CASES // 3, outcomes
    assert len(outcomes) == 3, outcomes


def test_the_default_order_is_megatrons(megatron: Megatron) -> None:
    assert inspect.signature(megatron.initialize_model_parallel).parameters["order"].default == DEFAULT_ORDER
    assert PRESETS["megatron"].order == DEFAULT_ORDER == "tp-cp-ep-dp-pp"


DENSE_MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SPARSE_MESH = ("pp", "dp_replicate", "efsdp", "ep", "etp")

FLATTENED = {
    "fsdp": ("dp_shard", "cp"),
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "tp_cp": ("cp", "tp"),
    "replica": ("pp", "dp_shard", "cp", "tp"),
    "edp": ("dp_replicate", "efsdp"),
    "tp_ep": ("ep", "etp"),
}


class TitanCase(NamedTuple):
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def meshes(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        efsdp = self.dp_shard * self.cp * self.tp // (self.ep * self.etp)
        return {DENSE_MESH: self[:5], SPARSE_MESH: (self.pp, self.dp_replicate, efsdp, self.ep, self.etp)}

    @property
    def fits(self) -> bool:
        return self.dp_shard * self.cp * self.tp % (self.ep * self.etp) == 0

    def ours(self, preset: str) -> Layout:
        return resolve_layout(self.world_size, self._asdict(), preset)


def titan_cases(count: int, seed: str) -> Iterator[TitanCase]:
    random_ = random.Random(f"{SEED} {seed}")
    for _ in range(count):
        dense = [random_.choice((1, 2, 2, 3)) for _ in range(5)]
        inside = prod(dense[2:])
        ep = random_.choice([size for size in range(1, inside + 1) if inside % size == 0 or random_.random() < 0.4])
        yield TitanCase(*dense, ep, random_.choice((1, 1, dense[4])))  # type: ignore[call-arg]


def mesh_groups(dims: tuple[str, ...], sizes: tuple[int, ...], spanned: tuple[str, ...]) -> Groups:
    outside = [index for index, dim in enumerate(dims) if dim not in spanned]
    inside = [index for index, dim in enumerate(dims) if dim in spanned]
    rows = np.arange(prod(sizes)).reshape(sizes).transpose(outside + inside)
    return rows.reshape(-1, prod(sizes[index] for index in inside)).tolist()


class ArrayMesh:
    """The part of a DeviceMesh that torchtitan needs, for all ranks at once."""

    def __init__(self, dims: tuple[str, ...], sizes: tuple[int, ...], spanned: tuple[str, ...] = ()) -> None:
        self.mesh_dim_names, self._sizes, self._spanned = dims, sizes, spanned or dims
        self.ndim = 1

    def _unflatten(self, _: int, sizes: tuple[int, ...], dims: tuple[str, ...], **__: object) -> ArrayMesh:
        if prod(sizes) != prod(self._sizes):
            raise ValueError(f"{sizes} don't make {prod(self._sizes)} ranks")
        return ArrayMesh(dims, sizes)

    def __getitem__(self, dims: str | tuple[str, ...]) -> ArrayMesh:
        return ArrayMesh(self.mesh_dim_names, self._sizes, (dims,) if isinstance(dims, str) else dims)

    def _flatten(self, _: str) -> ArrayMesh:
        return self

    def size(self) -> int:
        return len(self.groups()[0])

    def groups(self) -> Groups:
        return mesh_groups(self.mesh_dim_names, self._sizes, self._spanned)


TITAN_GROUPS = {name: name for name in ("pp", "dp_replicate", "fsdp", "cp", "tp", "ep", "efsdp", "etp")}
TITAN_GROUPS |= {"batch": "dp", "loss": "dp_cp"}


TitanGroups = Callable[[TitanCase, int], "dict[str, Groups] | str"]


@pytest.fixture(scope="module")
def titan_groups() -> TitanGroups:
    return load_titan()


def load_titan() -> TitanGroups:
    state: dict[str, object] = {
        "dataclass": dataclass,
        "field": field,
        "device_type": "cpu",
        "logger": SimpleNamespace(info=lambda *_: None),
        "init_device_mesh": lambda _, sizes, mesh_dim_names: ArrayMesh(mesh_dim_names, sizes),
    }
    exec(TORCHTITAN.cut("ParallelDims"), state)
    make: Any = state["ParallelDims"]

    def groups(case: TitanCase, world_size: int) -> dict[str, Groups] | str:
        try:
            dims = make(**case._asdict(), world_size=world_size)
            dims.build_mesh()
        except (AssertionError, ValueError) as error:
            return str(error) or "some degree is below 1"
        return {name: mesh.groups() for name, mesh in dims._meshes.items()}

    return groups


@pytest.mark.parametrize("preset", ["torchtitan", "megatron"])
def test_every_group_that_torchtitan_makes_and_every_refusal(titan_groups: TitanGroups, preset: str) -> None:
    outcomes: Counter[str] = Counter()
    random_ = random.Random(f"{SEED} titan worlds")
    for case in titan_cases(CASES // 2, "meshes"):
        world_size = case.world_size + (random_.random() < 0.05)
        theirs = titan_groups(case, world_size)
        if isinstance(theirs, str):
            assert refusal_of(partial(resolve_layout, world_size, case._asdict(), preset))
            outcomes["refused"] += 1
            continue
        layout = resolve_layout(world_size, case._asdict(), preset)
        assert theirs.keys() == TITAN_GROUPS.keys()
        for name, groups in theirs.items():
            assert layout.groups(TITAN_GROUPS[name]) == groups, (case, name)
        outcomes["accepted"] += 1
    assert min(outcomes["accepted"], outcomes["refused"]) >= MIN_SHARE * CASES // 2, outcomes


def named_dims(dims: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    flattened = {name: parts for name, parts in FLATTENED.items() if set(parts) <= set(dims)}
    return {**{dim: (dim,) for dim in dims}, **flattened}


# In its own process, because the default group and torch's fake backend must not reach other tests.
DEVICE_MESH_SCRIPT = """
import dataclasses, json, sys
from types import ModuleType, SimpleNamespace
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

for name in ("torchtitan", "torchtitan.tools", "torchtitan.tools.logging", "torchtitan.tools.utils"):
    sys.modules[name] = ModuleType(name)
sys.modules["torchtitan.tools.logging"].logger = SimpleNamespace(info=lambda text: None)
sys.modules["torchtitan.tools.utils"].device_type = "cpu"
request = json.load(sys.stdin)
titan = sys.modules["titan"] = ModuleType("titan")
exec(request["torchtitan"], vars(titan))

found = []
for world_size, rank, meshes, degrees in request["cases"]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    groups = {}
    for dims, sizes, names in meshes:
        mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(dims))
        for name, spanned in names.items():
            part = mesh[spanned[0]] if len(spanned) == 1 else mesh[tuple(spanned)]._flatten(name)
            groups[name] = dist.get_process_group_ranks(part.get_group())
    dims = titan.ParallelDims(**degrees, world_size=world_size)
    dims.build_mesh()
    groups["torchtitan"] = {name: dist.get_process_group_ranks(mesh.get_group()) for name, mesh in dims._meshes.items()}
    found.append(groups)
    dist.destroy_process_group()
json.dump(found, sys.stdout)
"""


@pytest.mark.parametrize("preset", ["torchtitan"])
def test_the_groups_of_torchs_device_mesh(tmp_path: Path, preset: str) -> None:
    random_ = random.Random(f"{SEED} ranks")
    cases = [TitanCase(2, 1, 2, 1, 2, 2, 2), TitanCase(1, 2, 2, 2, 2, 4, 1), TitanCase(2, 2, 3, 2, 2, 6, 1)]
    cases += [case for case in titan_cases(60, "device meshes") if case.fits]
    asked = []
    for number, case in enumerate(cases):
        ranks = range(case.world_size) if number < 2 else [random_.randrange(case.world_size)]
        asked += [(case, rank) for rank in ranks]
    request = [
        (
            case.world_size,
            rank,
            [(dims, sizes, named_dims(dims)) for dims, sizes in case.meshes.items()],
            case._asdict(),
        )
        for case, rank in asked
    ]
    asking = tmp_path / "request.json"
    asking.write_text(json.dumps({"torchtitan": TORCHTITAN.read(), "cases": request}))
    program = Program(f"import sys\nsys.stdin = open({str(asking)!r})\n{DEVICE_MESH_SCRIPT}", os.environ)
    out, err = program.communicate(DEADLINE_S)
    assert program.returncode == 0, err
    answers = json.loads(out)
    assert len(answers) == len(asked) >= 50
    for (case, rank), theirs in zip(asked, answers, strict=True):
        layout = case.ours(preset)
        titan = theirs.pop("torchtitan")
        assert {name: layout.group_of(rank, ours) for name, ours in TITAN_GROUPS.items()} == titan, (case, rank)
        assert theirs.keys() == {*DENSE_MESH, *SPARSE_MESH, *FLATTENED}
        assert {name: layout.group_of(rank, name) for name in theirs} == theirs, (case, rank)
