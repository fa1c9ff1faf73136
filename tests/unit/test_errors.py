from __future__ import annotations

import concurrent.futures
import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import device_communicators
import parallel_state
from device_communicators.base.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    GroupFailedError,
    LaunchError,
    ParallelStateError,
    PeerDiedError,
    RemoteError,
    ResourceLimitError,
)
from tests.cases import each

PACKAGES = (device_communicators.__name__, parallel_state.__name__)
FIELDS = {
    "group": "tp:0", "operation": "all_reduce", "sequence": 3, "rank": 1, "suspect_ranks": (2, 5), "elapsed_s": 0.5,
    "timeout_s": 2.0, "exit_code": 9,
}  # fmt: skip
BY_PICKLE = [lambda error, n=n: pickle.loads(pickle.dumps(error, n)) for n in range(2, pickle.HIGHEST_PROTOCOL + 1)]
WAYS: tuple[Callable[[Any], Any], ...] = (*BY_PICKLE, copy.copy, copy.deepcopy)


def _import_everything() -> None:
    for package in (device_communicators, parallel_state):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                assert error.name is not None and not error.name.startswith(PACKAGES)


def _kinds(base: type[Exception]) -> Iterator[type[Exception]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def _ours() -> list[type[ParallelStateError]]:
    _import_everything()
    found = {kind for kind in _kinds(ParallelStateError) if not kind.__module__.startswith("tests.")}
    return sorted(found, key=lambda kind: (kind.__module__, kind.__name__))  # type: ignore[return-value]


def _made(kind: type[Exception], text: str = "what happened") -> Exception:
    parameters = inspect.signature(kind.__init__).parameters.values()
    return kind(text, **{each.name: FIELDS[each.name] for each in parameters if each.kind == each.KEYWORD_ONLY})


def _check_same(found: BaseException, error: BaseException) -> None:
    assert type(found) is type(error)
    assert (str(found), found.args, found.__dict__) == (str(error), error.args, error.__dict__)


def test_every_error_survives_pickle_and_copy() -> None:
    kinds = _ours()
    assert {PeerDiedError, RemoteError, LaunchError} < set(kinds)
    assert any(kind.__module__.startswith("parallel_state.compat") for kind in kinds)

    def check(kind: type[ParallelStateError], way: Callable[[Any], Any]) -> None:
        error = _made(kind)
        error.added_later = "a note"  # type: ignore[attr-defined]
        found = way(error)
        _check_same(found, error)
        assert found.__cause__ is None

    each([(kind, way) for kind in kinds for way in WAYS], check)


def test_a_cause_of_ours_survives() -> None:
    first, os_error, foreign = _made(PeerDiedError), OSError(24, "Too many open files"), ZeroDivisionError()
    for error, cause in [(GroupFailedError("later"), first), (ResourceLimitError("none left"), os_error)]:
        error.__cause__ = cause
        for way in WAYS:
            found = way(error).__cause__
            assert type(found) is type(cause) and found.args == cause.args
    error = GroupFailedError("later")
    error.__cause__ = foreign
    assert pickle.loads(pickle.dumps(error)).__cause__ is None


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.slow
def test_errors_come_back_from_a_pool_of_processes() -> None:
    """An error that can't be unpickled would break the pool."""
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        for kind in (RemoteError, LaunchError, CollectiveTimeoutError):
            error = _made(kind)
            with pytest.raises(kind) as caught:
                pool.submit(_raise, error).result(timeout=60)
            _check_same(caught.value, error)


def test_error_of_finds_what_is_behind() -> None:
    error = _made(PeerDiedError)
    assert parallel_state.error_of(error) is error
    try:
        try:
            raise error
        except PeerDiedError as caught:
            raise RuntimeError("a program's own") from caught
    except RuntimeError as outer:
        assert parallel_state.error_of(outer) is error
    assert parallel_state.error_of(dist.DistBackendError("another's words")) is None
    assert parallel_state.error_of(ValueError("another's words")) is None
    assert parallel_state.error_of(None) is None


def test_error_of_ends_on_a_ring_of_causes() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert parallel_state.error_of(first) is None


def test_the_time_of_an_error_is_that_of_its_call_in_its_text_too() -> None:
    """Asking other ranks for the cause takes time after the text was written."""
    text = "barrier of group 'tp:0' failed after 0.012 s: global rank 2 gave up, because it failed after 3.000 s"
    error = PeerDiedError(text, elapsed_s=0.012)
    error.set_elapsed(1.6543)
    assert error.elapsed_s == 1.6543
    assert str(error) == text.replace("0.012", "1.654")
    error.set_elapsed(1.0)
    assert error.elapsed_s == 1.6543
    unknown = CommunicationError("ranks differ")
    unknown.set_elapsed(0.5)
    assert (unknown.elapsed_s, str(unknown)) == (0.5, "ranks differ")
