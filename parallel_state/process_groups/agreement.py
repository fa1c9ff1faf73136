"""Checks that all ranks request the same thing before any of them starts a step that waits for peers.

All ranks get the requests of all, or the same verdict: which ranks are missing or exited. So all ranks raise the same
error. A rank that asks late gets the same verdict. A rank whose decider doesn't answer gets no verdict (undecided).

Without a control plane nothing is compared: different requests fail at the first call's deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from device_communicators.base.bounded_store import LAST_WORD_S, BoundedStore
from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    ConfigMismatchError,
    UsageError,
    format_ranks,
)
from device_communicators.control.plane import Verdict
from device_communicators.liveness.health import Watcher, describe_deaths, kind_of_deaths

T = TypeVar("T")
Request = Mapping[str, str]
_WRONG = "wrong"
"""Key of a request whose construction failed; the value is the error."""
_VALUE_BYTES = 4000
_WORDS = 120
"""If a request is too long, parts longer than this are sent as their first characters and a digest."""


def digest(value: object) -> str:
    """Returns 16 hexadecimal digits that identify `value` by its repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class Agreement:
    """Runs agreements of one world and counts their attempts."""

    def __init__(self, store: Any, prefix: str, rank: int, watcher: Watcher, alone: bool = False) -> None:
        """`alone`: the other ranks are simulated and agree with this one.

        `store`: keeps why a rank failed to make a group.
        """
        self.alone = alone
        self.store = BoundedStore.of(store)
        self._watcher = watcher
        self._prefix = f"{prefix}/agree"
        self._rank = rank
        self._attempts: Counter[str] = Counter()

    @property
    def silent_s(self) -> float:
        """Returns for how many seconds an operation past its deadline has had no answer; 0.0 if the store answers."""
        return self.store.silent_s

    def resolve_and_agree(
        self,
        what: str,
        ranks: Sequence[int],
        resolve: Callable[[], tuple[T, Request]],
        timeout_s: float,
        domain: Collection[int] = (),
    ) -> T:
        """Returns the value of `resolve` once all of `ranks` have requested the same. Each of `ranks` calls it.

        `resolve` returns the value and the request. If it raises, this rank still takes part, so that peers get the
        error. Do everything that can fail inside `resolve`. Raises:

        - the error of `resolve`, if it fails on all ranks or is no UsageError;
        - ConfigMismatchError with both requests, if two ranks differ;
        - CollectiveTimeoutError with the ranks that didn't ask, or didn't answer, by the deadline;
        - PeerDiedError with the ranks that exited.
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
        """Returns once all of `ranks` have made this request.

        `wrong`: the error that replaces the request; raised after the agreement. `domain`: further ranks whose death
        ends the wait, because missing ranks may have failed by it.
        """
        mine = dict(request) if wrong is None else {_WRONG: f"{type(wrong).__name__}: {wrong}"}
        started = time.monotonic()
        purpose = f"{self._prefix}/{digest((what, tuple(ranks)))}"
        said = self._everyone(purpose, what, ranks, _encode(mine), timeout_s, started, {*ranks, *domain}, wrong)
        if said is None or all(_WRONG in each for each in said):
            if wrong is not None:
                raise wrong
            return
        first = said[0]
        other = next((index for index, each in enumerate(said) if each != first), None)
        if wrong is not None and (other is None or not isinstance(wrong, UsageError)):
            raise wrong
        if other is None:
            return
        raise ConfigMismatchError(
            f"all ranks must ask for the same {what}, but {_difference(ranks, said, other)} (this is rank "
            f"{self._rank}); pass the same arguments, and set the same environment variables, on every rank"
        ) from wrong

    def _everyone(
        self,
        purpose: str,
        what: str,
        ranks: Sequence[int],
        value: bytes,
        timeout_s: float,
        started: float,
        watched: Collection[int],
        wrong: Exception | None = None,
    ) -> list[Any] | None:
        """Returns each rank's request. Raises for ranks that are missing or ended.

        None if this is the only rank or there is no control plane.
        """
        if len(ranks) == 1 or self.alone:
            return None
        attempt = self._attempts[purpose] = self._attempts[purpose] + 1
        verdict = self._watcher.agree(purpose, attempt, ranks, value, timeout_s, watched)
        if verdict is None:
            return None
        if verdict.kind == "agreed":
            return [json.loads(each) for each in verdict.values]
        # Where others gave up because a rank has ended, this one is about to hear of it.
        is_early = time.monotonic() < started + timeout_s and self._rank not in verdict.ranks
        deaths = self._watcher.await_death_of(watched, None if is_early else 0.0)
        asks = f"rank {self._rank} asks for {what} ({_words(json.loads(value))})"
        if deaths:
            raise self._error(
                f"{asks}, but of the ranks that must ask too, {describe_deaths(deaths)}. Ask for groups without them, "
                "or start again with those that are left (reinitialize)",
                kind_of_deaths(deaths, CommunicationError),
                [death.rank for death in deaths],
                started,
                timeout_s,
            ) from wrong
        missing = [rank for rank in verdict.ranks if rank != self._rank]
        if verdict.kind == "missing" and self._rank in verdict.ranks:
            also = f" (as for ranks {format_ranks(missing)})" if missing else ""
            text = (
                f"rank {self._rank} came too late to ask for {what}: the others had waited {timeout_s:g} s for it{also}"
                " and gave up. Ask again on all ranks; look at what kept this one"
            )
        else:
            text = (
                f"ranks {format_ranks(missing)} of the world {_of_missing(verdict.kind, timeout_s)} to ask for {what} "
                f"as rank {self._rank} does; look for a rank that failed or took another branch"
            )
            text += "".join(f"; global rank {rank} is {why}" for rank, why in self._watcher.conditions(missing).items())
        asked = _words(json.loads(value))
        raise self._error(
            f"{text}. This rank asks for {asked}", CollectiveTimeoutError, missing, started, timeout_s
        ) from wrong

    def meet(
        self, what: str, ranks: Sequence[int], timeout_s: float, watched: Sequence[int] = (), problem: str = ""
    ) -> str:
        """Waits for all `ranks`, which make the same call. Returns a name for `what` that no earlier attempt had.

        A name ends with the attempt's number, so groups of later worlds get the names of earlier ones: DTensor's caches
        live as long as the process, and look groups up by name. (One rank alone, or with simulated ranks: random.)

        A rank that is late for an attempt joins the next one. If a rank passes a `problem`, all ranks raise
        CommunicationError. Raises like `agree` if a rank is missing, or if a rank of `watched` (default: `ranks`) died.
        """
        watched = watched or ranks
        if len(ranks) == 1 or self.alone:
            return f"{self._prefix}/{secrets.token_hex(8)}"
        key = f"{self._prefix}/meet/{digest((what, tuple(ranks)))}"
        started, value = time.monotonic(), problem.encode()[:_VALUE_BYTES]
        while True:
            attempt = self._attempts[key] = self._attempts[key] + 1
            name = f"{key}/{attempt}"
            left_s = max(0.0, started + timeout_s - time.monotonic())
            try:
                verdict = self._watcher.agree(key, attempt, ranks, value, left_s, watched)
            except BaseException as error:  # an interrupt: the others needn't wait
                self.fail(name, f"{type(error).__name__}: {error}")
                raise
            if verdict is None:
                return name
            if verdict.kind == "agreed":
                break
            is_late = verdict.kind == "missing" and self._rank in verdict.ranks
            if not is_late or time.monotonic() >= started + timeout_s or self._watcher.deaths_of(watched):
                if verdict.kind == "undecided":  # the others may have a verdict
                    self.fail(name, f"it had no answer from ranks {format_ranks(verdict.ranks)} in time")
                raise self._nobody(what, name, ranks, verdict, watched, started, timeout_s)
        found = (
            (rank, each.decode(errors="replace")) for rank, each in zip(ranks, verdict.values, strict=True) if each
        )
        for suspect, why in found:
            raise self._error(
                f"rank {self._rank} makes {what} of global ranks {format_ranks(ranks)}, but global rank {suspect} "
                f"can't: {why}",
                suspects=(suspect,),
                started=started,
                timeout_s=timeout_s,
            )
        return name

    def fail(self, name: str, reason: str) -> None:
        """Publishes that this rank failed to make the group `name`."""
        if self.alone:
            return
        with contextlib.suppress(dist.DistError):
            self.store.within(LAST_WORD_S).compare_set(f"{name}/failed", "", json.dumps([self._rank, reason[:500]]))

    def failure(self, name: str) -> tuple[int, str] | None:
        """Returns the rank that failed to make the group `name`, and why; None if none did."""
        with contextlib.suppress(dist.DistError):
            store = self.store.within(LAST_WORD_S)
            if store.check([f"{name}/failed"]):
                rank, reason = json.loads(store.get(f"{name}/failed"))
                return rank, reason
        return None

    def _nobody(
        self,
        what: str,
        name: str,
        ranks: Sequence[int],
        verdict: Verdict,
        watched: Sequence[int],
        started: float,
        timeout_s: float,
    ) -> CommunicationError:
        """Returns the error for a meeting without agreement."""
        who, missing = f"rank {self._rank} makes {what} of global ranks {format_ranks(ranks)}, but", verdict.ranks
        is_early = time.monotonic() < started + timeout_s and self._rank not in missing
        if deaths := self._watcher.await_death_of(watched, None if is_early else 0.0):
            return self._error(
                f"{who} {describe_deaths(deaths)}. Make groups without it, or start again with those that are left "
                "(reinitialize)",
                kind_of_deaths(deaths, CommunicationError),
                [death.rank for death in deaths],
                started,
                timeout_s,
            )
        failure = self.failure(name)
        if failure is not None and failure[0] != self._rank:
            return self._error(
                f"{who} global rank {failure[0]} could not ({failure[1]}). Look at the log of that rank; all of them "
                "may try again",
                suspects=(failure[0],),
                started=started,
                timeout_s=timeout_s,
            )
        held = "".join(f"; global rank {rank} is {why}" for rank, why in self._watcher.conditions(missing).items())
        return self._error(
            f"{who} ranks {format_ranks(missing)} {_of_missing(verdict.kind, timeout_s)}{held}; look for a rank that "
            "failed or makes its groups in another order",
            CollectiveTimeoutError,
            missing,
            started,
            timeout_s,
        )

    def _error(
        self,
        text: str,
        kind: type[CommunicationError] = CommunicationError,
        suspects: Sequence[int] = (),
        started: float = 0.0,
        timeout_s: float = 0.0,
    ) -> CommunicationError:
        return kind(
            text,
            group="world",
            operation="new_group",
            rank=self._rank,
            suspect_ranks=tuple(suspects),
            elapsed_s=time.monotonic() - started,
            timeout_s=timeout_s,
        )

    def forget_addresses(self, name: str, ranks: Sequence[int]) -> None:
        """Deletes this rank's gloo address of the previous attempt from the store.

        All ranks have released it once they meet again.
        """
        meeting, _, number = name.rpartition("/")
        if not self.alone and len(ranks) > 1 and int(number) > 1:
            key = f"{meeting}/{int(number) - 1}//cpu//0/{ranks.index(self._rank)}"
            with contextlib.suppress(dist.DistError, NotImplementedError):  # not every store can
                self.store.within(LAST_WORD_S).delete_key(key)


def _encode(request: Request) -> bytes:
    """Encodes a request. Digests replace long parts if it exceeds 4000 bytes."""
    text = json.dumps(request).encode()
    if len(text) <= _VALUE_BYTES:
        return text
    cut = {
        name: each if len(each) <= _WORDS else f"{each[:_WORDS]}... ({digest(each)})" for name, each in request.items()
    }
    text = json.dumps(cut).encode()
    return text if len(text) <= _VALUE_BYTES else json.dumps({"request": f"{len(cut)} parts ({digest(cut)})"}).encode()


def _difference(ranks: Sequence[int], said: Sequence[Request], other: int) -> str:
    first, request = said[0], said[other]
    names = [name for name in {**first, **request} if name != _WRONG]
    name = next(name for name in names if first.get(name) != request.get(name))
    sides = [each.get(name) or _words(each) for each in (first, request)]
    return f"the {name} is {sides[0]} on rank {ranks[0]} and {sides[1]} on rank {ranks[other]}"


def _of_missing(kind: str, timeout_s: float) -> str:
    """Returns what ranks did that a verdict names, if it isn't that they died."""
    if kind == "ended":
        return "left the world before they came"
    return f"did not come{' or answer' if kind == 'undecided' else ''} within {timeout_s:g} s"


def _words(request: Request) -> str:
    return f"wrong ({request[_WRONG]})" if _WRONG in request else ", ".join(f"{k} {v}" for k, v in request.items())
