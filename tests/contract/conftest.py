from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from device_communicators import Row
from tests.contract.carriers import CASES, PLACEMENTS, ROWS, Carrier, Size


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


@pytest.fixture(autouse=True)
def _without_beta_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        yield


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
def carrier(request: pytest.FixtureRequest) -> Carrier:
    """Has the scope `module`, so that pytest runs all tests of a case together: each change of case makes groups."""
    return _carrier(*request.param, request)


@pytest.fixture(scope="module", params=[case for case in CASES if case[1] == Size(4, 2)], ids=lambda case: case[0].name)
def group_carrier(request: pytest.FixtureRequest) -> Carrier:
    return _carrier(*request.param, request)


def _carrier(row: Row, size: Size, request: pytest.FixtureRequest) -> Carrier:
    if not row.several_hosts:
        return Carrier(row, size, request.getfixturevalue("pools"))
    on_hosts = request.getfixturevalue("on_hosts")
    return Carrier(row, size, lambda processes: on_hosts(PLACEMENTS[size]))
