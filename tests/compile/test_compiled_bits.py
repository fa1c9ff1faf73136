"""Compiled collectives return the bits of the uncompiled ones, for every operation and dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import digests
from tests.contract.test_digests import found_on
from tests.digests import PLACEMENTS, Placement
from tests.workers import WorkerPool

FEWEST = tuple({each.row: each for each in reversed(PLACEMENTS)}.values())
"""The placement with the fewest ranks, for each transport."""


@pytest.mark.parametrize("placement", FEWEST, ids=str)
def test_compiled_bits_are_the_stored_ones(
    placement: Placement, pools: Callable[[int], WorkerPool], request: pytest.FixtureRequest
) -> None:
    on_hosts = placement.row == "hierarchical"
    pool = request.getfixturevalue("on_hosts")(placement.hosts) if on_hosts else pools(len(placement.hosts))
    wrong = digests.differences(placement, found_on(placement, pool, compiled=True), compiled=True)
    assert not wrong, "\n".join([*wrong[:20], f"{len(wrong)} digests differ"])
