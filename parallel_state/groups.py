"""Lists of ranks to torch process groups: each distinct one made once, shared, and destroyed with its last user.

Every rank of the world makes the same groups in the same order, also those that it isn't in: c10d names groups by
counting. Which lists there are is the layout's business; what is done with a group is the coordinator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from device_communicators.errors import InvalidArgumentError
from parallel_state.layout import position_in

_Key = tuple[tuple[int, ...], str, float]


@dataclass(frozen=True)
class Acquired:
    """What one `acquire` took: hand it to `release` once."""

    process_group: Any
    """This rank's torch ProcessGroup; None where its list has one rank."""
    keys: tuple[_Key, ...]


class ProcessGroupPool:
    """The process groups of one initialised world; equal rank sets of one backend and timeout are one group."""

    def __init__(self, timeout_s: float) -> None:
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.timeout_s = timeout_s
        self.default_backend = str(dist.get_backend())
        default_key = (tuple(range(self.world_size)), self.default_backend, timeout_s)
        self._groups: dict[_Key, Any] = {default_key: dist.group.WORLD}
        self._users: dict[_Key, int] = {default_key: 1}  # the default group is not the pool's to destroy
        self._alone: dict[str, Any] = {}

    def acquire(self, rank_lists: Sequence[Sequence[int]], backend: str, timeout_s: float) -> Acquired:
        """This rank's group among disjoint `rank_lists`. Every rank of the world calls it, with the same arguments."""
        mine = position_in(rank_lists, self.rank)
        keys = [(tuple(ranks), backend, timeout_s) for ranks in rank_lists if len(ranks) > 1]
        for key in keys:
            if key not in self._groups:
                self._check_ranks(key[0])
                self._groups[key] = dist.new_group(list(key[0]), timedelta(seconds=timeout_s), backend)
                self._users[key] = 0
            self._users[key] += 1
        return Acquired(self._groups.get((tuple(rank_lists[mine]), backend, timeout_s)), tuple(keys))

    def release(self, acquired: Acquired) -> None:
        """Destroys the groups that nobody uses any more. Every rank of the world calls it."""
        for key in acquired.keys:
            if key not in self._users:
                continue
            self._users[key] -= 1
            if self._users[key] == 0:
                group = self._groups.pop(key)
                del self._users[key]
                if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.is_initialized():
                    dist.destroy_process_group(group)

    def alone(self, backend: str, timeout_s: float) -> Any:
        """A process group of this rank only, made at its first use and without the other ranks."""
        if self.world_size == 1 and backend == self.default_backend:
            return dist.group.WORLD
        if backend not in self._alone:
            self._alone[backend] = dist.new_group(
                [self.rank], timedelta(seconds=timeout_s), backend, use_local_synchronization=True
            )
        return self._alone[backend]

    def _check_ranks(self, ranks: tuple[int, ...]) -> None:
        wrong = [rank for rank in ranks if not 0 <= rank < self.world_size]
        if wrong or len(set(ranks)) != len(ranks):
            problem = f"{wrong} are not" if wrong else "some appear twice"
            raise InvalidArgumentError(
                f"the ranks of a group must be distinct global ranks in 0 … {self.world_size - 1}, "
                f"but in {list(ranks)} {problem}"
            )
