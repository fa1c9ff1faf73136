"""Settings with the value `auto` need thresholds that were measured under exactly the same conditions."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from device_communicators import GroupContext, catalog
from device_communicators.base import settings
from device_communicators.base.member import Timeout
from device_communicators.machine.group_topology import GroupTopology, RankGpu, Vote
from device_communicators.peer import thresholds as peer_thresholds
from device_communicators.peer.thresholds import Conditions, Thresholds, conditions_of, covering, link_of

VERSIONS = {"driver": "580.1", "nccl": "2.28.9", "torch": "2.11.0"}
HERE = Conditions("9.0", 8, True, "NV18", **VERSIONS)
BOUNDS = ("push", "pull", "two_shot", "all_gather", "all_gather_push", "reduce_scatter", "reduce_scatter_push", "fused")
ROW = Thresholds(
    "9.0", 8, **dict.fromkeys(BOUNDS, 1024), source="a test",
    one_gpu_each=True, link="NV18", proven_calls=100_000, own_nccl=True, **VERSIONS,
)  # fmt: skip
CONTEXT = GroupContext("tp:0", tuple(range(8)), 0, torch.device("cuda", 0), Timeout(5.0))


def topology(links: Any = 18, mesh: bool = True, shared: tuple[tuple[int, ...], ...] = (), size: int = 8) -> Any:
    gpu, vote = RankGpu(None, None), Vote(mesh, "says the test")
    return GroupTopology((gpu,) * size, shared, links, vote, vote)


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(settings.PEER_MEMORY_TABLE.name, raising=False)
    peer_thresholds.warn_once.cache_clear()
    (tmp_path / "parallel_state").mkdir()
    return peer_thresholds.user_path()


def test_the_same_conditions_are_covered() -> None:
    assert covering([ROW], HERE) is ROW


@pytest.mark.parametrize(
    "other",
    [
        {"arch": "10.0"}, {"world_size": 4}, {"one_gpu_each": False}, {"link": "NV12"}, {"link": "PCIe"},
        {"driver": "580.2"}, {"nccl": "2.29.0"}, {"torch": "2.12.0"},
    ],
    ids=str,
)  # fmt: skip
def test_any_other_condition_is_not(other: dict[str, Any]) -> None:
    assert covering([ROW], dataclasses.replace(HERE, **other)) is None
    assert covering([dataclasses.replace(ROW, **other)], HERE) is None


def test_an_unproven_row_never_counts() -> None:
    assert covering([dataclasses.replace(ROW, proven_calls=0)], HERE) is None


def test_a_row_of_shared_gpus_is_evidence_and_never_used_by_auto(user: Path) -> None:
    shared = dataclasses.replace(ROW, one_gpu_each=False, link="none")
    assert covering([shared], dataclasses.replace(HERE, one_gpu_each=False, link="none")) is None
    peer_thresholds.dump([shared], user, "a test")
    assert peer_thresholds.load().rows == ()


def test_kinds_of_links() -> None:
    assert link_of(topology(18)) == "NV18"
    assert link_of(topology(12)) == "NV12"
    assert link_of(topology(None)) == "NV?"
    assert link_of(topology(0, mesh=False)) == "PCIe"
    assert link_of(topology(shared=(tuple(range(8)),))) == "none"
    assert conditions_of("9.0", topology(18), VERSIONS) == HERE
    assert not conditions_of("9.0", topology(18, shared=((0, 1),)), VERSIONS).one_gpu_each


def test_the_users_rows_are_found_and_a_named_table_goes_in_their_place(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = peer_thresholds.load()
    assert before.rows == ()
    peer_thresholds.dump([ROW], user, "a test")
    own = peer_thresholds.load()
    assert own.rows == (ROW,)
    assert own.digest != before.digest, "ranks with and without it would choose differently"
    named = tmp_path / "named.json"
    peer_thresholds.dump([dataclasses.replace(ROW, push=1)], named, "a test")
    monkeypatch.setenv(settings.PEER_MEMORY_TABLE.name, str(named))
    assert [row.push for row in peer_thresholds.load().rows] == [1]


@pytest.mark.parametrize("setting", [settings.NCCL, settings.PEER_MEMORY], ids=lambda setting: setting.name)
def test_auto_on_and_off(setting: settings.Setting[str]) -> None:
    assert setting.get({}) == "auto"
    told = {"auto": "auto", "AUTO": "auto", "on": "on", "1": "on", "true": "on", "off": "off", "0": "off"}
    for text, value in told.items():
        assert setting.get({setting.name: text}) == value


def test_without_a_row_the_driver_is_asked_nothing_and_one_line_says_what_measuring_gives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_thresholds, "arch_of", lambda device: pytest.fail("asked"))
    monkeypatch.setattr(peer_thresholds, "versions", lambda: pytest.fail("asked"))
    for name in (settings.PEER_MEMORY.name, settings.NCCL.name):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING, logger="parallel_state"):
        for _ in range(3):
            reason = catalog._no_peer_memory(CONTEXT)
            assert reason is not None and "python -m parallel_state tune" in reason
            assert catalog._no_nccl(CONTEXT) is not None
    assert len(caplog.records) == 1
    assert "PARALLEL_STATE_PEER_MEMORY=off disables this warning" in caplog.text


@pytest.mark.parametrize(
    ("changes", "is_covered"),
    [({}, True), ({"torch": "2.12.0"}, False), ({"world_size": 4}, False), ({"arch": "8.0"}, False)],
    ids=str,
)
def test_what_a_rank_knows_alone(
    user: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_covered: bool
) -> None:
    peer_thresholds.dump([dataclasses.replace(ROW, **changes)], user, "a test")
    monkeypatch.setattr(peer_thresholds, "arch_of", lambda device: "9.0")
    monkeypatch.setattr(peer_thresholds, "versions", lambda: VERSIONS)
    assert (peer_thresholds.local_refusal(CONTEXT, "X") is None) == is_covered


def test_a_broken_file_is_a_reason_and_no_error_on_one_rank(user: Path) -> None:
    user.write_text("{}", encoding="utf-8")
    assert "remove the file" in str(peer_thresholds.local_refusal(CONTEXT, "X"))


@pytest.mark.parametrize(
    ("found", "others", "expected"),
    [
        (topology(18), {}, ROW),
        (topology(12), {}, "no measured row covers 8 ranks with a GPU for each of architecture 9.0 over NV12"),
        (topology(18, shared=((0, 1),)), {}, "with shared GPUs"),
        (topology(18), {"torch": "2.13.0"}, "torch is 2.11.0 on rank 0, but 2.13.0 on rank 1"),
        (topology(18), {"table": "another"}, "on rank 0, but another on rank 1"),
    ],
)
def test_what_the_ranks_agree_on(
    user: Path, monkeypatch: pytest.MonkeyPatch, found: Any, others: dict[str, str], expected: Any
) -> None:
    peer_thresholds.dump([ROW], user, "a test")
    monkeypatch.setattr(peer_thresholds, "arch_of", lambda device: "9.0")
    monkeypatch.setattr(peer_thresholds, "versions", lambda: VERSIONS)
    monkeypatch.setattr(peer_thresholds, "uuid_of", lambda device: "GPU-1")
    monkeypatch.setattr(peer_thresholds, "exchange_facts", lambda context, mine, what: [mine, {**mine, **others}])
    monkeypatch.setattr(peer_thresholds, "agree_on_topology", lambda *given, **options: found)
    row = peer_thresholds.agreed_row(CONTEXT, "X")
    if isinstance(expected, str):
        assert isinstance(row, str) and expected in row
    else:
        assert row == expected


def test_own_nccl_is_on_where_it_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.NCCL.name, raising=False)
    for faster in (True, False):
        row = dataclasses.replace(ROW, own_nccl=faster)
        monkeypatch.setattr(peer_thresholds, "agreed_row", lambda context, setting, row=row: row)
        assert (catalog._unmeasured_nccl(CONTEXT) is None) == faster
    monkeypatch.setenv(settings.NCCL.name, "on")
    monkeypatch.setattr(peer_thresholds, "agreed_row", lambda context, setting: pytest.fail("asked"))
    assert catalog._unmeasured_nccl(CONTEXT) is None
