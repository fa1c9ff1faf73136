from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from device_communicators.base.errors import InvalidArgumentError
from parallel_state import GroupOptions
from parallel_state.process_groups.options import check_backend, seconds

has_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")


def test_what_is_left_out_is_the_divisions() -> None:
    assert GroupOptions().resolve("gloo", 5.0) == GroupOptions("gloo", 5.0)
    assert GroupOptions("fake", 7).resolve("gloo", 5.0, known="fake") == GroupOptions("fake", 7.0)
    assert GroupOptions(timeout=timedelta(minutes=1)).resolve("gloo", 5.0).timeout_s == 60.0
    known = GroupOptions("whatever").resolve("gloo", 5.0, known="whatever")
    assert known.backend == "whatever", "a backend that there is a group of needs no check"


def test_other_backends_take_no_notice_of_nccls_options() -> None:
    tuned = GroupOptions(high_priority_stream=True, cga_cluster_size=2, min_ctas=1, max_ctas=4)
    assert tuned.resolve("gloo", 5.0) == GroupOptions("gloo", 5.0)
    assert tuned.resolve("gloo", 5.0).for_backend() is None
    kept = tuned.resolve("nccl", 5.0)
    assert (kept.high_priority_stream, kept.cga_cluster_size, kept.min_ctas, kept.max_ctas) == (True, 2, 1, 4)
    assert GroupOptions().resolve("nccl", 5.0).for_backend() is None


def test_the_gloo_group_beside_has_the_same_deadline() -> None:
    assert GroupOptions("nccl", 5.0, max_ctas=4).for_cpu == GroupOptions("gloo", 5.0)
    for alone in (GroupOptions("gloo", 5.0), GroupOptions("fake", 5.0)):
        assert alone.for_cpu is alone


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (GroupOptions("xyz"), "backend .* must be one of .*gloo.*, but is 'xyz'"),
        (GroupOptions(5), "backend must be a str, but is 5"),  # type: ignore[arg-type]
        (GroupOptions(timeout=0), "timeout must be a positive number of seconds or a timedelta, but is 0"),
        (GroupOptions(timeout=True), "timeout"),
        (GroupOptions(high_priority_stream=1), "high_priority_stream must be a bool, but is 1"),  # type: ignore[arg-type]
        (GroupOptions(cga_cluster_size=-1), "cga_cluster_size must be an int of at least 0, or None, but is -1"),
        (GroupOptions(min_ctas=0), "min_ctas must be an int of at least 1"),
        (GroupOptions(max_ctas=True), "max_ctas must be an int"),
        (GroupOptions(min_ctas=8, max_ctas=4), "min_ctas must be at most max_ctas, 4, but is 8"),
    ],
)
def test_what_can_not_be(options: GroupOptions, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        options.resolve("gloo", 5.0)


@has_nccl
def test_what_nccl_is_told() -> None:
    options = GroupOptions("nccl", 5.0, True, cga_cluster_size=2, min_ctas=1, max_ctas=4).for_backend()
    assert options.is_high_priority_stream
    assert options._timeout == timedelta(seconds=5)
    assert (options.config.cga_cluster_size, options.config.min_ctas, options.config.max_ctas) == (2, 1, 4)
    few: Any = GroupOptions("cpu:gloo,cuda:nccl", 5.0, max_ctas=4).for_backend()
    assert few.config.max_ctas == 4
    assert not few.is_high_priority_stream


def test_seconds() -> None:
    assert seconds(3) == 3.0
    assert seconds(timedelta(milliseconds=1500)) == 1.5
    for wrong in ("5", -1, float("nan"), float("inf"), True, []):
        with pytest.raises(InvalidArgumentError, match="timeout"):
            seconds(wrong)


def test_backends_of_several_devices() -> None:
    check_backend("cpu:gloo")
    check_backend("gloo")
    for wrong in ("cpu:gloo,cuda:xyz", "", 5, None):
        with pytest.raises(InvalidArgumentError, match="backend"):
            check_backend(wrong)
