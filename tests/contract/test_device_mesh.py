from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import parallel_state as ps
from parallel_state import simulate
from tests.contract.attempts import attempt, whose, world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 60.0
SOON_S = 10.0
DENSE = ("pp", "dp_replicate", "dp_shard", "tp")


def _sum_by_torch(process_group: Any) -> float:
    x = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(x, group=process_group)
    return x.item()


def _sum_of(ranks: list[int]) -> float:
    return sum(2.0**rank for rank in ranks)


def _out(layouts: list[dict[str, int]]) -> list[dict[str, Any]]:
    facts = []
    with world():
        for sizes in layouts:
            ps.initialize_model_parallel(**sizes)
            groups, mesh = ps.get_parallel_groups(), ps.get_device_mesh(*DENSE)
            reference = init_device_mesh("cpu", tuple(sizes[name] for name in DENSE), mesh_dim_names=DENSE)
            facts.append({
                "ranks": torch.equal(mesh.mesh, reference.mesh),
                "coordinates": tuple(mesh.get_coordinate() or ()) == tuple(reference.get_coordinate() or ()),
                "names": mesh.mesh_dim_names == DENSE,
                "device": mesh.device_type,
                "groups": [mesh.get_group(name) is groups.get(name).device_group for name in DENSE],
                "same rows": [
                    dist.get_process_group_ranks(mesh.get_group(name))
                    == dist.get_process_group_ranks(reference.get_group(name))
                    for name in DENSE
                ],
                "local ranks": [mesh.get_local_rank(name) == groups.get(name).rank_in_group for name in DENSE],
                "again": ps.get_device_mesh(*DENSE) is mesh,
            })  # fmt: skip
            ps.destroy_model_parallel()
    return facts


def test_ranks_are_those_of_init_device_mesh(pools: Pools) -> None:
    layouts = [
        dict(zip(DENSE, shape, strict=True)) for shape in ((2, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 1), (1, 1, 1, 8))
    ]
    for rank, found in enumerate(pools(8).run(_out, layouts, timeout_s=DEADLINE_S)):
        for sizes, facts in zip(layouts, found, strict=True):
            assert facts == {
                "ranks": True,
                "coordinates": True,
                "names": True,
                "device": "cpu",
                "groups": [True] * 4,
                "same rows": [True] * 4,
                "local ranks": [True] * 4,
                "again": True,
            }, (rank, sizes)


def _slices() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with world(2, data_parallel_shard_size=2):
        mesh, tp = ps.get_device_mesh(*DENSE[1:]), ps.get_tp_group().device_group
        flat = mesh["dp_replicate", "dp_shard"]._flatten("dp")
        facts["slice"] = mesh["dp_shard", "tp"].mesh.tolist()
        facts["its group"] = mesh["tp"].get_group() is mesh["dp_shard", "tp"].get_group("tp") is tp
        facts["flat"] = (flat.mesh.tolist(), _sum_by_torch(flat.get_group()))
        facts["ours"] = ps.get_device_mesh("dp").get_group() is ps.get_dp_group().device_group
        facts["of torch, in another order"] = attempt(lambda: mesh["tp", "dp_shard"]).kind
        other = ps.get_device_mesh("tp", "dp_shard")
        facts["of ours, in another order"] = (other.mesh.tolist(), other.get_group("tp") is tp)
        roots = [ps.get_device_mesh(name)._get_root_mesh() for name in DENSE[1:]]
        facts["one root"] = all(root is ps.get_device_mesh() for root in roots)
    return facts


def test_slices_and_flattened_dims(pools: Pools) -> None:
    for rank, facts in enumerate(pools(8).run(_slices, timeout_s=DEADLINE_S)):
        first, odd = rank // 4 * 4, rank % 2
        data = [odd, odd + 2, odd + 4, odd + 6]
        assert facts == {
            "slice": [[first, first + 1], [first + 2, first + 3]],
            "its group": True,
            "flat": (data, _sum_of(data)),
            "ours": True,
            "of torch, in another order": "KeyError",
            "of ours, in another order": ([[first, first + 2], [first + 1, first + 3]], True),
            "one root": True,
        }


DEFAULTS: list[tuple[dict[str, int], tuple[str, ...]]] = [
    ({}, ("dp_shard",)),
    ({"tp": 8}, ("dp_shard", "tp")),
    ({"pp": 8}, ("pp",)),
    ({"pp": 2, "tp": 2, "dp_shard": 1, "dp_replicate": 2}, ("pp", "dp_replicate", "dp_shard", "tp")),
    ({"dp_replicate": 8}, ("dp_replicate",)),
    ({"dp_replicate": 4, "cp": 2, "dp_shard": 1}, ("dp_replicate", "cp")),
    ({"dp_replicate": 4, "cp": 2, "dp_shard": 1, "ep": 2}, ("dp_replicate", "dp_shard", "cp")),
]


def _defaults() -> list[tuple[Any, ...]]:
    found = []
    with world():
        for sizes, _ in DEFAULTS:
            ps.initialize_model_parallel(**sizes)
            mesh = ps.get_device_mesh()
            found.append(
                (mesh.mesh_dim_names, mesh.size(), mesh.mesh.flatten().tolist(), mesh._get_root_mesh() is mesh)
            )
            ps.destroy_model_parallel()
    return found


def test_dims_that_nobody_named(pools: Pools) -> None:
    expected = [(names, 8, list(range(8)), True) for _, names in DEFAULTS]
    assert pools(8).run(_defaults, timeout_s=DEADLINE_S) == [expected] * 8


def _one_rank() -> tuple[Any, ...]:
    with world(1):
        flat, named = ps.get_device_mesh(), ps.get_device_mesh("dp_shard", "tp")
        same = flat.get_group() is ps.get_world_group().device_group
        return flat.mesh_dim_names, flat.mesh.tolist(), same, named.mesh_dim_names, named.mesh.tolist()


def test_one_rank_has_a_flat_mesh(pools: Pools) -> None:
    assert pools(1).run(_one_rank, timeout_s=DEADLINE_S) == [(("world",), [0], True, ("dp_shard", "tp"), [[0]])]


DERIVED: list[tuple[dict[str, Any], tuple[str, ...], tuple[int, ...]]] = [
    ({"pp": 2, "tp": 2}, ("pp", "dp", "tp"), (2, 2, 2)),
    ({"tp": 2, "dp_replicate": 2}, ("pp", "dp", "tp"), (1, 4, 2)),
    ({"dp_replicate": 2, "cp": 2, "tp": 2}, ("dp_replicate", "fsdp", "tp"), (2, 2, 2)),
    ({"pp": 2, "tp": 2}, ("replica",), (8,)),
    ({"tp": 2, "dp_replicate": 2, "ep": 2, "etp": 1}, ("pp", "dp_replicate", "efsdp", "ep", "etp"), (1, 2, 2, 2, 1)),
    ({"tp": 2, "pp": 2, "ep": 2, "etp": 2}, ("pp", "dp_replicate", "efsdp", "ep", "etp"), (2, 1, 1, 2, 2)),
    ({"tp": 4, "ep": 4, "order": "torchtitan"}, ("pp", "dp_replicate", "efsdp", "ep", "etp"), (1, 1, 2, 4, 1)),
]


def _derived() -> list[tuple[Any, ...]]:
    found = []
    with world():
        for sizes, names, _ in DERIVED:
            ps.initialize_model_parallel(**sizes)
            mesh, groups = ps.get_device_mesh(*names), ps.get_parallel_groups()
            ours = [mesh.get_group(name) is groups.get(name).device_group for name in names]
            rows = [_sum_by_torch(mesh.get_group(name)) for name in names]
            found.append((mesh.mesh.tolist(), ours, rows))
            ps.destroy_model_parallel()
    return found


def test_dims_made_of_axes_and_experts(pools: Pools) -> None:
    for rank, found in enumerate(pools(8).run(_derived, timeout_s=DEADLINE_S)):
        for (_, names, shape), (ranks, ours, rows) in zip(DERIVED, found, strict=True):
            expected = torch.arange(8).view(shape)
            assert ranks == expected.tolist(), (rank, names)
            assert ours == [True] * len(names)
            here = (expected == rank).nonzero()[0].tolist()
            for dim, total in enumerate(rows):
                index = tuple(slice(None) if each == dim else at for each, at in enumerate(here))
                assert total == _sum_of(expected[index].tolist()), (rank, names[dim])


def _permuted() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with world(2, context_parallel_size=2):
        around = ps.get_device_mesh("tp_dp")
        facts["around cp"] = (around.mesh.tolist(), _sum_by_torch(around.get_group()))
    with world(2, 2, order="pp-dp-tp") as everyone:
        mesh = ps.get_device_mesh("pp", "dp", "tp")
        facts["by name"] = mesh.mesh.tolist()
        facts["usual"] = (ps.get_device_mesh().mesh_dim_names, ps.get_device_mesh().mesh.flatten().tolist())
        facts["pp"] = (dist.get_process_group_ranks(mesh.get_group("pp")), mesh.get_local_rank("pp"))
        half = everyone.make_sub_group([4, 5, 6, 7])
        if half is not None:
            groups = ps.create_parallel_groups(half, {"tp": 2})
            with groups.use():
                part = ps.get_device_mesh("dp", "tp")
                facts["part"] = (part.mesh.tolist(), part.get_group("tp") is groups.tp.device_group)
                facts["sum"] = _sum_by_torch(part.get_group("dp"))
            groups.close()
    return facts


def test_another_order_and_a_part_of_the_world(pools: Pools) -> None:
    for rank, facts in enumerate(pools(8).run(_permuted, timeout_s=DEADLINE_S)):
        around = [each + rank // 2 % 2 * 2 for each in (0, 1, 4, 5)]
        assert facts["around cp"] == (around, _sum_of(around))
        assert facts["by name"] == [[[p + 2 * d + 4 * t for t in (0, 1)] for d in (0, 1)] for p in (0, 1)]
        assert facts["usual"] == (("tp", "dp_shard", "pp"), list(range(8)))
        assert facts["pp"] == ([rank // 2 * 2, rank // 2 * 2 + 1], rank % 2)
        assert facts.get("part") == (([[4, 5], [6, 7]], True) if rank > 3 else None)
        assert facts.get("sum") == (_sum_of([4 + rank % 2, 6 + rank % 2]) if rank > 3 else None)


def _refused_out() -> dict[str, Any]:
    names = {
        "overlap": ("dp", "dp_shard"),
        "twice": ("tp", "tp"),
        "unknown": ("dp", "tensor"),
        "two numberings": ("ep", "tp"),
        "ends": ("embedding",),
        "no str": (["dp", "tp"],),
        "half of an axis": ("dp", "dcp"),
    }
    with world(4, decode_context_model_parallel_size=2):
        facts: dict[str, Any] = {name: attempt(ps.get_device_mesh, *dims) for name, dims in names.items()}  # type: ignore[arg-type]
        mesh, groups = ps.get_device_mesh("dp", "tp"), ps.get_parallel_groups()
        facts["then"] = _sum_by_torch(mesh.get_group("tp"))
        ps.destroy_model_parallel()
        facts["destroyed"] = attempt(ps.get_device_mesh)
        facts["mesh of before"] = attempt(mesh.get_group, "tp")
        with groups.use():
            facts["groups of before"] = attempt(ps.get_device_mesh, "tp")
    return facts


def test_meshes_that_cannot_be(pools: Pools) -> None:
    for rank, facts in enumerate(pools(8).run(_refused_out, timeout_s=DEADLINE_S)):
        assert facts.pop("then") == _sum_of([0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7])
        expected = {
            "overlap": ("LayoutError", "dp_shard in common"),
            "twice": ("LayoutError", "must be different"),
            "unknown": ("LayoutError", "there is no group 'tensor' in this layout; its groups are tp, "),
            "two numberings": ("LayoutError", "dense layers and expert layers have axes of their own"),
            "ends": ("LayoutError", "no group 'embedding' in this layout"),
            "no str": ("InvalidArgumentError", "as names, one argument each"),
            "half of an axis": ("LayoutError", "the rest of 'tp' is no group"),
            "destroyed": ("GroupNotInitializedError", "initialize_model_parallel() first"),
            "mesh of before": ("RuntimeError", "Could not resolve the process group"),
            "groups of before": ("GroupDestroyedError", "was destroyed"),
        }
        assert {name: outcome.kind for name, outcome in facts.items()} == {n: kind for n, (kind, _) in expected.items()}
        for name, (_, part) in expected.items():
            assert part in facts[name].text, (rank, facts[name])


def test_a_simulated_world_has_no_mesh() -> None:
    with simulate(0, 8, 2).use(), pytest.raises(ps.GroupNotInitializedError, match="no DeviceMesh"):
        ps.get_device_mesh("tp")


def _patched() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with world(4) as everyone:
        rank, own = ps.get_rank(), ps.get_tp_group().device_group
        pairs = ps.init_model_parallel_group([[0, 1], [2, 3]], rank, "gloo")
        twin = ps.create_parallel_groups(everyone, {"tp": 4}, timeout=30).tp
        with ps.patch_tensor_parallel_group(pairs):
            facts["other ranks"] = attempt(ps.get_device_mesh, "tp")
        with ps.patch_tensor_parallel_group(twin):
            facts["same ranks"] = ps.get_device_mesh("tp").get_group() is twin.device_group is not own
        facts["after"] = ps.get_device_mesh("tp").get_group() is own
    return facts


def test_a_patched_tp_group_is_in_no_mesh_of_later(pools: Pools) -> None:
    for facts in pools(4).run(_patched, timeout_s=DEADLINE_S):
        refused = facts.pop("other ranks")
        assert refused.kind == "LayoutError"
        assert "make the mesh outside `with patch_tensor_parallel_group" in refused.text
        assert facts == {"same ranks": True, "after": True}


GIVEN: list[tuple[tuple[int, ...], tuple[str, ...], dict[str, int], str]] = [
    ((2, 2, 2), ("pp", "dp", "tp"), {}, "tp=2 × dp=2 × pp=2"),
    ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), {}, "tp=2 × dp_shard=2 × dp_replicate=2"),
    ((2, 2, 2), ("tp", "pp", "dp"), {}, "dp=2 × pp=2 × tp=2"),
    ((2, 4), ("pp", "dp_shard"), {}, "dp=4 × pp=2"),
    ((1, 2, 1, 4), DENSE, {}, "tp=4 × dp_replicate=2"),
    ((2, 2, 2), ("pp", "cp", "tp"), {}, "tp=2 × cp=2 × pp=2"),
    ((8,), ("tp",), {}, "tp=8"),
    ((4, 2), ("dp", "tp"), {"decode_context_model_parallel_size": 2}, "tp=2 × dp=4, dcp=2 in tp"),
    ((4, 2), ("dp", "tp"), {"ep": 8, "etp": 1}, "tp=2 × dp=4; experts etp=1 × ep=8 × efsdp=1"),
    (
        (2, 2, 2),
        ("dp_replicate", "dp_shard", "tp"),
        {"ep": 2},
        "tp=2 × dp_shard=2 × dp_replicate=2; experts etp=2 × ep=2 × efsdp=1 × dp_replicate=2",
    ),
]


def _in() -> list[dict[str, Any]]:
    found = []
    with world():
        for shape, names, sizes, _ in GIVEN:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            facts: dict[str, Any] = {}
            for round_ in ("first", "again"):
                ps.initialize_model_parallel(device_mesh=mesh, **sizes)
                groups, wide = ps.get_parallel_groups(), [n for n, s in zip(names, shape, strict=True) if s > 1]
                facts[round_] = (
                    [groups.get(name).device_group is mesh.get_group(name) for name in wide],
                    [groups.get(name).ranks == dist.get_process_group_ranks(mesh.get_group(name)) for name in names],
                    [whose(groups.get(name)) == groups.get(name).ranks for name in names],
                    ps.get_device_mesh(*names) == mesh,
                )
                facts["layout"] = groups.layout.title
                ps.destroy_model_parallel()
                facts[f"alive after {round_}"] = [_sum_by_torch(mesh.get_group(name)) for name in names]
            facts["ranks"] = [dist.get_process_group_ranks(mesh.get_group(name)) for name in names]
            found.append(facts)
        ps.initialize_model_parallel(2, 2)
        found.append({"by sizes": ps.get_tp_group().device_group is not mesh.get_group("tp")})
        ps.destroy_model_parallel()
    return found


def test_groups_of_a_given_mesh(pools: Pools) -> None:
    for rank, found in enumerate(pools(8).run(_in, timeout_s=DEADLINE_S)):
        assert found.pop() == {"by sizes": True}
        for (shape, names, _, title), facts in zip(GIVEN, found, strict=True):
            wide, all_ = [True] * sum(size > 1 for size in shape), [True] * len(shape)
            assert facts["first"] == facts["again"] == (wide, all_, all_, True), (rank, names)
            assert facts["layout"] == title
            sums = [_sum_of(ranks) for ranks in facts["ranks"]]
            assert facts["alive after first"] == facts["alive after again"] == sums


def _taken(mesh: Any, **sizes: Any) -> Any:
    outcome = attempt(ps.initialize_model_parallel, device_mesh=mesh, **sizes)
    ps.destroy_model_parallel()
    return outcome


def _swapped() -> dict[str, Any]:
    with world():
        rank = ps.get_rank()
        good = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        groups = [good.get_group(name) for name in ("pp", "tp", "dp")]
        mesh = DeviceMesh.from_group(groups, "cpu", good.mesh, mesh_dim_names=("pp", "dp", "tp"))
        says, has = mesh["dp"].mesh.tolist(), dist.get_process_group_ranks(mesh.get_group("dp"))
        return {
            "torch takes it": says != has,
            "on all": _taken(mesh),
            "on one": _taken(mesh if rank == 3 else good),
            "then": _taken(good).kind,
        }


def test_a_mesh_whose_groups_are_not_its_rows(pools: Pools) -> None:
    """torch accepts any groups for a mesh, and would reduce over the wrong ranks."""
    for rank, facts in enumerate(pools(8).run(_swapped, timeout_s=DEADLINE_S)):
        assert facts["torch takes it"]
        assert facts["on all"].kind == "LayoutError"
        assert f"rank {rank} the process group has" in facts["on all"].text
        assert "'dp'" in facts["on all"].text
        assert facts["on one"].kind == "ConfigMismatchError"
        assert "on rank 3" in facts["on one"].text
        assert max(facts["on all"].seconds, facts["on one"].seconds) < SOON_S
        assert facts["then"] == "ok"


def _refused_in() -> dict[str, Any]:
    def mesh(names: tuple[str, ...] | None, ranks: Any = None) -> DeviceMesh:
        return DeviceMesh("cpu", torch.arange(8).view(4, 2) if ranks is None else ranks, mesh_dim_names=names)

    with world():
        good = mesh(("dp", "tp"))
        same = [good.get_group("dp"), good.get_group("tp")]
        return {
            "part of the world": _taken(mesh(("dp", "tp"), [[0, 1], [2, 3]])),
            "slice": _taken(good["dp"]),
            "no names": _taken(mesh(None)),
            "unknown name": _taken(mesh(("dp", "tensor"))),
            "within another": _taken(mesh(("dp", "dcp"))),
            "expert axis": _taken(mesh(("efsdp", "ep"))),
            "name twice": _taken(DeviceMesh.from_group(same, "cpu", good.mesh, mesh_dim_names=("tp", "tp"))),
            "dp and its part": _taken(DeviceMesh.from_group(same, "cpu", good.mesh, mesh_dim_names=("dp", "dp_shard"))),
            "uneven": _taken(mesh(("dp", "tp"), [[0, 1], [2, 3], [4, 5], [7, 6]])),
            "rows out of order": _taken(mesh(("dp", "tp"), [[0, 1], [4, 5], [2, 3], [6, 7]])),
            "downwards": _taken(mesh(("dp", "tp"), [[1, 0], [3, 2], [5, 4], [7, 6]])),
            "no mesh": _taken("dp, tp"),
            "size again": _taken(good, tensor_model_parallel_size=4),
            "an explicit one": _taken(good, tensor_model_parallel_size=1),
            "order again": _taken(good, order="tp-dp-pp"),
            "default order again": _taken(good, order="tp-cp-ep-dp-pp"),
            "dp again": _taken(mesh(("dp_shard", "tp")), data_parallel_size=2),
            "too many": _taken(good, context_parallel_size=2),
            "dp of a mesh without": _taken(mesh(("pp", "tp")), data_parallel_size=2),
            "then": _taken(good),
        }


def test_meshes_that_are_no_layout(pools: Pools) -> None:
    expected = {
        "part of the world": ("LayoutError", "must contain each rank of the world"),
        "slice": ("LayoutError", "must contain each rank of the world"),
        "no names": ("LayoutError", "named after axes"),
        "unknown name": ("LayoutError", "named after axes, tp, cp, "),
        "within another": ("LayoutError", "named after axes"),
        "expert axis": ("LayoutError", "named after axes"),
        "name twice": ("LayoutError", "must be different axes"),
        "dp and its part": ("LayoutError", "'dp' includes dp_shard and dp_replicate"),
        "uneven": ("LayoutError", "increase by equal steps"),
        "rows out of order": ("LayoutError", "along 'dp' the steps are [-2, 4]"),
        "downwards": ("LayoutError", "along 'tp' the steps are [-1]"),
        "no mesh": ("InvalidArgumentError", "must be a torch DeviceMesh, but is a str"),
        "size again": ("InvalidArgumentError", "tp=2, but the arguments are tp=4"),
        "an explicit one": ("InvalidArgumentError", "tp=2, but the arguments are tp=1"),
        "order again": ("InvalidArgumentError", "so leave out order='tp-dp-pp'"),
        "default order again": ("InvalidArgumentError", "so leave out order='tp-cp-ep-dp-pp'"),
        "dp again": ("InvalidArgumentError", "dp=4, but the arguments are dp=2"),
        "too many": ("LayoutError", "not divisible by"),
        "dp of a mesh without": ("LayoutError", "not divisible by"),
        "then": ("ok", ""),
    }
    for rank, facts in enumerate(pools(8).run(_refused_in, timeout_s=DEADLINE_S)):
        assert {name: outcome.kind for name, outcome in facts.items()} == {n: kind for n, (kind, _) in expected.items()}
        for name, (_, part) in expected.items():
            assert part in facts[name].text, (rank, facts[name])
            assert facts[name].seconds < SOON_S


def _by_some(giver: int) -> dict[str, Any]:
    with world():
        rank = ps.get_rank()
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        facts = {
            "same layout": attempt(ps.initialize_model_parallel, 2, 2, device_mesh=None)
            if rank != giver
            else attempt(ps.initialize_model_parallel, device_mesh=mesh),
            "another layout": attempt(ps.initialize_model_parallel, 4)
            if rank != giver
            else attempt(ps.initialize_model_parallel, device_mesh=mesh),
        }
        facts["then"] = _taken(mesh)
    return facts


@pytest.mark.parametrize("giver", [0, 5])
def test_a_mesh_on_one_rank_only(pools: Pools, giver: int) -> None:
    for facts in pools(8).run(_by_some, giver, timeout_s=DEADLINE_S):
        for name in ("same layout", "another layout"):
            assert facts[name].kind == "ConfigMismatchError", facts[name]
            assert facts[name].seconds < SOON_S
        assert "adopted groups" in facts["same layout"].text
        assert facts["then"].kind == "ok"


def _sizes_that_the_mesh_confirms() -> list[str]:
    with world():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
        return [_taken(mesh, data_parallel_size=size).kind for size in (2, -1, 1, 4)] + [_taken(mesh, tp=2).kind]


def test_a_size_beside_a_mesh_must_be_the_meshs(pools: Pools) -> None:
    for kinds in pools(8).run(_sizes_that_the_mesh_confirms, timeout_s=DEADLINE_S):
        assert kinds == ["ok", "ok", "InvalidArgumentError", "InvalidArgumentError", "ok"]
