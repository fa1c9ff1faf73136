from __future__ import annotations

import pytest

from tests.internals.queue_model import Model, Variant, Violation

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("variant", "readers", "chunks"),
    [
        (Variant(), 1, 5),
        (Variant(), 2, 2),
        pytest.param(Variant(), 2, 3, marks=pytest.mark.long),  # 270,000 states, 30 s
        (Variant(slots=1, believed_slots=1), 2, 2),
        (Variant(barriers=False), 1, 5),
        (Variant(barriers=False), 2, 1),
    ],
)
def test_it_holds(variant: Variant, readers: int, chunks: int) -> None:
    states = Model(variant, readers, chunks).explore()
    assert states > 1000, "the exploration ended early"


@pytest.mark.parametrize(
    ("variant", "match"),
    [
        (Variant(writer_releases=False), "reads chunk 1 while it is written"),
        (Variant(reader_acquires=False), "reads chunk 1 while it is written"),
        (Variant(reader_releases=False), "chunk 3 is written while reader . reads"),
        (Variant(writer_acquires=False), "chunk 3 is written while reader . reads"),
        (Variant(believed_slots=3), "chunk 3 is written"),
        (Variant(awaits_all=False), "chunk 3 is written"),
        (Variant(sleeper_orders=False), "nobody moves"),
        (Variant(publisher_orders=False), "nobody moves"),
        (Variant(barriers=False, sleeper_orders=False), "nobody moves"),
        (Variant(barriers=False, publisher_orders=False), "nobody moves"),
        (Variant(rechecks=False), "nobody moves"),
        (Variant(wakes_all=False), "nobody moves"),
    ],
)
def test_it_does_not_hold_without(variant: Variant, match: str) -> None:
    with pytest.raises(Violation, match=match):
        for readers, chunks in ((1, 3), (2, 1), (2, 3)):
            Model(variant, readers, chunks).explore()
