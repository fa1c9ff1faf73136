"""Metrics of this rank's groups: calls, bytes, moving and waiting times, late ranks, failures.

    parallel_state.metrics.enable()             # or PARALLEL_STATE_METRICS=on
    parallel_state.metrics.snapshot()           # {"rank": 0, "groups": [{"group": "tp:0", …}]}
    print(parallel_state.metrics.serve(9400))   # http://127.0.0.1:9400/metrics

Times are measured only while enabled. Calls and bytes are always counted.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Any

from device_communicators.base.errors import UnsupportedError
from device_communicators.base.helper_threads import HelperThread
from device_communicators.routing import observers
from device_communicators.routing.registry import routes
from device_communicators.routing.route import Route

__all__ = ["disable", "enable", "is_enabled", "prometheus_collector", "prometheus_text", "serve", "snapshot"]


def enable() -> None:
    """Starts to measure the operations of all groups, also of groups created later."""
    _switch(True)


def disable() -> None:
    """Stops measuring. Values so far are kept."""
    _switch(False)


def is_enabled() -> bool:
    return observers.METERS.is_on


def _switch(on: bool) -> None:
    observers.measure(on)
    for route in routes():
        observers.switch_native_meter(route.context)


def snapshot() -> dict[str, Any]:
    """Returns the metrics as JSON-compatible values. May be called from any thread.

    `rank` is this process's global rank, or -1 without groups. Each of `groups` (of two or more ranks) has:

    - `group`, `ranks` (global), `failures` (1 if the group failed, else 0);
    - `operations`: method -> number of `calls`, `bytes` of this rank's tensors, and the measured time in `seconds`. In
      shared memory this time is divided into `waiting_s`, the waits for other ranks, and `moving_s`, the rest; without
      shared memory both are None;
    - `came_last`: global rank -> number of measured calls over shared memory for which that rank arrived last;
    - `last`: the last `operation`, `seconds_since` it started, and whether it `is_under_way`.
    """
    found = routes()
    rank = found[0].context.global_rank if found else -1
    return {"rank": rank, "groups": [_of_group(route) for route in found]}


def _of_group(route: Route) -> dict[str, Any]:
    context = route.context
    traffic, collectives = route.traffic(), context.collectives
    meter = None if collectives is None else collectives.meter()
    taken = {} if meter is None else meter.taken
    by_python: dict[str, float] = observers.METERS.took_s.get(context.name, {})
    operations: dict[str, Any] = {}
    for name in sorted({*traffic, *taken, *by_python}):
        counted, row = traffic.get(name), taken.get(name)
        operations[name] = {
            "calls": counted.calls if counted is not None else row.calls if row is not None else 0,
            "bytes": 0 if counted is None else counted.bytes,
            "seconds": row.took_s if row is not None else by_python.get(name, 0.0),
            "waiting_s": None if row is None else row.waited_s,
            "moving_s": None if row is None else row.took_s - row.waited_s,
        }
    last = next(reversed(route.operations()), None)
    return {
        "group": context.name,
        "ranks": list(context.ranks),
        "failures": int(route.first_failure is not None),
        "operations": operations,
        "came_last": {} if meter is None else {str(rank): count for rank, count in meter.last.items() if count},
        "last": None
        if last is None
        else {
            "operation": last.name,
            "seconds_since": time.monotonic() - last.started_s,
            "is_under_way": last.ended_s is None and route.first_failure is None,
        },
    }


_BY_OPERATION = (
    ("calls", "calls", "Started operations."),
    ("bytes", "bytes", "Bytes of this rank's tensors."),
    ("seconds", "seconds", "Measured seconds in operations."),
    ("waiting_seconds", "waiting_s", "Measured seconds in which operations waited for other ranks."),
)


def prometheus_text() -> str:
    """Returns the metrics in Prometheus' text format, version 0.0.4."""
    state = snapshot()
    of_rank = {"rank": str(state["rank"])}
    groups = [({**of_rank, "group": group["group"]}, group) for group in state["groups"]]
    lines: list[str] = []

    def add(name: str, kind: str, text: str, samples: Iterable[tuple[dict[str, str], float]]) -> None:
        name, found = f"parallel_state_{name}", list(samples)
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}") if found or kind == "counter" else ())
        for labels, value in found:
            written = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            lines.append(f"{name}{{{written}}} {float(value)!r}")

    for name, key, text in _BY_OPERATION:
        add(f"{name}_total", "counter", text, (
            ({**labels, "operation": operation}, facts[key])
            for labels, group in groups
            for operation, facts in group["operations"].items()
            if facts[key] is not None
        ))  # fmt: skip
    add("came_last_total", "counter", "Measured calls for which a rank arrived last.", (
        ({**labels, "last_rank": rank}, count)
        for labels, group in groups for rank, count in group["came_last"].items()
    ))  # fmt: skip
    add("failures_total", "counter", "Failures of a group.", ((labels, group["failures"]) for labels, group in groups))
    add("operation_under_way_seconds", "gauge", "Seconds since the running call started; absent without one.", (
        ({**labels, "operation": group["last"]["operation"]}, group["last"]["seconds_since"])
        for labels, group in groups if group["last"] is not None and group["last"]["is_under_way"]
    ))  # fmt: skip
    add("last_operation_age_seconds", "gauge", "Seconds since the last operation started.", (
        ({**labels, "operation": group["last"]["operation"]}, group["last"]["seconds_since"])
        for labels, group in groups if group["last"] is not None
    ))  # fmt: skip
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def prometheus_collector() -> Any:
    """Returns a collector of the metrics, to pass to `prometheus_client.REGISTRY.register`."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise UnsupportedError(
            "prometheus_client isn't installed; install it, or use prometheus_text() or serve(), which don't need it"
        ) from error

    class Collector:
        def collect(self) -> Iterable[Any]:
            return text_string_to_metric_families(prometheus_text())

    return Collector()


class Endpoint:
    def __init__(self, address: str, port: int) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                content = prometheus_text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None: ...

        class Server(ThreadingHTTPServer):
            def process_request(self, request: Any, client_address: Any) -> None:
                HelperThread("metrics-get", self.process_request_thread, request, client_address).start()

        self._server = Server((address, port), Handler)
        self.port = int(self._server.server_address[1])
        host = socket.gethostname() if address in ("", "0.0.0.0", "::") else address
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        self._thread = HelperThread("metrics", self._server.serve_forever)
        self._thread.start()

    def __str__(self) -> str:
        return self.url

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


def serve(port: int, address: str = "127.0.0.1") -> Endpoint:
    """Enables the metrics and serves them by HTTP at `port` (0: any free one) until the returned server's `close()`.

    Every process that reaches the address can read them. Raises OSError if the port is taken.
    """
    endpoint = Endpoint(address, port)
    enable()
    return endpoint
