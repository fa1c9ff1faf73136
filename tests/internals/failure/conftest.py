from __future__ import annotations

from tests.failure.conftest import _side_by_side, nothing_left, pytest_pyfunc_call, ranks  # noqa: F401
