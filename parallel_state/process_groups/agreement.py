"""Agreement of all ranks on what they ask for, through the store, before anything is made that could wait for a peer.

Per rank and question seven store operations (the last to come has some more), however many ranks there are. The
reference is the first rank's request; the last rank to come gives the verdict, and only where somebody differs does it
read all requests. A rank that times out publishes the verdict, with the ranks that are missing, so that a late one
hears it too.
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

from device_communicators.base.bounded_store import LAST_LOOK_S, LAST_WORD_S, BoundedStore
from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    ConfigMismatchError,
    HostUnreachableError,
    PeerDiedError,
    UsageError,
    format_ranks,
)
from device_communicators.liveness.health import Watcher, describe_deaths, kind_of_deaths

T = TypeVar("T")
Request = Mapping[str, str]
_READY = "1"
_WRONG = "wrong"
"""The key of a request that can't be: its value is the error."""


_OF_DEATHS: dict[str, type[CommunicationError]] = {
    kind.__name__: kind for kind in (PeerDiedError, HostUnreachableError, CommunicationError)
}
"""The classes of errors for deaths, as a verdict names them."""
_PAUSE_S = 0.002
_SLICE_S = 0.5
_LONGEST_PAUSE_S = 0.1
"""Between two looks at a key: they grow, as ranks of a large world share one store."""


def digest(value: object) -> str:
    """Returns 16 hexadecimal digits of anything whose repr says all about it."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class Agreement:
    """The questions that the ranks of one world have asked each other: the same ones in the same order on each."""

    def __init__(self, store: Any, prefix: str, rank: int, watcher: Watcher, alone: bool = False) -> None:
        """`alone`: the other ranks are imagined, and ask for whatever this one does."""
        self.alone = alone
        self.store = BoundedStore.of(store)
        self._watcher = watcher
        self._prefix = f"{prefix}/agree"
        self._rank = rank
        self._asked: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        """By key of a meeting, the last name under which this rank was there: it doesn't come there again."""
        self._attempts: Counter[str] = Counter()

    @property
    def silent_s(self) -> float:
        """Returns for how many seconds an operation past its deadline has had no answer; 0.0 if the store answers."""
        return self.store.silent_s

    def _until(self, deadline: float, watched: Collection[int]) -> BoundedStore:
        """Returns the store, bounded by the deadline and by the death of a watched rank or of the store's server.

        The last look at a key comes after the deadline of the question, so operations have a little more time.
        """
        server = self.store.served_by
        ranks = {*watched} if server is None else {*watched, server}
        return self.store.until(deadline + LAST_LOOK_S, lambda: bool(self._watcher.deaths_of(ranks)))

    def resolve_and_agree(
        self,
        what: str,
        ranks: Sequence[int],
        resolve: Callable[[], tuple[T, Request]],
        timeout_s: float,
        domain: Collection[int] = (),
    ) -> T:
        """Returns what `resolve` gives beside its request, once all of `ranks`, which call it, asked for the same.

        A rank whose `resolve` raises comes too, to tell the others: whatever can go wrong belongs in there. Raises
        that error where all ranks' are wrong, or where it is no UsageError; ConfigMismatchError with both sides where
        two differ, CollectiveTimeoutError with the ranks that never came, PeerDiedError with those that have ended,
        CommunicationError where the store is gone.
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
        """Returns once all of `ranks` asked for this request. With `wrong`, an error which is raised, there is none.

        `domain`: further ranks whose death ends the wait, as those that are waited for may have failed by it.
        """
        if len(ranks) == 1 or self.alone:
            if wrong is not None:
                raise wrong
            return
        scope = f"{self._prefix}/{digest((what, tuple(ranks)))}"
        number = self._asked[scope] = self._asked[scope] + 1
        mine = dict(request) if wrong is None else {_WRONG: f"{type(wrong).__name__}: {wrong}"}
        started, watched = time.monotonic(), {*ranks, *domain}
        try:
            verdict = self._verdict(scope, number, ranks, mine, started + timeout_s, watched)
        except dist.DistError as error:
            raise self._no_store(what, _words(mine), watched, started, timeout_s, error) from error
        if verdict["kind"] == "same" and wrong is None:
            return
        if wrong is not None and (verdict["kind"] in ("same", _WRONG) or not isinstance(wrong, UsageError)):
            raise wrong
        raise self._error_of(verdict, what, mine, started, timeout_s) from wrong

    def _error_of(
        self, verdict: Mapping[str, Any], what: str, mine: Request, started: float, timeout_s: float
    ) -> Exception:
        """Returns the error of this rank, which asks for `mine`, for a verdict that is not "same"."""
        if verdict["kind"] == "dead":
            return self._error(
                f"rank {self._rank} asks for {what} ({_words(mine)}), but of the ranks that must ask too, "
                f"{verdict['text']}. Ask for groups without them, or start again with those that are left "
                "(reinitialize)",
                _OF_DEATHS[verdict["error"]],
                verdict["ranks"],
                started,
                timeout_s,
            )
        if verdict["kind"] == "missing":
            missing = [rank for rank in verdict["ranks"] if rank != self._rank]
            also = f" (as for ranks {format_ranks(missing)})" if missing else ""
            text = (
                f"rank {self._rank} came too late to ask for {what}: the others had waited {timeout_s:g} s for "
                f"it{also} and gave up. Ask again on all ranks; look at what kept this one"
                if self._rank in verdict["ranks"]
                else f"ranks {format_ranks(missing)} of the world did not come within {timeout_s:g} s to ask for "
                f"{what} as rank {self._rank} does; look for a rank that failed or took another branch"
            )
            text = f"{text}. This rank asks for {_words(mine)}"
            return self._error(text, CollectiveTimeoutError, missing, started, timeout_s)
        return ConfigMismatchError(
            f"all ranks must ask for the same {what}, but {verdict['text']} (this is rank {self._rank}); "
            "pass the same arguments, and set the same environment variables, on every rank"
        )

    def meet(
        self, what: str, ranks: Sequence[int], timeout_s: float, watched: Sequence[int] = (), problem: str = ""
    ) -> str:
        """Returns a name for `what` that no earlier attempt had, once all of `ranks`, who call it alike, are there.

        The first of them opens a new name, the others come to it, and it gives the word. Who finds a name that is left
        of an attempt that failed gets no word there, and goes on to the next. Names are numbers of attempts, so that
        groups of later worlds have those of earlier ones: DTensor's caches live as long as the process, and look
        groups up by name. Raises as `agree` where a rank is missing, or where one of `watched`, by default `ranks`,
        has ended; CommunicationError on all ranks where one comes with a `problem`, for which it can't go on.
        """
        watched = watched or ranks
        if len(ranks) == 1 or self.alone:
            return f"{self._prefix}/{secrets.token_hex(8)}"
        key = f"{self._prefix}/meet/{digest((what, tuple(ranks)))}"
        started = time.monotonic()
        deadline = started + timeout_s
        name, store = "", self._until(deadline, watched)
        try:
            if self._rank == ranks[0]:
                self._attempts[key] += 1
                name = str(self._attempts[key])
                store.set(key, name)
                problem = self._gather(f"{key}/{name}", ranks, problem, watched, deadline)
            else:
                name = self._come(key, watched, deadline, problem)
                problem = store.get(f"{key}/{name}/all").decode()
        except dist.DistStoreError as error:
            raise self._nobody(what, key, name, ranks, watched, started, timeout_s) from error
        except dist.DistError as error:
            raise self._no_store(what, "", watched, started, timeout_s, error) from error
        except BaseException as error:  # an interrupt: the others needn't wait
            self.fail(f"{key}/{name or self._name_at(key)}", f"{type(error).__name__}: {error}")
            raise
        if problem != _READY:
            suspect, _, why = problem.partition(" ")
            raise self._error(
                f"rank {self._rank} makes {what} of global ranks {format_ranks(ranks)}, but global rank {suspect} "
                f"can't: {why}",
                suspects=(int(suspect),),
                started=started,
                timeout_s=timeout_s,
            )
        return f"{key}/{name}"

    def _gather(self, name: str, ranks: Sequence[int], problem: str, watched: Sequence[int], deadline: float) -> str:
        """Gives the word, once all others came: that they are ready, or the first rank's problem, which is returned."""
        others, store = [f"{name}/{rank}" for rank in ranks[1:]], self._until(deadline, watched)
        for key in others:
            self._wait(store, key, watched, deadline, name)
        problems = [problem or _READY, *(problem.decode() for problem in store.multi_get(others))]
        found = ((rank, each) for rank, each in zip(ranks, problems, strict=True) if each != _READY)
        word = next((f"{rank} {each}" for rank, each in found), _READY)
        self.store.within(LAST_WORD_S).set(f"{name}/all", word)
        return word

    def _come(self, key: str, watched: Sequence[int], deadline: float, problem: str) -> str:
        pause_s, store = _PAUSE_S, self._until(deadline, watched)
        while True:
            self._wait(store, key, watched, deadline)
            name = store.get(key).decode()
            if name == self._names.get(key):  # of the last attempt
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _SLICE_S)
                if time.monotonic() >= deadline or self._watcher.deaths_of(watched):
                    raise dist.DistStoreError("no new name")
                continue
            store.set(f"{key}/{name}/{self._rank}", problem or _READY)
            while store.get(key).decode() == name:
                try:
                    self._wait(store, f"{key}/{name}/all", watched, min(deadline, time.monotonic() + _SLICE_S))
                    self._names[key] = name
                    return name
                except dist.DistStoreError:
                    if (
                        time.monotonic() >= deadline
                        or self._watcher.deaths_of(watched)
                        or self.failure(f"{key}/{name}") is not None
                    ):
                        self._names[key] = name
                        raise
            if store.check([f"{key}/{name}/all"]):  # a rank can't, and the first rank already tries anew
                self._names[key] = name
                return name

    def _name_at(self, key: str) -> str:
        """Returns the name that the first rank has opened last; "" if none."""
        with contextlib.suppress(dist.DistError):
            store = self.store.within(LAST_WORD_S)
            return store.get(key).decode() if store.check([key]) else ""
        return ""

    def fail(self, name: str, reason: str) -> None:
        """Tells those who are at a meeting, or make what they met for, that this rank can't go on with it."""
        if self.alone:
            return
        with contextlib.suppress(dist.DistError):
            self.store.within(LAST_WORD_S).compare_set(f"{name}/failed", "", json.dumps([self._rank, reason[:500]]))

    def failure(self, name: str) -> tuple[int, str] | None:
        """Returns the rank that can't go on with what was met for, and why; None if there is none."""
        with contextlib.suppress(dist.DistError):
            store = self.store.within(LAST_WORD_S)
            if store.check([f"{name}/failed"]):
                rank, reason = json.loads(store.get(f"{name}/failed"))
                return rank, reason
        return None

    def forget(self, name: str, ranks: Sequence[int]) -> None:
        """Takes away what a meeting left in the store, as nobody waits there any more; its first rank does."""
        if self._rank == ranks[0] and not self.alone and len(ranks) > 1:
            with contextlib.suppress(dist.DistError):
                self._forget(self.store, *(f"{name}/{rank}" for rank in ranks[1:]), f"{name}/all")

    def _nobody(
        self,
        what: str,
        key: str,
        name: str,
        ranks: Sequence[int],
        watched: Sequence[int],
        started: float,
        timeout_s: float,
    ) -> CommunicationError:
        """Returns the error for ranks that didn't come."""
        who = f"rank {self._rank} makes {what} of global ranks {format_ranks(ranks)}, but"
        if deaths := self._watcher.await_death_of(watched, 0.0):
            return self._error(
                f"{who} {describe_deaths(deaths)}. Make groups without it, or start again with those that are left "
                "(reinitialize)",
                kind_of_deaths(deaths, CommunicationError),
                [death.rank for death in deaths],
                started,
                timeout_s,
            )
        name = name or self._name_at(key)
        failure = self.failure(f"{key}/{name}")
        if failure is not None and failure[0] != self._rank:
            return self._error(
                f"{who} global rank {failure[0]} could not ({failure[1]}). Look at the log of that rank; all of them "
                "may try again",
                suspects=(failure[0],),
                started=started,
                timeout_s=timeout_s,
            )
        came = {self._rank}
        with contextlib.suppress(dist.DistError):
            store = self.store.within(LAST_WORD_S)
            came |= {rank for rank in ranks[1:] if name and store.check([f"{key}/{name}/{rank}"])}
        # The first rank's name may be that of an attempt before: then it is not the first who is waited for, if any.
        missing = [rank for rank in ranks if rank not in came and (rank != ranks[0] or came >= set(ranks[1:]))]
        return self._error(
            f"{who} ranks {format_ranks(missing)} did not come within {timeout_s:g} s; look for a rank that failed or "
            "makes its groups in another order",
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

    def _no_store(
        self, what: str, words: str, watched: Collection[int], started: float, timeout_s: float, error: Exception
    ) -> CommunicationError:
        asked = f" ({words})" if words else ""
        kind, why, suspects = self._watcher.explain_lost_store(self.store, error, watched)
        return self._error(
            f"rank {self._rank} asks for {what}{asked}, but the store through which the ranks agree doesn't answer: "
            f"{why}. Look at the process that serves it: rank 0, or the launcher",
            kind,
            suspects,
            started,
            timeout_s,
        )

    def _verdict(
        self, scope: str, number: int, ranks: Sequence[int], mine: Request, deadline: float, watched: Collection[int]
    ) -> Any:
        store, key, before = self._until(deadline, watched), f"{scope}/{number}", f"{scope}/{number - 1}"
        store.set(f"{key}/{self._rank}", json.dumps(mine))
        if number > 1 and self._rank != ranks[0]:
            self._forget(store, f"{before}/{self._rank}")
        try:
            if self._read(store, f"{key}/{ranks[0]}", watched, deadline) != mine:
                store.set(f"{key}/differs", "1")
            if store.add(f"{key}/count", 1) == len(ranks):
                if not store.check([f"{key}/verdict"]):  # others may have waited in vain before this one came
                    self._decide(store, key, self._compare(store, key, ranks))
                if number > 1:  # all ranks are here, so all have read what was said before
                    shared = ("count", "verdict", "differs", str(ranks[0]))
                    self._forget(store, *(f"{before}/{name}" for name in shared))
            return self._read(store, f"{key}/verdict", watched, deadline)
        except dist.DistStoreError:
            deaths = self._watcher.await_death_of(watched, 0.0)  # with others that follow at once
            if deaths:
                kind = kind_of_deaths(deaths, CommunicationError).__name__
                dead = {"ranks": [death.rank for death in deaths], "text": describe_deaths(deaths), "error": kind}
                return self._decide(self.store.within(LAST_WORD_S), key, {"kind": "dead", **dead})
            store = self.store.within(LAST_WORD_S)
            missing = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
            return self._decide(store, key, {"kind": "missing", "ranks": missing})

    def _compare(self, store: BoundedStore, key: str, ranks: Sequence[int]) -> dict[str, Any]:
        if not store.check([f"{key}/differs"]):
            return {"kind": "same"}
        requests = [json.loads(store.get(f"{key}/{rank}")) for rank in ranks]
        if all(_WRONG in request for request in requests):
            return {"kind": _WRONG}
        first = requests[0]
        other, request = next((rank, each) for rank, each in zip(ranks, requests, strict=True) if each != first)
        names = [name for name in {**first, **request} if name != _WRONG]
        name = next(name for name in names if first.get(name) != request.get(name))
        sides = [each.get(name) or _words(each) for each in (first, request)]
        text = f"the {name} is {sides[0]} on rank {ranks[0]} and {sides[1]} on rank {other}"
        return {"kind": "different", "text": text}

    def forget_addresses(self, name: str, ranks: Sequence[int]) -> None:
        """Deletes the address that gloo left in the store for this rank's last group of the meeting of `name`.

        Once all ranks have met for the next group, each of them has released that one.
        """
        meeting, _, number = name.rpartition("/")
        if not self.alone and len(ranks) > 1 and int(number) > 1:
            key = f"{meeting}/{int(number) - 1}//cpu//0/{ranks.index(self._rank)}"
            with contextlib.suppress(dist.DistError):
                self._forget(self.store.within(LAST_WORD_S), key)

    def _decide(self, store: BoundedStore, key: str, verdict: dict[str, Any]) -> Any:
        """Publishes a verdict; returns the first one, which counts."""
        return json.loads(store.compare_set(f"{key}/verdict", "", json.dumps(verdict)))

    def _forget(self, store: BoundedStore, *keys: str) -> None:
        with contextlib.suppress(NotImplementedError):  # not every store can
            for key in keys:
                store.delete_key(key)

    def _read(self, store: BoundedStore, key: str, watched: Collection[int], deadline: float) -> Any:
        """Returns a key's value; DistStoreError at the deadline, or if one of the `watched` ends before."""
        self._wait(store, key, watched, deadline)
        return json.loads(store.get(key))

    def _wait(
        self, store: BoundedStore, key: str, watched: Collection[int], deadline: float, meeting: str = ""
    ) -> None:
        """Waits for a key as `_read`; ends also where a rank can't go on with the `meeting` of this name."""
        pause_s = _PAUSE_S
        while not store.check([key]):  # the store's own wait logs each timeout
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"{key} was not there in time")
            if self._watcher.deaths_of(watched):
                raise dist.DistStoreError(f"a rank has ended before {key} was there")
            if meeting and self.failure(meeting) is not None:
                raise dist.DistStoreError(f"a rank has failed before {key} was there")
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)


def _words(request: Request) -> str:
    return f"wrong ({request[_WRONG]})" if _WRONG in request else ", ".join(f"{k} {v}" for k, v in request.items())
