"""Teams (the processes of one library) that exchange messages. The receivers already wait when a timed send begins."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import parallel_state as ps
from harness import peers
from harness.collectives import VLLM, load, start_ours, start_torch
from parallel_state.tools.bench.rounds import GLOO, OWN, Timing

__all__ = ["load", "make"]

KINDS = ("object", "broadcast", "pipeline")
OBJECTS = ("1 KB", "10 KB", "1 MB many", "1 MB blob")
TOKENS = {"decode": 1, "prefill": 256}
WITH_SPEC, COPY, ZMQ = "parallel_state spec", "(copying the bytes)", "zmq + msgpack"
VIEWS, SPEC_VIEWS = "parallel_state views", "parallel_state spec + views"
HIDDEN = 4096
GAP_S = 100e-6  # pause from the readers' last note to the sender's call
DEADLINE_S = 60.0


class Exchange(NamedTuple):
    send: Callable[[], Any]
    receive: Callable[[], Any]


def make(name: str, settings: dict[str, Any]) -> MessageTeam:
    return TEAMS[name](settings)


class MessageTeam:
    rank: int
    size: int
    measures_copies = False

    def __init__(self, settings: dict[str, Any]) -> None:
        self.start(settings)
        self.entered = _Entered(Path(settings["folder"]), self.rank, self.size)

    def start(self, settings: dict[str, Any]) -> None:
        raise NotImplementedError

    def exchanges(self, kind: str, value: Any) -> dict[str, Exchange]:
        raise NotImplementedError

    def prepare(self, values: dict[str, Any]) -> list[str]:
        self.idle_s = values["idle_ms"] / 1e3
        self.value = _object(values["what"]) if values["kind"] == "object" else _tensors(values["kind"], values["what"])
        self.tensors = _tensors_of(self.value)
        self.calls = self.exchanges(values["kind"], self.value)
        names = list(self.calls)
        if self.tensors and self.measures_copies:
            self.room = [torch.empty_like(x) for x in self.tensors]
            names.append(COPY)
        return names

    def check(self, name: str) -> str | None:
        if name == COPY:
            return None
        with torch.inference_mode():
            self.entered.meet()
            if self.rank == 0:
                self.calls[name].send()
                return None
            received = self.calls[name].receive()
        return None if _equal(received, self.value) else f"{name}: rank {self.rank} received something else"

    def run(self, name: str, calls: int) -> Timing:
        with torch.inference_mode():
            if name == COPY:
                return self._copies(calls)
            exchange = self.calls[name]
            if self.rank == 0:
                return Timing(starts_ns=[self._send(exchange.send) for _ in range(calls + 1)][1:])
            return Timing(ends_ns=[self._receive(exchange.receive) for _ in range(calls + 1)][1:])

    def _send(self, send: Callable[[], Any]) -> int:
        self.entered.meet()
        if self.idle_s:
            time.sleep(self.idle_s)
        else:
            until = time.perf_counter() + GAP_S
            while time.perf_counter() < until:
                pass
        started = time.monotonic_ns()
        send()
        return started

    def _receive(self, receive: Callable[[], Any]) -> int:
        self.entered.meet()
        receive()
        return time.monotonic_ns()

    def _copies(self, calls: int) -> Timing:
        started = time.perf_counter()
        for _ in range(calls if self.rank == 0 else 0):
            for x, room in zip(self.tensors, self.room, strict=True):
                room.copy_(x)
        return Timing(elapsed_s=time.perf_counter() - started)


class OwnTeam(MessageTeam):
    measures_copies = True

    def start(self, settings: dict[str, Any]) -> None:
        self.group = start_ours()
        self.rank, self.size = self.group.rank_in_group, self.group.world_size

    def exchanges(self, kind: str, value: Any) -> dict[str, Exchange]:
        group = self.group
        if kind == "object":
            return {OWN: Exchange(lambda: group.broadcast_object(value, 0), lambda: group.broadcast_object(None, 0))}
        spec = ps.TensorDictSpec.of(value)
        send: Callable[..., Any] = partial(group.send_tensor_dict, value, 1)
        receive: Callable[..., Any] = partial(group.recv_tensor_dict, 0)
        if kind == "broadcast":
            send, receive = (partial(group.broadcast_tensor_dict, given, 0) for given in (value, None))
        views, by_spec = partial(receive, views=True), partial(send, spec=spec)
        return {
            OWN: Exchange(send, receive),
            WITH_SPEC: Exchange(by_spec, partial(receive, spec=spec)),
            VIEWS: Exchange(send, views),
            SPEC_VIEWS: Exchange(by_spec, partial(views, spec=spec)),
        }


class TorchTeam(MessageTeam):
    def start(self, settings: dict[str, Any]) -> None:
        self.rank, self.size, _ = start_torch()

    def exchanges(self, kind: str, value: Any) -> dict[str, Exchange]:
        if kind == "pipeline":
            return {GLOO: Exchange(lambda: _send_dict_of_torch(value), _receive_dict_of_torch)}
        broadcast = _broadcast_object_of_torch if kind == "object" else _broadcast_dict_of_torch
        return {GLOO: Exchange(lambda: broadcast(value), lambda: broadcast(None))}


class VllmTeam(MessageTeam):
    def start(self, settings: dict[str, Any]) -> None:
        self.rank, self.size, _ = start_torch()
        self.group = peers.vllm_group(Path(settings["vllm"]), self.rank, [list(range(self.size))], queue=True)

    def close(self) -> None:
        self.group.destroy()

    def exchanges(self, kind: str, value: Any) -> dict[str, Exchange]:
        group, queue = self.group, self.group.mq_broadcaster
        exchange = {
            "object": Exchange(lambda: queue.enqueue(value), lambda: queue.dequeue(timeout=DEADLINE_S)),
            "broadcast": Exchange(lambda: group.broadcast_tensor_dict(value, 0), lambda: group.broadcast_tensor_dict()),
            "pipeline": Exchange(lambda: group.send_tensor_dict(value, 1), lambda: group.recv_tensor_dict(0)),
        }[kind]
        return {VLLM: exchange}


class ZmqTeam(MessageTeam):
    def start(self, settings: dict[str, Any]) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        sys.path.append(settings["site"])
        import msgpack  # type: ignore[import-not-found]
        import zmq  # type: ignore[import-not-found]

        self.pack, self.unpack = msgpack.packb, msgpack.unpackb
        context = zmq.Context()
        addresses = [f"ipc://{settings['folder']}/{reader}" for reader in range(1, self.size)]
        self.sockets = [context.socket(zmq.PAIR) for _ in (addresses if self.rank == 0 else addresses[:1])]
        for socket in self.sockets:
            socket.RCVTIMEO = socket.SNDTIMEO = int(DEADLINE_S * 1000)
        if self.rank:
            self.sockets[0].connect(addresses[self.rank - 1])
        else:
            for socket, address in zip(self.sockets, addresses, strict=True):
                socket.bind(address)

    def exchanges(self, kind: str, value: Any) -> dict[str, Exchange]:
        if kind != "object":
            return {}
        receive = self.sockets[0].recv
        return {ZMQ: Exchange(lambda: self._post(value), lambda: self.unpack(receive(copy=False).buffer))}

    def _post(self, value: Any) -> None:
        packed = self.pack(value)
        for socket in self.sockets:
            socket.send(packed, copy=False)


TEAMS = {OWN: OwnTeam, GLOO: TorchTeam, VLLM: VllmTeam, ZMQ: ZmqTeam}


class _Entered:
    """Makes the sender wait until all receivers are ready, by counters in shared memory. The sender sleeps between
    polls, to leave the core to a receiver.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        file = os.open(folder / "entered", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, 4096)
        self.counts = memoryview(mmap.mmap(file, 4096)).cast("q")
        os.close(file)
        self.rank, self.size = rank, size

    def meet(self) -> None:
        self.counts[self.rank] += 1
        if self.rank:
            return
        deadline = time.monotonic() + DEADLINE_S
        while min(self.counts[1 : self.size]) < self.counts[0]:
            if time.monotonic() > deadline:
                raise TimeoutError("a reader did not come to its next message")
            time.sleep(20e-6)


def case_bytes(kind: str, what: str) -> int:
    if kind == "object":
        return {"1 KB": 1 << 10, "10 KB": 10 << 10}.get(what, 1 << 20)
    return TOKENS[what] * HIDDEN * 2 * (2 if kind == "pipeline" else 10)


def _object(what: str) -> Any:
    if what == "1 MB blob":
        return {"step": 1, "blob": bytes(range(256)) * 4096}
    requests = {"1 KB": 18, "10 KB": 215, "1 MB many": 17_000}[what]
    return {
        "step": 12345,
        "finished": [f"request-{number}" for number in range(requests // 4)],
        "requests": [
            {"id": f"request-{number}", "tokens": [number, 17, 40_000 + number], "blocks": [number * 4], "done": False}
            for number in range(requests)
        ],
        "temperature": 0.7,
    }


def _tensors(kind: str, what: str) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (TOKENS[what], HIDDEN)
    if kind == "pipeline":
        return {name: torch.randn(shape).to(torch.bfloat16) for name in ("hidden_states", "residual")}
    tensors: dict[str, Any] = {f"tensor_{number}": torch.randn(shape).to(torch.bfloat16) for number in range(10)}
    return {**tensors, "step": 7, "is_prompt": what == "prefill", "temperature": 0.7, "name": "batch"}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(other, dict):
        return (
            isinstance(one, dict) and one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in other)
        )
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def _broadcast_object_of_torch(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def _tensors_of(value: dict[str, Any]) -> list[torch.Tensor]:
    return [each for each in value.values() if isinstance(each, torch.Tensor)]


def _described(value: dict[str, Any]) -> list[tuple[str, Any]]:
    def of(each: Any) -> Any:
        return ("tensor", tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else each

    return [(key, of(each)) for key, each in value.items()]


def _rooms(described: list[tuple[str, Any]]) -> dict[str, Any]:
    def of(each: Any) -> Any:
        return torch.empty(each[1], dtype=each[2]) if isinstance(each, tuple) and each[0] == "tensor" else each

    return {key: of(each) for key, each in described}


def _broadcast_dict_of_torch(value: dict[str, Any] | None) -> dict[str, Any]:
    described = _broadcast_object_of_torch(None if value is None else _described(value))
    if value is None:
        value = _rooms(described)
    for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in _tensors_of(value)]:
        work.wait()
    return value


def _send_dict_of_torch(value: dict[str, Any]) -> None:
    dist.send_object_list([_described(value)], 1)
    for tensor in _tensors_of(value):
        dist.send(tensor, 1)


def _receive_dict_of_torch() -> dict[str, Any]:
    values: list[Any] = [None]
    dist.recv_object_list(values, 0)
    found = _rooms(values[0])
    for each in _tensors_of(found):
        dist.recv(each, 0)
    return found
