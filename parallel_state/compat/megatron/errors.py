"""This library's usage errors under Megatron's: it raises AssertionError and RuntimeError, which programs catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from device_communicators.base.errors import AlreadyInitializedError, LayoutError
from parallel_state.compat.errors import NotInitializedError as NotInitializedError
from parallel_state.compat.errors import as_assertion


class InitializedError(AlreadyInitializedError, AssertionError):
    """The groups exist already."""


class RefusedError(LayoutError, RuntimeError, AssertionError):
    """Sizes, order or ranks don't fit: Megatron's RuntimeError or AssertionError."""


@contextmanager
def as_megatrons() -> Iterator[None]:
    """Raises what the body raises as the error of this module that is one of Megatron's as well."""
    try:
        with as_assertion():
            yield
    except (InitializedError, RefusedError):
        raise
    except AlreadyInitializedError as error:
        raise InitializedError(str(error)) from error
    except LayoutError as error:
        raise RefusedError(str(error)) from error
