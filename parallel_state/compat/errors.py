"""Errors that also derive from the type that Megatron or vLLM raises, such as AssertionError."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from device_communicators.base.errors import AlreadyInitializedError, GroupNotInitializedError, LayoutError


class NotInitializedError(GroupNotInitializedError, AssertionError):
    pass


class InitializedError(AlreadyInitializedError, AssertionError):
    pass


class RefusedError(LayoutError, RuntimeError, AssertionError):
    """Raised for wrong sizes. Has all types that Megatron raises for these."""


@contextmanager
def raised_as(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds:
        raise
    except Exception as error:
        for kind in kinds:
            if isinstance(error, kind.__bases__[0]):
                raise kind(str(error)) from error
        raise


as_assertion = functools.partial(raised_as, NotInitializedError)
as_megatrons = functools.partial(raised_as, NotInitializedError, InitializedError, RefusedError)
