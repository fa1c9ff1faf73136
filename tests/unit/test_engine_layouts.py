"""Layout code of vLLM, SGLang and fairseq2 releases (`tests/references.py`) runs with a recorder of groups.
`LAYOUT_CASES` and `LAYOUT_SEED` are as in `test_incumbent_layouts`."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from device_communicators.base.errors import LayoutError
from parallel_state import PRESETS, Layout, create_fsdp_groups, resolve_layout, simulate
from tests import references
from tests.unit.test_incumbent_layouts import (
    CASES,
    MEGATRON_GROUPS,
    MIN_SHARE,
    RARE_SHARE,
    SEED,
    Groups,
    MegatronCase,
    TitanCase,
    load_megatron,
    load_titan,
)


class Stated(SimpleNamespace):
    """Reading another attribute fails the test."""


class Recorder:
    def __init__(self) -> None:
        self.world_size = 1
        self.lists: dict[str, Groups] = {}
        world = Stated(device_group=None, local_rank=0)
        self.stand_ins: dict[str, Any] = {
            "torch": Stated(
                arange=torch.arange,
                distributed=Stated(
                    is_initialized=lambda: True,
                    get_world_size=lambda: self.world_size,
                    get_rank=lambda: 0,
                    get_backend=lambda _: "gloo",
                ),
            ),
            "get_world_group": lambda: world,
            "init_model_parallel_group": self.record,
            "logger": Stated(info_once=lambda *_: None, info=lambda *_: None, warning=lambda *_: None),
        }

    def record(self, lists: Groups, *_: object, group_name: str, **__: object) -> SimpleNamespace:
        assert group_name not in self.lists
        self.lists[group_name] = sorted(list(ranks) for ranks in lists)
        return Stated(lists=self.lists[group_name], rank_in_group=0, pynccl_comm=None)


def ours_or_refusal(resolve: Callable[[], Layout]) -> Layout | str:
    try:
        return resolve()
    except LayoutError as error:
        return str(error)


class Vllm(Recorder):
    GLOBALS = ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB")

    def __init__(self) -> None:
        super().__init__()
        self.state = dict(self.stand_ins)
        exec(references.VLLM.cut("initialize_model_parallel"), self.state)
        self.checks = dict(self.stand_ins)
        exec(references.VLLM_CONFIG.cut("_validate_parallel_config", strip_decorators=True), self.checks)

    def groups(self, world_size: int, tp: int, pp: int, pcp: int, dcp: int, dp: int) -> dict[str, Groups] | str:
        self.world_size, self.lists = world_size, {}
        self.state.update(dict.fromkeys(self.GLOBALS))
        parallel = Stated(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp, data_parallel_size=dp, data_parallel_size_local=1,
            data_parallel_external_lb=False, enable_elastic_ep=False, enable_eplb=False, enable_fault_tolerance=False,
            use_all2all=False, all2all_backend="allgather_reducescatter", numa_bind=False, numa_bind_nodes=None,
            numa_bind_cpus=None, eplb_config=Stated(num_redundant_experts=0), _api_process_rank=0, _api_process_count=1,
        )  # fmt: skip
        config = ModuleType("vllm.config")
        config.get_current_vllm_config = lambda: Stated(  # type: ignore[attr-defined]
            parallel_config=parallel, model_config=None, engram_config=None
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "vllm", ModuleType("vllm"))
            patch.setitem(sys.modules, "vllm.config", config)
            try:
                self.checks["_validate_parallel_config"](parallel)
                self.state["initialize_model_parallel"](tp, pp, pcp, dcp)
            except (ValueError, RuntimeError) as error:
                assert "DCP" in str(error) or "dcp_size" in str(error) or "shape" in str(error), error
                return str(error)
        return self.lists


@pytest.fixture(scope="module")
def vllm() -> Vllm:
    return Vllm()


@pytest.mark.parametrize("preset", ["vllm"])
def test_every_group_that_vllm_makes_and_every_refusal(vllm: Vllm, preset: str) -> None:
    random_ = random.Random(f"{SEED} vllm")
    outcomes: Counter[str] = Counter()
    for _ in range(CASES):
        external, dp, pp, pcp, tp = (random_.choice((1, 1, 2, 3, 4)) for _ in range(5))
        dcp = random_.choice((1, 2, 2, 3, 4, tp, pcp, tp * pcp))
        world_size = external * dp * pp * pcp * tp + (random_.random() < 0.05)
        sizes = {"dp": dp, "pp": pp, "pcp": pcp, "tp": tp, "dcp": dcp, "external_dp": -1}
        theirs = vllm.groups(world_size, tp, pp, pcp, dcp, dp)
        ours = ours_or_refusal(lambda sizes=sizes, world_size=world_size: resolve_layout(world_size, sizes, preset))  # type: ignore[misc]
        if isinstance(theirs, str):
            assert isinstance(ours, str), (world_size, sizes, theirs)
            outcomes["refused"] += 1
            outcomes["refused with pcp"] += "PCP is enabled" in theirs
            outcomes["refused without pcp"] += "divisible by dcp_size" in theirs
            continue
        assert isinstance(ours, Layout), (world_size, sizes, ours)
        assert theirs.keys() == {"tp", "dcp", "pcp", "pp", "dp", "ep"}
        for name, lists in theirs.items():
            if name == "dcp" and min(tp, pcp) > 1 and dcp == tp * pcp:
                _check_order_of_dcp(ours, lists)
            else:
                assert ours.groups(name) == lists, (world_size, sizes, name)
        outcomes["accepted"] += 1
        outcomes["dcp over pcp"] += 1 < dcp == pcp < tp * pcp
        outcomes["dcp over tp and pcp"] += pcp > 1 and tp > 1 and dcp == tp * pcp
        outcomes["dcp in tp"] += pcp == 1 and 1 < dcp < tp
    assert min(outcomes["accepted"], outcomes["refused"]) >= MIN_SHARE * CASES, outcomes
    assert len(outcomes) == 7, outcomes
    assert min(outcomes.values()) >= RARE_SHARE * CASES, outcomes


def _check_order_of_dcp(ours: Layout, lists: Groups) -> None:
    """vLLM lists the same ranks pcp first. torch numbers them ascending in the group, as we do."""
    assert ours.groups("dcp") == sorted(map(sorted, lists))
    tp, pcp = ours.group_of(0, "tp"), ours.group_of(0, "pcp")
    for ranks in lists:
        assert ranks != sorted(ranks)
        for number, rank in enumerate(ranks):
            tp_rank, pcp_rank = (ours.group_of(rank, axis).index(rank) for axis in ("tp", "pcp"))
            assert number == tp_rank * len(pcp) + pcp_rank, "what docs/layouts.md says to use instead"
        assert len(ranks) == len(tp) * len(pcp)


@pytest.mark.parametrize("preset", ["vllm"])
def test_decode_context_parallel_groups_span_the_prefill_ones_first(vllm: Vllm, preset: str) -> None:
    theirs = vllm.groups(16, 4, 1, 4, 4, 1)
    assert isinstance(theirs, dict)
    assert theirs["dcp"][0] == [0, 4, 8, 12]
    assert resolve_layout(16, {"tp": 4, "pcp": 4, "dcp": 4}, preset).groups("dcp") == theirs["dcp"]


SGLANG_GROUPS = {
    "_TP": ("tp", "cp", "dp"), "_ATTN_TP": ("tp",), "_ATTN_CP": ("cp",), "_PP": ("pp",), "_MOE_EP": ("ep",),
    "_MOE_TP": ("etp",), "_MOE_DP": ("edp",), "_DCP": ("dcp",),
}  # fmt: skip


class Sglang(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.widths = Stated()
        setting = Stated(get=lambda: False)
        self.state = {
            **self.stand_ins,
            "get_parallel": lambda: self.widths,
            "envs": Stated(SGLANG_USE_MESSAGE_QUEUE_BROADCASTER=setting),
            "is_hip": lambda: False,
            "is_cuda": lambda: True,
            "_is_npu": False,
            "_is_xpu": False,
        }
        exec(references.SGLANG_WIDTHS.cut("derive_parallel_widths", "derive_attn_tp_size"), self.state)
        exec(references.SGLANG.cut("initialize_model_parallel"), self.state)

    def groups(self, world_size: int, **widths: int) -> dict[str, Groups] | str:
        self.world_size, self.lists = world_size, {}
        self.widths = Stated(**widths, shared_experts_tp_size=None, override_permanently=lambda **_: None)
        self.state.update(dict.fromkeys([*SGLANG_GROUPS, "_SHARED_EXPERTS_TP", "_SELF_PP", "_PDMUX_PREFILL_TP_GROUP"]))
        sampler = ModuleType("sglang.srt.layers.sampler")
        sampler.SYNC_TOKEN_IDS_ACROSS_TP = False  # type: ignore[attr-defined]
        names = ("sglang", "sglang.srt", "sglang.srt.layers")
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setitem(sys.modules, name, ModuleType(name))
            patch.setitem(sys.modules, sampler.__name__, sampler)
            try:
                self.state["initialize_model_parallel"]()
            except RuntimeError as error:
                return str(error)
        return {name: self.state[name].lists for name in SGLANG_GROUPS if self.state[name] is not None}


@pytest.mark.parametrize("preset", ["megatron", "torchtitan"])
def test_every_group_that_sglang_makes(preset: str) -> None:
    sglang, random_ = Sglang(), random.Random(f"{SEED} sglang")
    outcomes: Counter[str] = Counter()
    for _ in range(CASES // 2):
        tp, cp, dp, pp = (random_.choice((1, 1, 2, 3, 4)) for _ in range(4))
        inside = tp * cp * dp
        ep = random_.choice([size for size in range(1, inside + 1) if inside % size == 0])
        moe_dp = random_.choice([size for size in range(1, inside + 1) if inside % (size * ep) == 0])
        dcp = random_.choice((1, 1, 2, tp, tp, 3, inside))
        world_size = inside * pp + (random_.random() < 0.05)
        theirs = sglang.groups(
            world_size, tp_size=inside, pp_size=pp, attn_dp_size=dp, attn_cp_size=cp, attn_dcp_size=dcp,
            moe_ep_size=ep, moe_dp_size=moe_dp,
        )  # fmt: skip
        sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "dcp": dcp, "ep": ep, "etp": inside // ep // moe_dp}
        ours = ours_or_refusal(lambda sizes=sizes, world_size=world_size: resolve_layout(world_size, sizes, preset))  # type: ignore[misc]
        if isinstance(theirs, str):
            assert isinstance(ours, str), (world_size, sizes, theirs)
            outcomes["refused"] += 1
            continue
        if tp % dcp:  # it also lets dcp span attention's cp and dp, whose ranks hold other caches here
            assert isinstance(ours, str), (world_size, sizes)
            assert f"dcp={dcp}" in ours
            outcomes["dcp beyond attention's tp"] += 1
            continue
        assert isinstance(ours, Layout), (world_size, sizes, ours)
        if cp > moe_dp:  # then its group for the gather before the experts is attention's cp
            assert theirs.pop("_MOE_DP") == theirs["_ATTN_CP"]
            outcomes["cp beyond the experts' dp"] += 1
        for name, lists in theirs.items():
            assert ours.groups(*SGLANG_GROUPS[name]) == lists, (world_size, sizes, name)
        outcomes["accepted"] += 1
        outcomes["dcp"] += dcp > 1
        outcomes["everything"] += min(tp, cp, dp, pp, ep) > 1
    assert outcomes["accepted"] >= MIN_SHARE * CASES // 2, outcomes
    assert len(outcomes) == 6, outcomes
    assert min(outcomes.values()) >= RARE_SHARE * CASES // 2, outcomes


class Gang:
    def __init__(self, ranks: list[int], rank: int) -> None:
        self.ranks, self.size, self.rank = ranks, len(ranks), ranks.index(rank)
        self.device, self.supports_process_group = torch.device("cpu"), False

    def create_gang(self, positions: list[int]) -> Gang | None:
        ranks = [self.ranks[position] for position in positions]
        mine = self.ranks[self.rank]
        return Gang(ranks, mine) if mine in ranks else None


class Fairseq2:
    def __init__(self) -> None:
        self.rank = 0
        self.state: dict[str, Any] = {
            "torch": torch,
            "log": Stated(info=lambda *_: None),
            "FakeGang": lambda device: Gang([self.rank], self.rank),
            "dataclass": dataclass,
            "override": lambda method: method,
            "Closable": object,
            "GangError": RuntimeError,
            "InternalError": RuntimeError,
        }
        exec(references.FAIRSEQ2.cut("Gangs", "create_parallel_gangs", "create_fsdp_gangs"), self.state)

    def gangs(self, world_size: int, rank: int, tp: int) -> Any:
        self.rank = rank
        return self.state["create_parallel_gangs"](Gang(list(range(world_size)), rank), tp_size=tp)

    def sharded(self, gangs: Any, intra_node_size: int | None) -> Any:
        return self.state["create_fsdp_gangs"](gangs, intra_node_size)


def ranks_of(gangs: Any) -> dict[str, list[int]]:
    return {name: list(getattr(gangs, name).ranks) for name in ("root", "dp", "rdp", "sdp", "tp", "pp")}


@pytest.mark.parametrize(("world_size", "tp"), [(1, 1), (8, 1), (8, 2), (8, 8), (12, 3), (24, 2)])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_gangs_of_fairseq2(preset: str, world_size: int, tp: int) -> None:
    fairseq2 = Fairseq2()
    for rank in range(world_size):
        theirs, ours = fairseq2.gangs(world_size, rank, tp), simulate(rank, world_size, tp, order=preset)
        assert ranks_of(ours) == ranks_of(theirs)
        for intra in (None, 0, 1, 2, 3, 4, 5, 6, 12):
            try:
                expected = ranks_of(fairseq2.sharded(theirs, intra))
            except ValueError:
                with pytest.raises(LayoutError):
                    create_fsdp_groups(ours, intra)
                continue
            assert ranks_of(create_fsdp_groups(ours, intra)) == expected, intra
            shard_size = -1 if intra is None else intra
            at_once = simulate(rank, world_size, tp, order=preset, data_parallel_shard_size=shard_size)
            assert ranks_of(at_once) == expected, intra


def _dense_of_megatron() -> DenseGroups:
    megatron = load_megatron()

    def groups(tp: int, pp: int, dp: int) -> dict[tuple[str, ...], Groups]:
        made = megatron.groups(MegatronCase(tp * pp * dp, tp, 1, pp, 1, tp, PRESETS["megatron"].order))
        assert isinstance(made, dict), made
        return {(ours,): sorted(made[name]) for name, ours in MEGATRON_GROUPS.items() if ours in ("tp", "pp", "dp")}

    return groups


def _dense_of_torchtitan() -> DenseGroups:
    titan_groups = load_titan()

    def groups(tp: int, pp: int, dp: int) -> dict[tuple[str, ...], Groups]:
        made = titan_groups(TitanCase(pp, 1, dp, 1, tp, 1, 1), tp * pp * dp)
        assert isinstance(made, dict), made
        return {("tp",): made["tp"], ("pp",): made["pp"], ("dp",): made["fsdp"]}

    return groups


def _dense_of_vllm() -> DenseGroups:
    vllm = Vllm()

    def groups(tp: int, pp: int, dp: int) -> dict[tuple[str, ...], Groups]:
        made = vllm.groups(tp * pp * dp, tp, pp, 1, 1, dp)
        assert isinstance(made, dict), made
        return {(name,): made[name] for name in ("tp", "pp", "dp")}

    return groups


def _dense_of_sglang() -> DenseGroups:
    sglang = Sglang()

    def groups(tp: int, pp: int, dp: int) -> dict[tuple[str, ...], Groups]:
        made = sglang.groups(
            tp * pp * dp, tp_size=tp * dp, pp_size=pp, attn_dp_size=dp, attn_cp_size=1, attn_dcp_size=1,
            moe_ep_size=1, moe_dp_size=1,
        )  # fmt: skip
        assert isinstance(made, dict), made
        return {("tp",): made["_ATTN_TP"], ("pp",): made["_PP"], ("tp", "dp"): made["_TP"]}

    return groups


DenseGroups = Callable[[int, int, int], "dict[tuple[str, ...], Groups]"]
DENSE = {
    "megatron": _dense_of_megatron, "torchtitan": _dense_of_torchtitan, "vllm": _dense_of_vllm,
    "sglang": _dense_of_sglang,
}  # fmt: skip


@pytest.mark.parametrize("engine", DENSE)
@pytest.mark.parametrize("preset", PRESETS)
def test_dense_groups_of_engines(preset: str, engine: str) -> None:
    """vLLM's data-parallel ranks are further apart than its pipeline ranks; in the other engines it is the reverse."""
    groups = DENSE[engine]()
    same_order = (preset == "vllm") == (engine == "vllm")
    for tp, pp, dp in itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 4)):
        layout = resolve_layout(tp * pp * dp, {"tp": tp, "pp": pp, "dp": dp}, preset)
        equal = all(layout.groups(*axes) == lists for axes, lists in groups(tp, pp, dp).items())
        assert equal == (same_order or pp == 1 or dp == 1), (tp, pp, dp)
