from __future__ import annotations

import importlib.util
import itertools
import sys
from types import ModuleType
from typing import Any

import pytest

from device_communicators.base.errors import AlreadyInitializedError, UnsupportedError
from parallel_state.compat import megatron as mpu
from parallel_state.compat.megatron.ranks import hierarchical_ranks, hybrid_ranks
from tests.references import MEGATRON

NAME = "megatron.core.parallel_state"


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    einops, numpy = pytest.importorskip("einops"), pytest.importorskip("numpy")
    import math

    found: dict[str, Any] = {
        "List": list, "einops": einops, "np": numpy, "log2": math.log2, "HAVE_EINOPS": True,
        "create_group": lambda ranks, **_: list(ranks),
    }  # fmt: skip
    names = (
        "generate_masked_orthogonal_rank_groups", "RankGenerator", "create_hierarchical_groups",
        "create_hybrid_dp_cp_groups", "default_embedding_ranks", "default_position_embedding_ranks",
    )  # fmt: skip
    exec(MEGATRON.cut(*names), found)
    return found


def test_rank_generators_list_what_megatrons_do(theirs: dict[str, Any]) -> None:
    compared = 0
    for order in ("tp-cp-ep-dp-pp", "tp-cp-pp-ep-dp", "DP-TP-PP", "pp-tp-cp-dp"):
        for tp, dp, pp, cp in itertools.product((1, 2), (1, 3), (1, 2), (1, 2)):
            sizes = (tp, 1, dp, pp, cp, order, 5)
            try:
                expected = theirs["RankGenerator"](*sizes)
            except (RuntimeError, AssertionError):
                with pytest.raises((RuntimeError, AssertionError)):
                    mpu.RankGenerator(*sizes)
                continue
            ours = mpu.RankGenerator(*sizes)
            assert (ours.order, ours.ordered_size, ours.world_size) == (
                expected.order, expected.ordered_size, expected.world_size
            )  # fmt: skip
            for token in ("tp", "dp", "pp", "cp", "tp-pp", "dp-cp", "tp-dp-cp"):
                assert ours.get_mask(ours.order, token) == expected.get_mask(expected.order, token)
                assert ours.get_ranks(token) == expected.get_ranks(token), (sizes, token)
                compared += 1
    assert compared > 200
    for kind in (theirs["RankGenerator"], mpu.RankGenerator):
        with pytest.raises(AssertionError):
            kind(1, 2, 1, 1, 2, "tp-cp-ep-dp-pp")


@pytest.mark.parametrize(("count", "sizes"), [(16, [2, 2, 4]), (8, [4, 2]), (4, [4]), (6, [3, 2])])
def test_hierarchical_and_hybrid_lists_are_megatrons(theirs: dict[str, Any], count: int, sizes: list[int]) -> None:
    ranks = [10 + 3 * at for at in range(count)]
    for rank in ranks:
        expected, _ = theirs["create_hierarchical_groups"](rank, ranks, sizes)
        assert [next(each for each in level if rank in each) for level in hierarchical_ranks(ranks, sizes)] == expected
        hybrid = theirs["create_hybrid_dp_cp_groups"](rank, ranks, None) if count != 6 else None
        if hybrid is not None:
            assert {len(each): each for each in hybrid_ranks(ranks) if rank in each} == hybrid


@pytest.mark.parametrize("stages", [[3], [1, 5], [0, 2, 4]])
def test_embedding_rankers_pick_what_megatrons_do(theirs: dict[str, Any], stages: list[int]) -> None:
    for name in ("default_embedding_ranks", "default_position_embedding_ranks"):
        assert getattr(mpu, name)(list(stages)) == theirs[name](list(stages))


def test_before_initialisation_it_answers_as_megatron() -> None:
    assert not mpu.is_initialized() and not mpu.model_parallel_is_initialized()
    assert mpu.get_data_parallel_world_size() == mpu.get_context_parallel_rank() == 0
    assert mpu._TENSOR_MODEL_PARALLEL_GROUP is None and mpu.get_context_parallel_group(check_initialized=False) is None
    for asked in (mpu.get_tensor_model_parallel_group, mpu.get_tensor_model_parallel_rank, mpu.get_global_memory_buffer,
                  mpu.initialize_model_parallel, mpu.get_data_parallel_group):  # fmt: skip
        with pytest.raises(AssertionError):
            asked()
    try:
        mpu.set_tensor_model_parallel_rank(3)
        mpu.set_tensor_model_parallel_world_size(4)
        assert (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()) == (3, 4)
        assert mpu.get_expert_tensor_parallel_world_size() == 4
    finally:
        mpu.destroy_model_parallel()
    with pytest.raises(AttributeError):
        _ = mpu._NO_GROUP


def test_install_comes_before_the_import_of_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, theirs)
    with pytest.raises(AlreadyInitializedError, match="before the first import of Megatron"):
        mpu.install()
    assert sys.modules[NAME] is theirs
    monkeypatch.setitem(sys.modules, NAME, mpu)
    mpu.install()


def test_install_without_megatron_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="isn't installed"):
        mpu.install()
    assert NAME not in sys.modules
