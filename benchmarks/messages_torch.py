"""The candidates of `messages`: how each of them sends and receives, and the loop that times one message at a time."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peers
import torch
import torch.distributed as dist
from collectives_torch import use_once
from measure.worker import Timing
from messages import COPY, OURS, TOKENS, WITH_SPEC

import parallel_state as ps

HIDDEN = 4096
GAP_S = 100e-6  # between "all readers are about to wait" and the sender's call
DEADLINE_S = 60.0


class Exchange(NamedTuple):
    """How rank 0 sends the case's value, and how another rank receives it."""

    send: Callable[[], Any]
    receive: Callable[[], Any]


def make(name: str, settings: dict[str, Any]) -> MessageTeam:
    return MessageTeam(settings)


class MessageTeam:
    """Rank 0 sends, all others read."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        ps.init_distributed_environment(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        ps.initialize_model_parallel(self.size)
        self.group = ps.get_tp_group()
        use_once(self.group)
        self.vllm = None
        if settings["vllm"] is not None and self.size in (2, 3, 4, 8):
            self.vllm = peers.vllm_group(Path(settings["vllm"]), self.rank, [list(range(self.size))], queue=True)
        self.sockets = _Sockets(settings, self.rank, self.size) if settings["site"] is not None else None
        self.entered = _Entered(Path(settings["folder"]), self.rank, self.size)

    def prepare(self, values: dict[str, Any]) -> list[str]:
        self.idle_s = values["idle_ms"] / 1e3
        self.value = _object(values["what"]) if values["kind"] == "object" else _tensors(values["kind"], values["what"])
        self.tensors = [x for x in self.value.values() if isinstance(x, torch.Tensor)]
        self.exchanges = {"object": self._objects, "broadcast": self._broadcasts, "pipeline": self._pipeline}[
            values["kind"]
        ]()
        names = list(self.exchanges)
        if self.tensors:
            self.room = [torch.empty_like(x) for x in self.tensors]
            names.append(COPY)
        return names

    def _objects(self) -> dict[str, Exchange]:
        group, value = self.group, self.value
        found = {
            OURS: Exchange(lambda: group.broadcast_object(value, 0), lambda: group.broadcast_object(None, 0)),
            "gloo": Exchange(lambda: _broadcast_object_of_torch(value), lambda: _broadcast_object_of_torch(None)),
        }
        if self.vllm is not None:
            queue = self.vllm.mq_broadcaster
            found["vLLM"] = Exchange(lambda: queue.enqueue(value), lambda: queue.dequeue(timeout=DEADLINE_S))
        if self.sockets is not None:
            sockets = self.sockets
            found["zmq + msgpack"] = Exchange(lambda: sockets.send(value), sockets.receive)
        return found

    def _broadcasts(self) -> dict[str, Exchange]:
        group, value = self.group, self.value
        spec = ps.TensorDictSpec.of(value)
        found = {
            OURS: Exchange(lambda: group.broadcast_tensor_dict(value, 0), lambda: group.broadcast_tensor_dict(None, 0)),
            WITH_SPEC: Exchange(
                lambda: group.broadcast_tensor_dict(value, 0, spec=spec),
                lambda: group.broadcast_tensor_dict(None, 0, spec=spec),
            ),
            "gloo": Exchange(lambda: _broadcast_dict_of_torch(value), lambda: _broadcast_dict_of_torch(None)),
        }
        if self.vllm is not None:
            vllm = self.vllm
            found["vLLM"] = Exchange(lambda: vllm.broadcast_tensor_dict(value, 0), lambda: vllm.broadcast_tensor_dict())
        return found

    def _pipeline(self) -> dict[str, Exchange]:
        group, value = self.group, self.value
        spec = ps.TensorDictSpec.of(value)
        found = {
            OURS: Exchange(lambda: group.send_tensor_dict(value, 1), lambda: group.recv_tensor_dict(0)),
            WITH_SPEC: Exchange(
                lambda: group.send_tensor_dict(value, 1, spec=spec), lambda: group.recv_tensor_dict(0, spec=spec)
            ),
            "gloo": Exchange(lambda: _send_dict_of_torch(value), _receive_dict_of_torch),
        }
        if self.vllm is not None:
            vllm = self.vllm
            found["vLLM"] = Exchange(lambda: vllm.send_tensor_dict(value, 1), lambda: vllm.recv_tensor_dict(0))
        return found

    def close(self) -> None:
        if self.vllm is not None:
            self.vllm.destroy()

    def check(self, name: str) -> str | None:
        if name == COPY:
            return None
        with torch.inference_mode():
            self.entered.meet()
            if self.rank == 0:
                self.exchanges[name].send()
                return None
            received = self.exchanges[name].receive()
        return None if _equal(received, self.value) else f"{name}: rank {self.rank} received something else"

    def run(self, name: str, calls: int) -> Timing:
        with torch.inference_mode():
            if name == COPY:
                return self._copies(calls)
            exchange = self.exchanges[name]
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
        """Rank 0 alone: once through the bytes."""
        started = time.perf_counter()
        for _ in range(calls if self.rank == 0 else 0):
            for x, room in zip(self.tensors, self.room, strict=True):
                room.copy_(x)
        return Timing(elapsed_s=time.perf_counter() - started)


class _Entered:
    """How many messages each rank has begun with, in memory that all map: the sender waits until no reader is behind.

    Polls with naps, so that it takes no core from a reader; readers go right on.
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


class _Sockets:
    """zmq by itself: a pair of sockets for each reader, objects as msgpack."""

    def __init__(self, settings: dict[str, Any], rank: int, size: int) -> None:
        sys.path.append(settings["site"])
        import msgpack  # type: ignore[import-not-found]
        import zmq  # type: ignore[import-not-found]

        self.pack, self.unpack = msgpack.packb, msgpack.unpackb
        context = zmq.Context()
        addresses = [f"ipc://{settings['folder']}/{reader}" for reader in range(1, size)]
        self.sockets = [context.socket(zmq.PAIR) for _ in (addresses if rank == 0 else addresses[:1])]
        for socket in self.sockets:
            socket.RCVTIMEO = socket.SNDTIMEO = int(DEADLINE_S * 1000)
        if rank:
            self.sockets[0].connect(addresses[rank - 1])
        else:
            for socket, address in zip(self.sockets, addresses, strict=True):
                socket.bind(address)

    def send(self, value: Any) -> None:
        packed = self.pack(value)
        for socket in self.sockets:
            socket.send(packed, copy=False)

    def receive(self) -> Any:
        return self.unpack(self.sockets[0].recv(copy=False).buffer)


# The values.


def _object(what: str) -> Any:
    if what == "1 MB blob":
        return {"step": 1, "blob": bytes(range(256)) * 4096}
    requests = {"1 KB": 18, "10 KB": 215, "1 MB many": 17_000}[what]  # pickled, that is their size
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


# The usual way over torch.distributed: pickled metadata, then tensor by tensor.


def _broadcast_object_of_torch(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def _metadata(value: dict[str, Any]) -> tuple[list[tuple[str, Any]], list[torch.Tensor]]:
    described: list[tuple[str, Any]] = []
    tensors = []
    for key, each in value.items():
        if isinstance(each, torch.Tensor):
            described.append((key, ("tensor", tuple(each.shape), each.dtype)))
            tensors.append(each)
        else:
            described.append((key, each))
    return described, tensors


def _rooms(described: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {}
    for key, each in described:
        is_tensor = isinstance(each, tuple) and each[0] == "tensor"
        found[key] = torch.empty(each[1], dtype=each[2]) if is_tensor else each
    return found


def _broadcast_dict_of_torch(value: dict[str, Any] | None) -> dict[str, Any]:
    described, tensors = _metadata(value) if value is not None else (None, [])
    described = _broadcast_object_of_torch(described)
    if value is None:
        value = _rooms(described)
        tensors = [each for each in value.values() if isinstance(each, torch.Tensor)]
    for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]:
        work.wait()
    return value


def _send_dict_of_torch(value: dict[str, Any]) -> None:
    described, tensors = _metadata(value)
    dist.send_object_list([described], 1)
    for tensor in tensors:
        dist.send(tensor, 1)


def _receive_dict_of_torch() -> dict[str, Any]:
    values: list[Any] = [None]
    dist.recv_object_list(values, 0)
    found = _rooms(values[0])
    for each in found.values():
        if isinstance(each, torch.Tensor):
            dist.recv(each, 0)
    return found
