"""Lists of ranks to torch process groups: each distinct one made once, shared, and destroyed with its last user.

Every rank of the world makes the same groups in the same order, also those that it isn't in: c10d names groups by
counting. Which lists there are is the layout's business; what is done with a group is the coordinator's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from device_communicators.base import format_ranks
from device_communicators.errors import (
    CommunicationError,
    ConfigMismatchError,
    GroupDestroyedError,
    InvalidArgumentError,
    LayoutError,
)
from parallel_state.layout import position_in

_Key = tuple[tuple[int, ...], str, float]


@dataclass(frozen=True)
class Acquired:
    """What one `acquire` took: hand it to `release` once."""

    process_group: Any
    """This rank's torch ProcessGroup; None where its list has one rank."""
    keys: tuple[_Key, ...]
    channel: int
    """A number that no other user of one of these groups has: their transfers have other tags."""


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
        self._channels: dict[_Key, int] = {}  # the next one that no user of the group has had
        self._alone: dict[str, Any] = {}
        self._made = 0
        self._closed = False

    def acquire(self, rank_lists: Sequence[Sequence[int]], backend: str, timeout_s: float) -> Acquired:
        """This rank's group among `rank_lists`, which divide the world. Every rank calls it, with the same arguments.

        Before a group is made, raises LayoutError or InvalidArgumentError for lists that don't, and ConfigMismatchError
        on every rank where ranks ask for different groups.
        """
        self._check_open()
        self._check(rank_lists)
        mine = position_in(rank_lists, self.rank)
        keys = [(tuple(ranks), backend, timeout_s) for ranks in rank_lists if len(ranks) > 1]
        self._check_alike(keys)
        for key in keys:
            if key not in self._groups:
                self._groups[key] = dist.new_group(list(key[0]), timedelta(seconds=timeout_s), backend)
                self._users[key] = 0
                self._made += 1
            self._users[key] += 1
        channel = max((self._channels.get(key, 0) for key in keys), default=0)
        self._channels.update(dict.fromkeys(keys, channel + 1))
        return Acquired(self._groups.get((tuple(rank_lists[mine]), backend, timeout_s)), tuple(keys), channel)

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

    def close(self) -> None:
        """The world ends: no group is made any more, and what `alone` made is destroyed. Twice is fine."""
        self._closed = True
        alone, self._alone = self._alone, {}
        for group in alone.values():
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def alone(self, backend: str, timeout_s: float) -> Any:
        """A process group of this rank only, made at its first use and without the other ranks."""
        self._check_open()
        if self.world_size == 1 and backend == self.default_backend:
            return dist.group.WORLD
        if backend not in self._alone:
            self._alone[backend] = dist.new_group(
                [self.rank], timedelta(seconds=timeout_s), backend, use_local_synchronization=True
            )
        return self._alone[backend]

    def _check_open(self) -> None:
        if self._closed:
            raise GroupDestroyedError("the world of this group was destroyed; initialise again to make groups")

    def _check(self, rank_lists: Sequence[Sequence[int]]) -> None:
        listed = Counter(rank for ranks in rank_lists for rank in ranks)
        problems = {
            "miss": [rank for rank in range(self.world_size) if rank not in listed],
            "repeat": [rank for rank, count in listed.items() if count > 1],
            "hold the unknown": [rank for rank in listed if not 0 <= rank < self.world_size],
        }
        for problem, wrong in problems.items():
            if wrong:
                raise LayoutError(
                    f"the lists of ranks must hold each global rank in 0 … {self.world_size - 1} once, "
                    f"but {problem} {format_ranks(wrong)}; every rank must pass the lists of all groups"
                )
        for ranks in rank_lists:
            if list(ranks) != sorted(ranks):
                # torch.distributed numbers a group's ranks in ascending order, whatever it is given.
                raise InvalidArgumentError(f"the ranks of a group must be in ascending order, but are {list(ranks)}")

    def _check_alike(self, keys: Sequence[_Key]) -> None:
        """Ranks that make other groups, or in another order, would find each other's peers in theirs."""
        everyone = tuple(range(self.world_size))
        channel = next((group for key, group in self._groups.items() if key[:2] == (everyone, "gloo")), None)
        if self.world_size == 1 or channel is None:  # the world's own gloo group is just being made
            return
        digest = hashlib.sha256(repr((self._made, keys)).encode()).digest()[:16]
        mine = torch.tensor(list(digest), dtype=torch.uint8)
        digests = torch.empty(self.world_size, len(digest), dtype=torch.uint8)
        try:
            channel.allgather([list(digests.unbind())], [mine]).wait()
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank} makes the groups {_format(keys)}, but not every rank of the world came to do so: "
                f"{str(error).splitlines()[0]}. Look for a rank that failed or took another branch",
                group="world",
                operation="new_group",
                rank=self.rank,
                timeout_s=self.timeout_s,
            ) from error
        others = [rank for rank in everyone if not torch.equal(digests[rank], digests[0])]
        if others:
            raise ConfigMismatchError(
                "every rank of the world must make the same groups in the same order, but ranks "
                f"{format_ranks(others)} ask for others than rank 0; rank {self.rank} asks for {_format(keys)} "
                f"after {self._made} others"
            )


def _format(keys: Sequence[_Key]) -> str:
    text = ", ".join(format_ranks(ranks) for ranks, _, _ in keys[:4])
    return f"{text or 'of single ranks'}{', …' if len(keys) > 4 else ''}"
