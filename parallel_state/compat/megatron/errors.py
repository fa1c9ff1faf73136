"""Usage errors that are also an AssertionError or RuntimeError, which callers of Megatron catch."""

from __future__ import annotations

import functools

from device_communicators.base.errors import AlreadyInitializedError, LayoutError
from parallel_state.compat.errors import NotInitializedError as NotInitializedError
from parallel_state.compat.errors import raised_as


class InitializedError(AlreadyInitializedError, AssertionError):
    """The groups exist already."""


class RefusedError(LayoutError, RuntimeError, AssertionError):
    """Sizes, order or ranks don't fit. Megatron raises RuntimeError or AssertionError."""


as_megatrons = functools.partial(raised_as, NotInitializedError, InitializedError, RefusedError)
