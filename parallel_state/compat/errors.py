"""Errors that also have the type which an engine's callers catch, such as AssertionError."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from device_communicators.base.errors import GroupNotInitializedError


class NotInitializedError(GroupNotInitializedError, AssertionError):
    """The requested group does not exist."""


@contextmanager
def raised_as(*kinds: type[Exception]) -> Iterator[None]:
    """Converts an error of the body to the first kind in `kinds` whose first base class matches it.

    Other errors are raised unchanged.
    """
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
