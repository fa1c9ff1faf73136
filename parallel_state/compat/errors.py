"""Errors of ours that are also of a type that an engine's callers catch, such as the AssertionError of its getters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from device_communicators.base.errors import GroupNotInitializedError


class NotInitializedError(GroupNotInitializedError, AssertionError):
    """A group was asked for that isn't there."""


@contextmanager
def raised_as(*kinds: type[Exception]) -> Iterator[None]:
    """Converts an error of the body to the first of `kinds` whose first base it is an instance of.

    Other errors pass unchanged.
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
