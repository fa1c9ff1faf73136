"""The ledger of registered memory places tensors by the sequence of calls alone."""

from __future__ import annotations

import random
from itertools import pairwise

from device_communicators.nccl.windows import MOST_BLOCKS, WINDOW_BYTES, Block, Ledger

MIB = 1 << 20


def _ledger(*windows: int) -> Ledger:
    ledger = Ledger()
    for size_bytes in windows:
        ledger.add_window(size_bytes)
    return ledger


def test_the_first_gap_that_is_large_enough_is_taken() -> None:
    ledger = _ledger(4096)
    assert [ledger.take(size) for size in (1000, 1, 512, 2000)] == [0, 1, 2, 3]
    assert ledger.blocks[3] == Block(0, 2048, 4096)
    assert ledger.take(1) is None
    for number in (0, 2):
        ledger.free(number)
    assert ledger.take(1025) is None, "two gaps, of which none is large enough"
    assert (ledger.take(512), ledger.blocks[0]) == (0, Block(0, 0, 512))
    ledger.add_window(2048)
    assert (ledger.take(1025), ledger.blocks[2]) == (2, Block(1, 0, 1536))


def test_blocks_never_overlap() -> None:
    chance = random.Random(1)
    ledger = _ledger(1 * MIB, 2 * MIB)
    alive: list[int] = []
    taken = 0
    for _ in range(2000):
        if alive and chance.random() < 0.45:
            ledger.free(alive.pop(chance.randrange(len(alive))))
            continue
        number = ledger.take(chance.choice((1, 513, 4096, 100_000, 700_000)))
        if number is not None:
            assert number not in alive
            alive.append(number)
            taken += 1
        blocks = sorted(ledger.blocks.values())
        for one, other in pairwise(blocks):
            assert one.window < other.window or one.end <= other.begin
        assert all(block.end <= ledger.sizes[block.window] and block.begin % 512 == 0 for block in blocks)
    assert taken > 500


def test_windows_go_by_the_limit() -> None:
    assert _ledger().next_window(1, 1 << 40) == WINDOW_BYTES
    assert _ledger().next_window(WINDOW_BYTES + 1, 1 << 40) == WINDOW_BYTES + 2 * MIB
    assert _ledger().next_window(1, 5 * MIB) == 4 * MIB, "what is left, in whole granules"
    assert _ledger(4 * MIB).next_window(1, 6 * MIB) == 2 * MIB
    assert _ledger(4 * MIB).next_window(3 * MIB, 6 * MIB) is None
    assert _ledger(6 * MIB).next_window(1, 6 * MIB) is None
    assert _ledger().next_window(1, 0) is None


def test_so_many_blocks_and_no_more() -> None:
    ledger = _ledger(MOST_BLOCKS * 512 + 4096)
    assert [ledger.take(1) for _ in range(MOST_BLOCKS)] == list(range(MOST_BLOCKS))
    assert ledger.take(1) is None
    assert ledger.next_window(1, 1 << 40) is None, "another window would not help"


def test_the_digest_shows_a_change_that_one_rank_missed() -> None:
    one, other = _ledger(4096), _ledger(4096)
    assert one.take(1) == other.take(1) == 0
    assert one.digest == other.digest != 0
    one.take(1)
    one.free(1)
    assert one.blocks == other.blocks
    assert one.digest != other.digest
