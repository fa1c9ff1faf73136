"""Fixtures of the contract tests: every row of the catalog that CPU processes can have, in groups of every size."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from device_communicators import Row
from tests.contract.carriers import PLACEMENTS, ROWS, SIZES, Carrier, Size


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


@pytest.fixture(params=SIZES, ids=str)
def size(request: pytest.FixtureRequest) -> Size:
    return request.param


@pytest.fixture(autouse=True)
def _without_beta_warnings() -> Iterator[None]:
    """complex32 is "experimental", says torch; that it travels is all that we want of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        yield


@pytest.fixture
def carrier(row: Row, size: Size, request: pytest.FixtureRequest) -> Carrier:
    """Groups of `size` that `row` carries; a test that takes it runs for every row and size."""
    return _carrier(row, size, request)


@pytest.fixture
def group_carrier(row: Row, request: pytest.FixtureRequest) -> Carrier:
    """As `carrier`, for one size only: two ranks of four, so that half of the global ranks are none of the group."""
    return _carrier(row, Size(4, 2), request)


def _carrier(row: Row, size: Size, request: pytest.FixtureRequest) -> Carrier:
    if not row.several_hosts:
        return Carrier(row, size, request.getfixturevalue("pools"))
    if size not in PLACEMENTS:
        pytest.skip(f"{row.name} is tested in groups of {', '.join(map(str, PLACEMENTS))}")
    on_hosts = request.getfixturevalue("on_hosts")
    return Carrier(row, size, lambda processes: on_hosts(PLACEMENTS[size]))
