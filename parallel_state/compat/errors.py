"""The error of getters that vLLM's and Megatron's callers catch: theirs assert that a group is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from device_communicators.base.errors import GroupNotInitializedError


class NotInitializedError(GroupNotInitializedError, AssertionError):
    """A group was asked for that isn't there."""


@contextmanager
def as_assertion() -> Iterator[None]:
    """Raises the body's GroupNotInitializedError as one that is an AssertionError as well."""
    try:
        yield
    except NotInitializedError:
        raise
    except GroupNotInitializedError as error:
        raise NotInitializedError(str(error)) from error
