from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from device_communicators.liveness.health import Watcher
from device_communicators.routing.status import Status


class Peers:
    def __init__(self) -> None:
        self.watchers: dict[int, Watcher] = {}
        self.holding: set[int] = set()
        self.stopped: set[int] = set()
        self.hosts: dict[int, int] = {}

    def join(self, rank: int, host: int = 0) -> Watcher:
        made = self.watchers[rank] = Watcher()
        self.hosts[rank] = host
        made.ask = partial(self._ask, rank)  # type: ignore[method-assign]
        made.neighbours_of = self._neighbours_of  # type: ignore[method-assign]
        made.conditions = partial(self._conditions, rank)  # type: ignore[method-assign]
        made.status = Status(made, rank)
        return made

    def leave(self, rank: int) -> None:
        del self.watchers[rank]

    def _neighbours_of(self, rank: int) -> list[int]:
        return [each for each, host in self.hosts.items() if host == self.hosts[rank] and each != rank]

    def _conditions(self, rank: int, ranks: Sequence[int]) -> dict[int, str]:
        seen = self.stopped & set(ranks) & set(self._neighbours_of(rank))
        return dict.fromkeys(seen, f"stopped, as rank {rank} sees")

    def _ask(
        self,
        rank: int,
        ranks: Sequence[int],
        topic: str,
        payload: bytes,
        timeout_s: float,
    ) -> dict[int, bytes | None]:
        asked = [each for each in ranks if each in self.watchers and each not in self.stopped]
        return {
            each: None if each in self.holding else self.watchers[each].answers[topic](rank, payload) for each in asked
        }
