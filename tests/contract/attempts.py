from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import parallel_state as ps

# torch's TCPStore looks up each peer's name, 5 s if a DNS server drops the query. glibc reads this variable once, so it
# is set before the fork server starts.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

LAUNCHER = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"
)  # fmt: skip


class Outcome(NamedTuple):
    kind: str
    text: str
    seconds: float
    suspect_ranks: tuple[int, ...] = ()


ELAPSED_WITHIN_S = 1.0


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    started = time.monotonic()
    try:
        result = call(*args, **kwargs)
    except Exception as error:
        took_s = time.monotonic() - started
        check_elapsed(error, took_s - ELAPSED_WITHIN_S, took_s + ELAPSED_WITHIN_S)
        return _outcome_of(error, took_s)
    return Outcome("ok", repr(result), time.monotonic() - started)


def attempt_in_turn(*calls: Callable[[], Any]) -> Outcome:
    told = Outcome("ok", "", 0.0)
    for call in calls:
        told = attempt(call)
        if told.kind != "ok":
            break
    return told


def attempt_all(calls: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    started = time.monotonic()
    try:
        result = calls(*args, **kwargs)
    except Exception as error:
        took_s = time.monotonic() - started
        check_elapsed(error, 0.0, took_s + ELAPSED_WITHIN_S)
        return _outcome_of(error, took_s)
    return Outcome("ok", repr(result), time.monotonic() - started)


@contextmanager
def elapsed_checked() -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        took_s = time.monotonic() - started
        check_elapsed(error, took_s - ELAPSED_WITHIN_S, took_s + ELAPSED_WITHIN_S)
        raise


def _outcome_of(error: Exception, took_s: float) -> Outcome:
    return Outcome(type(error).__name__, str(error), took_s, tuple(getattr(error, "suspect_ranks", ())))


def check_elapsed(error: BaseException | None, least_s: float, most_s: float) -> None:
    if isinstance(error, ps.CommunicationError) and not isinstance(error, ps.GroupFailedError):
        assert error.elapsed_s is not None, repr(error)
        assert max(0.0, least_s) <= error.elapsed_s <= most_s, (least_s, error.elapsed_s, most_s, repr(error))


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    before = dict(os.environ)
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def no_launcher(**variables: str | None) -> Any:
    return environment(**{**dict.fromkeys(LAUNCHER), **variables})


def whose(group: ps.GroupCoordinator) -> list[int]:
    return [int(rank) for rank in group.all_gather(torch.tensor([group.rank])).tolist()]


@contextmanager
def world(*sizes: int, **options: Any) -> Iterator[ps.GroupCoordinator]:
    ps.init_distributed_environment()
    try:
        if sizes:
            ps.initialize_model_parallel(*sizes, **options)
        yield ps.get_world_group()
    finally:
        ps.destroy_distributed_environment()
