from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(cases: Iterable[Any], check: Callable[..., object], name: Callable[[Any], object] = repr) -> None:
    failed, tried = [], 0
    for case in cases:
        tried += 1
        try:
            check(*case) if isinstance(case, tuple) else check(case)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{name(case)}: {type(error).__name__}: {error}")
    assert tried, "there was no case"
    assert not failed, "\n".join([f"{len(failed)} of {tried} cases failed", *failed])
