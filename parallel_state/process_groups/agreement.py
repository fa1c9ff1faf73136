"""Checks that all ranks request the same group before a rank waits for its peers. If not, all raise the same error.

The control plane compares the requests. Without it, different requests fail at the deadline of the group's first call.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from device_communicators.base.bounded_store import LAST_WORD_S
from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    ConfigMismatchError,
    UsageError,
    format_ranks,
)
from device_communicators.liveness.health import UnmetError, Watcher

T = TypeVar("T")
Request = Mapping[str, str]
_WRONG = "wrong"
_MOST_FAILURES = 256
_LONGEST = 400


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class Agreement:
    def __init__(self, prefix: str, rank: int, watcher: Watcher, alone: bool = False) -> None:
        self.alone = alone
        self._watcher = watcher
        self._prefix = f"{prefix}/agree"
        self._rank = rank
        self._meetings: Counter[str] = Counter()
        self._topic = f"{prefix}/not made"
        self._failures: dict[str, tuple[int, str]] = {}
        """Group's name -> (rank that failed to create it, reason)."""
        watcher.answers[self._topic] = self._note_failure

    def resolve_and_agree(
        self,
        what: str,
        ranks: Sequence[int],
        resolve: Callable[[], tuple[T, Request]],
        timeout_s: float,
        domain: Collection[int] = (),
    ) -> T:
        """Calls `resolve`, which returns a value and this rank's request for `agree`. Returns the value.

        Each of `ranks` must call this. Raises ConfigMismatchError if two requests differ. Peers receive the errors of
        `resolve`, so every step that can fail should be in it. `what`, `domain`: as in `agree`.
        """
        try:
            value, request = resolve()
        except Exception as error:
            self.agree(what, ranks, {}, timeout_s, domain, wrong=error)
            raise
        self.agree(what, ranks, request, timeout_s, domain)
        return value

    def agree(
        self,
        what: str,
        ranks: Sequence[int],
        request: Request,
        timeout_s: float,
        domain: Collection[int] = (),
        *,
        wrong: Exception | None = None,
    ) -> None:
        """Waits until all `ranks` (global) have called this. Raises ConfigMismatchError if two requests differ.

        `what`: the request's name, equal on all ranks. `wrong`: an error that this rank sends instead of a request; all
        ranks then raise. `domain`: further ranks whose death ends the wait.
        """
        mine = dict(request) if wrong is None else {_WRONG: f"{type(wrong).__name__}: {wrong}"}
        if len(ranks) == 1 or self.alone or not self._watcher.watches(ranks):
            if wrong is not None:
                raise wrong
            return
        try:
            texts = self._watcher.gather(
                f"{self._prefix}/{digest(what)}",
                ranks,
                json.dumps(mine).encode(),
                timeout_s,
                watched={*ranks, *domain},
                what=f"rank {self._rank} requests {what} ({_words(mine)})",
                operation="new_group",
            )
        except CommunicationError as error:
            if wrong is not None:
                raise error from wrong
            raise
        requests = [json.loads(text) for text in texts]
        if wrong is not None and all(_WRONG in each for each in requests):
            raise wrong
        other = next((index for index, each in enumerate(requests) if each != requests[0]), None)
        if wrong is not None and (other is None or not isinstance(wrong, UsageError)):
            raise wrong
        if other is None:
            return
        raise ConfigMismatchError(
            f"all ranks must request the same {what}, but {_difference(ranks, requests, other)} (this is rank "
            f"{self._rank}); pass the same arguments, and set the same environment variables, on every rank"
        ) from wrong

    def meet(
        self, what: str, ranks: Sequence[int], timeout_s: float, watched: Sequence[int] = (), problem: str = ""
    ) -> str:
        """Waits until all `ranks` have called this for group `what`. Returns the group's name, equal on all ranks.

        Each attempt has another name. A world that is destroyed and created again gives its groups the same names,
        because DTensor caches them.

        `watched`: ranks whose exit ends the wait. `problem`: why this rank can't create the group, or ""; all ranks
        then raise CommunicationError.
        """
        if len(ranks) == 1 or self.alone:
            return f"{self._prefix}/{secrets.token_hex(8)}"
        key = f"{self._prefix}/meet/{digest((what, tuple(ranks)))}"
        attempt = f"rank {self._rank} creates {what} of global ranks {format_ranks(ranks)}"
        started, problems = time.monotonic(), None
        while problems is None:
            self._meetings[key] = number = self._meetings[key] + 1
            name, left_s = f"{key}/{number}", max(0.0, started + timeout_s - time.monotonic())
            if not self._watcher.watches(ranks):
                return name
            try:
                problems = self._watcher.gather(
                    key, ranks, problem.encode(), left_s, watched=watched, what=attempt, operation="new_group"
                )
            except CommunicationError as error:
                verdict = error.__cause__.verdict if isinstance(error.__cause__, UnmetError) else None
                if verdict is not None and verdict.kind == "undecided":  # other ranks may create the group
                    self.fail(name, ranks, f"it got no answer from ranks {format_ranks(verdict.ranks)} in time")
                is_late = verdict is not None and verdict.kind == "missing" and self._rank in verdict.ranks
                if not is_late or not left_s or not isinstance(error, CollectiveTimeoutError):
                    raise
            except BaseException as error:  # an interrupt: other ranks needn't wait
                self.fail(name, ranks, f"{type(error).__name__}: {error}")
                raise
        for suspect, text in zip(ranks, problems, strict=True):
            if text:
                raise CommunicationError(
                    f"{attempt}, but global rank {suspect} can't create it: {text.decode(errors='replace')}",
                    group="world",
                    operation="new_group",
                    rank=self._rank,
                    suspect_ranks=(suspect,),
                    elapsed_s=time.monotonic() - started,
                    timeout_s=timeout_s,
                )
        return name

    def fail(self, name: str, ranks: Sequence[int], reason: str) -> None:
        """Sends `ranks` the `reason` why this rank can't create the group `name`. Waits at most 0.5 s for replies."""
        self._watcher.ask(ranks, self._topic, json.dumps([name, reason[:500]]).encode(), LAST_WORD_S)

    def failure(self, name: str) -> tuple[int, str] | None:
        return self._failures.get(name)

    def _note_failure(self, rank: int, payload: bytes) -> bytes:
        name, reason = json.loads(payload)
        self._failures.setdefault(name, (rank, reason))
        while len(self._failures) > _MOST_FAILURES:
            del self._failures[next(iter(self._failures))]
        return b""

    def forget_addresses(self, name: str, ranks: Sequence[int]) -> None:
        """Deletes from the store the address that this rank stored in the previous attempt to create the group. `name`:
        the group's name in the current attempt, from `meet`.
        """
        store = self._watcher.store_of(ranks)
        meeting, _, number = name.rpartition("/")
        if store is not None and len(ranks) > 1 and int(number) > 1:
            key = f"{meeting}/{int(number) - 1}//cpu//0/{ranks.index(self._rank)}"
            with contextlib.suppress(dist.DistError):
                store.within(LAST_WORD_S).delete_key(key)


def _difference(ranks: Sequence[int], requests: Sequence[Request], other: int) -> str:
    first, request = requests[0], requests[other]
    names = [name for name in {**first, **request} if name != _WRONG]
    name = next(name for name in names if first.get(name) != request.get(name))
    sides = [_short(each.get(name) or _words(each)) for each in (first, request)]
    return f"the {name} is {sides[0]} on rank {ranks[0]} and {sides[1]} on rank {ranks[other]}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({digest(text)})"


def _words(request: Request) -> str:
    if _WRONG in request:
        return f"wrong ({request[_WRONG]})"
    return ", ".join(f"{name} {_short(value)}" for name, value in request.items())
