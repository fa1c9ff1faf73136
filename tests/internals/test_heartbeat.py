"""A host's beats as another host reads them, after this one was paused; see tests/failure/test_held_and_stopped.py."""

from __future__ import annotations

import time

from device_communicators.liveness.health import Watcher
from device_communicators.liveness.heartbeat import Heartbeats
from tests.failure.conftest import nothing_left  # noqa: F401 - for each test


class FrozenStore:
    """A store in which the other host's beat stands still."""

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return False


def test_row_60_a_pause_gives_the_others_a_full_interval() -> None:
    """Also where a host was silent for nearly the limit before: after the pause its beat is read first."""
    interval_s = 0.2
    watcher = Watcher()
    beats = Heartbeats(FrozenStore(), [[0], [1]], 0, watcher, interval_s=interval_s, limit_s=1.0)
    now = time.monotonic()
    other = beats._hosts[1]
    other.seen, beats._reached, beats._looked = now - 5.9, now - 5.0, now - 5.0  # 0.9 s of silence, then 5 s paused
    other.seen -= 0.2  # as if the pause had been measured a little short
    resumed = time.monotonic()
    beats._threads[1].start()
    try:
        deaths = watcher.await_death_of([1], interval_s * 0.75)
        assert not deaths or time.monotonic() - resumed >= interval_s, deaths
        assert [death.rank for death in watcher.await_death_of([1], 5.0)] == [1]
        assert watcher.deaths_of([1])[0].at_s - resumed >= interval_s
    finally:
        beats._stop.set()
        beats._threads[1].join(5.0)
