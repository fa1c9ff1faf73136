from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
import torch

import parallel_state as ps
from tests.contract.attempts import attempt, environment, world
from tests.workers import WorkerPool

Pools = Callable[[int], WorkerPool]
DEADLINE_S = 120.0
LATE_S = 0.3


def _group_of(state: dict[str, Any], name: str) -> dict[str, Any]:
    return next(group for group in state["groups"] if group["group"] == name)


def _measured(route: str) -> list[dict[str, Any]]:
    found = []
    with environment(PARALLEL_STATE_SHARED_MEMORY="off" if route == "connections" else None), world(2):
        group = ps.get_tp_group()
        x = torch.ones(1000)
        group.all_reduce(x)
        found.append(_group_of(ps.metrics.snapshot(), group.unique_name))
        ps.metrics.enable()
        try:
            group.barrier()
            if group.rank_in_group == 1:
                time.sleep(LATE_S)
            group.all_reduce(x)
            group.all_gather(x)
            found.append(_group_of(ps.metrics.snapshot(), group.unique_name))
        finally:
            ps.metrics.disable()
        group.all_reduce(x)
        found.append(_group_of(ps.metrics.snapshot(), group.unique_name))
    return found


@pytest.mark.parametrize("route", ["shared memory", "connections"])
def test_what_calls_took_and_who_came_last(pools: Pools, route: str) -> None:
    for rank, (before, while_on, after) in enumerate(pools(2).run(_measured, route, timeout_s=DEADLINE_S)):
        first = before["operations"]["all_reduce"]
        assert (first["seconds"], first["waiting_s"]) == (0.0, None)
        row = while_on["operations"]["all_reduce"]
        assert (row["calls"] - first["calls"], row["bytes"] - first["bytes"]) == (1, 4000)
        assert row["seconds"] == pytest.approx(row["waiting_s"] + row["moving_s"])
        if rank == 0:
            assert LATE_S / 2 < row["waiting_s"] < 10 * LATE_S
            assert while_on["came_last"]["1"] >= 1
        else:
            assert row["waiting_s"] < LATE_S / 2
        assert sum(while_on["came_last"].values()) == 3, "barrier, all_reduce, all_gather"
        assert while_on["last"]["operation"] == "all_gather" and not while_on["last"]["is_under_way"]
        assert after["operations"]["all_reduce"]["calls"] == row["calls"] + 1
        assert after["operations"]["all_reduce"]["seconds"] == row["seconds"], "disabled metrics must not measure time"


def _scraped() -> tuple[str, str, int]:
    with environment(PARALLEL_STATE_METRICS="on"), world(2):
        try:
            group = ps.get_tp_group()
            group.all_reduce(torch.ones(3))
            endpoint = ps.metrics.serve(0)
            try:
                assert str(endpoint) == endpoint.url == f"http://127.0.0.1:{endpoint.port}/metrics"
                with urllib.request.urlopen(endpoint.url, timeout=10) as answer:
                    text = answer.read().decode()
            finally:
                endpoint.close()
            return text, group.unique_name, ps.get_rank()
        finally:
            ps.metrics.disable()


def test_prometheus_reads_them(pools: Pools) -> None:
    for text, name, rank in pools(2).run(_scraped, timeout_s=DEADLINE_S):
        labels = f'rank="{rank}",group="{name}",operation="all_reduce"'
        assert f"parallel_state_calls_total{{{labels}}} 1.0\n" in text
        assert f"parallel_state_bytes_total{{{labels}}} 12.0\n" in text, "bytes of the first call"
        seconds = re.search(re.escape(f"parallel_state_seconds_total{{{labels}}} ") + r"(\S+)", text)
        assert seconds and float(seconds[1]) > 0, "the first call must be measured"
        assert "# TYPE parallel_state_failures_total counter" in text
        for line in text.splitlines():
            assert line.startswith("# ") or re.fullmatch(r'[a-z_]+\{([a-z_]+="[^"]*",?)+\} [0-9.e+-]+', line), line


def _in_a_hang(route: str) -> str:
    with environment(PARALLEL_STATE_SHARED_MEMORY="off" if route == "connections" else None), world(2):
        group = ps.get_tp_group()
        group.barrier()
        texts: list[str] = []
        if group.rank_in_group == 0:
            threading.Timer(LATE_S, lambda: texts.append(ps.metrics.prometheus_text())).start()
        else:
            time.sleep(2 * LATE_S)
            texts.append(ps.metrics.prometheus_text())
        group.all_reduce(torch.ones(3))
        return texts[0]


@pytest.mark.parametrize("route", ["shared memory", "connections"])
def test_the_call_under_way_is_a_gauge(pools: Pools, route: str) -> None:
    waiting, late = pools(2).run(_in_a_hang, route, timeout_s=DEADLINE_S)
    under_way = r'^parallel_state_operation_under_way_seconds\{rank="\d",group="tp:\d+",operation="(\w+)"\} (\S+)$'
    ((name, seconds),) = re.findall(under_way, waiting, re.MULTILINE)
    assert name.startswith("all_reduce") and LATE_S / 2 < float(seconds) < 10 * LATE_S
    assert not re.findall(under_way, late, re.MULTILINE)


def _collected() -> tuple[str, str]:
    from prometheus_client import CollectorRegistry, generate_latest

    with environment(PARALLEL_STATE_METRICS="on"), world(2):
        try:
            registry = CollectorRegistry()
            registry.register(ps.metrics.prometheus_collector())
            ps.get_tp_group().all_reduce(torch.ones(3))
            ps.get_tp_group().barrier()
            return generate_latest(registry).decode(), ps.metrics.prometheus_text()
        finally:
            ps.metrics.disable()


def test_prometheus_client_collects_what_the_endpoint_says(pools: Pools) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client isn't installed")
    for texts in pools(2).run(_collected, timeout_s=DEADLINE_S):
        theirs, ours = (
            {
                (family.name, family.type, family.documentation): {
                    (each.name, *sorted(each.labels.items())): "age" in each.name or each.value
                    for each in family.samples
                }
                for family in parser.text_string_to_metric_families(text)
            }
            for text in texts
        )
        assert theirs == ours and len(ours) == 7
        calls = next(samples for (name, *_), samples in theirs.items() if name == "parallel_state_calls")
        assert {dict(labels)["operation"] for _, *labels in calls} >= {"all_reduce", "barrier"}


def _told_of_operations() -> list[tuple[str, int, int, str, tuple[int, ...], int]]:
    with world(2):
        group, events = ps.get_tp_group(), []
        group.all_reduce(torch.ones(2))

        def fails(event: object) -> None:
            raise KeyError("a mistake of the hook")

        removals = [ps.on_operation(events.append), ps.on_operation(fails)]
        group.all_reduce(torch.ones(2, 3))
        if group.rank_in_group == 0:
            group.send(torch.ones(5))
        else:
            group.recv([5], torch.float32)
        handle = group.all_reduce_async(torch.ones(4))
        assert len(events) == 2, "a started call is reported when it is waited for"
        handle.wait()
        for remove in (*removals, *removals):
            remove()
        group.all_reduce(torch.ones(2))
        assert all(event.group == group.unique_name and event.ranks == (0, 1) for event in events)
        assert all(0 <= event.ended_s - event.started_s < 60 for event in events)
        return [(each.operation, each.sequence, each.bytes, each.dtype, each.shape, each.peer) for each in events]


def test_a_hook_is_told_of_each_operation(pools: Pools) -> None:
    told = pools(2).run(_told_of_operations, timeout_s=DEADLINE_S)
    for rank, events in enumerate(told):
        (first, number, *facts), transfer, started = events
        assert (first, *facts) == ("all_reduce", 24, "float32", (2, 3), -1)
        assert (transfer[0], transfer[-1]) == (("send", "recv")[rank], 1 - rank)
        assert (started[0], started[1]) == ("all_reduce_async", number + 1)


def _told_of_failures() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    with world(2):
        group = ps.get_tp_group()
        remove = ps.on_failure(lambda event: found.append((event.group, type(event.error).__name__)))
        try:
            group.barrier()
            attempt(group.all_reduce if group.rank_in_group else group.all_gather, torch.ones(3))
            attempt(group.all_reduce, torch.ones(3))
        finally:
            remove()
        assert found[0][0] == group.unique_name
        assert _group_of(ps.metrics.snapshot(), group.unique_name)["failures"] == 1
    return found


def test_a_hook_is_told_of_a_groups_first_failure(pools: Pools) -> None:
    for found in pools(2).run(_told_of_failures, timeout_s=DEADLINE_S):
        assert [kind for _, kind in found] == ["CollectiveMismatchError"]


def test_a_snapshot_without_groups() -> None:
    assert ps.metrics.snapshot() == {"rank": -1, "groups": []}
    assert "parallel_state_calls_total" in ps.metrics.prometheus_text()
