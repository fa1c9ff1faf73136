from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests import digests
from tests.contract.carriers import Member, _run_on_rank
from tests.digests import PLACEMENTS, Placement
from tests.hosts import HostRanks
from tests.workers import WorkerPool

DEADLINE_S = 300.0


def _body(member: Member, compiled: bool) -> dict[str, list[str]]:
    member.cases += 1
    return digests.digests_of_compiled(member.group, member.row) if compiled else digests.digests_of_rank(member.group)


def found_on(placement: Placement, ranks: WorkerPool, compiled: bool = False) -> dict[str, str]:
    answers = ranks.run(_run_on_rank, placement.row, _body, (compiled,), tp=len(placement.hosts), timeout_s=DEADLINE_S)
    for refused, _, _ in answers:
        assert refused is None, f"{placement} is unavailable: {refused}"
    return digests.combined([answer for _, _, answer in answers])


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_bits_are_the_stored_ones(
    placement: Placement,
    pools: Callable[[int], WorkerPool],
    request: pytest.FixtureRequest,
) -> None:
    on_hosts: Callable[[Sequence[int]], HostRanks]
    if placement.row == "hierarchical":
        on_hosts = request.getfixturevalue("on_hosts")
        found = found_on(placement, on_hosts(placement.hosts))
    else:
        found = found_on(placement, pools(len(placement.hosts)))
    wrong = digests.differences(placement, found)
    assert not wrong, "\n".join(
        [*wrong[:20], f"{len(wrong)} digests differ; if meant: python -m tests.digests --reason …"]
    )


def test_a_flipped_bit_and_a_lost_case_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = PLACEMENTS[0]
    found = dict(digests.stored()[str(placement)])
    assert digests.differences(placement, found) == []
    case = "all_reduce sum float32"
    first = found[case]
    found[case] = f"{int(first[:8], 16) ^ 1:08x}{first[8:]}"
    assert [case in line for line in digests.differences(placement, found)] == [True]
    del found[case]
    assert "not run" in digests.differences(placement, found)[0]


def test_an_update_lists_and_moves_the_changed_digests() -> None:
    held = {"first": {"a 0-0": {"x": "01", "y": "02", "z": "03"}}, "second": {"b 0-1": {"x": "04"}}}
    assert digests.updated(held, digests.merged(held), "third") == (held, [])
    found = {"a 0-0": {"x": "01", "y": "12", "w": "05"}, "b 0-1": {"x": "14"}}
    new, changes = digests.updated(held, found, "third")
    assert (new["first"], new["second"]) == ({"a 0-0": {"x": "01"}}, {"b 0-1": {}})
    assert new["third"] == {"a 0-0": {"y": "12", "w": "05"}, "b 0-1": {"x": "14"}}
    assert changes == ["a 0-0, y: 02 -> 12", "a 0-0, z: 03 -> removed", "a 0-0, w: new -> 05", "b 0-1, x: 04 -> 14"]
