"""Sets up, tests and launches a group's kernels in peer memory (GPU memory that all ranks have mapped).

A kernel waits for peers on the device. When the host sets the *abort* word, the kernel writes a *report* into host
memory and ends. At the deadline it writes the report and traps, which destroys the CUDA context. The group's next call
raises the failure. Results of all calls until then are undefined.

Calls on several streams run one after another. The program must order replays of captured calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from device_communicators.base import settings
from device_communicators.base.errors import CollectiveTimeoutError, CommunicationError
from device_communicators.base.helper_threads import HelperThread
from device_communicators.calls.reductions import FP8
from device_communicators.cuda.streams import StreamOrder
from device_communicators.peer.device import HostWords, PeerDevice
from device_communicators.peer.kernels import (
    KERNELS,
    MAX_THREADS,
    REGION_BYTES,
    Call,
    Launcher,
    grid,
    norm_grid,
    read_report,
)
from device_communicators.peer.memory import NotSharedError, PeerMemory, hold, release, run_on_all_ranks, share
from device_communicators.peer.thresholds import ALGORITHMS, Admission, Thresholds, agree
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died

logger = logging.getLogger("parallel_state")

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

_PROOFS = (
    *(("all_reduce", how) for how in ALGORITHMS),
    *((name, how) for name in ("all_gather", "reduce_scatter") for how in ("push", "pull")),
)
_NORM = "all_reduce_add_rms_norm"
_MOST_PREPARED = 4096

_CallKey = tuple[str, str, "torch.dtype | None", int, int]

_REPORT, _ABORT, _WORDS = 0, 16, 32
"""Indexes of the report and abort words, on separate cache lines, and the number of words."""
_PROOF_S = 30.0
_GOODBYE_S = 10.0
_STEP_S = 0.0005
_POLL_S = 0.2


class PeerGroup:
    def __init__(self, context: GroupContext, device: PeerDevice, admission: Admission, memory: PeerMemory) -> None:
        self.context = context
        self.admission = admission
        self.memory = memory
        self.streams = device.streams
        self._kernels: Launcher | None = None
        self._words: HostWords
        self._share_of_timeout = 1.0
        self._prepared: dict[_CallKey, tuple[str, int, int, Call]] = {}
        self.max_blocks = 0
        """Every rank's device can hold this many blocks of any kernel."""
        self._order = StreamOrder(device.streams)
        self._failure: CommunicationError | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        algorithm = self.admission.pinned
        what = f"{algorithm} for every size" if algorithm else str(self.admission.thresholds)
        return f"{self.memory}; {what}"

    @classmethod
    def set_up(cls, context: GroupContext, device: PeerDevice, thresholds: Thresholds | None = None) -> PeerGroup:
        """Creates the group and tests its kernels. Every rank must call this. If a step fails on one rank, all ranks
        raise NotSharedError. `thresholds`: largest message for each kernel; default: from measurements.
        """
        started = time.monotonic()
        is_auto = thresholds is None and settings.PEER_MEMORY.get() == "auto"
        admission = agree(context, device, thresholds, is_auto=is_auto)
        memory = share(context, REGION_BYTES, device.ways)
        group = cls(context, device, admission, memory)
        try:
            group.max_blocks = min(run_on_all_ranks(context, "load kernels", lambda: group._load(device)))
            run_on_all_ranks(context, "prove kernels", group.prove)
        except BaseException:
            group.close()
            raise
        logger.info("%s: peer memory, %s, ready after %.2f s", context, group, time.monotonic() - started)
        return group

    def _load(self, device: PeerDevice) -> int:
        context = self.context
        self._words = device.words(_WORDS)
        hold(self._words)
        if context.watcher is not None:
            context.watcher.on_death.append(self._abort_on_death)
        HelperThread("peers", self._watch_words).start()
        self._kernels = kernels = device.kernels()
        sharers = len(self.admission.topology.sharers(context.rank)) or 1  # with MPS, all ranks of a GPU run at once
        return max(1, min(kernels.resident_blocks(name, MAX_THREADS) for name in KERNELS) // sharers)

    def prove(self) -> None:
        """Runs each kernel once. Raises NotSharedError for wrong results, but only after the last kernel, because each
        kernel needs all ranks.
        """
        timeout_s = min(_PROOF_S, self.context.timeout_s / 2)
        # Before the kernels' own deadline. `run_on_all_ranks` may time out after 0.75 of the timeout.
        self._share_of_timeout = 0.6
        wrong = []
        with self.streams.guard():
            for what, attempt in self._proofs():
                try:
                    found, expected = attempt()
                    done = self._is_done(timeout_s)
                except CommunicationError as error:
                    self._raise_death()
                    raise NotSharedError(f"the test call of {what} failed: {error}") from error
                if not done:
                    self._raise_death()
                    raise NotSharedError(f"the test call of {what} was not done within {timeout_s:g} s")
                if not torch.equal(found, expected):
                    wrong.append(what)
        if wrong:
            self._raise_death()
            raise NotSharedError(
                f"the test call of {wrong[0]} returned a wrong result; check that the GPUs can access each other's "
                "memory"
            )
        self._share_of_timeout = 1.0

    def _proofs(self) -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor]]]]:
        for number, (name, how) in enumerate(_PROOFS, 1):
            yield f"{name} ({how})", functools.partial(self._try, name, how, number)
        # The norms' results are exact: y is 1.
        rows, hidden = 3, 96
        x = torch.arange(rows * hidden, dtype=torch.float32, device=self.context.device).view(rows, hidden)
        residual, weight = 1 - x * self.context.size, (x[0] % 8 + 1) * 64  # 64 … 512; float8 is exact up to 448
        quantized = (weight - (weight == 512) * 64).expand(rows, hidden)
        one = torch.ones(1, device=self.context.device)

        def plain() -> tuple[Tensor, Tensor]:
            normed, y = self.norm("", x, residual, weight, 0.0)
            return torch.cat([normed, y]), torch.cat([weight.expand(rows, hidden), torch.ones_like(x)])

        def static_fp8() -> tuple[Tensor, Tensor]:
            return self.norm("_static_fp8", x, residual, weight, 0.0, one)[0].float(), quantized

        def token_fp8() -> tuple[Tensor, Tensor]:
            found, scales, _ = self.norm("_token_fp8", x, residual, weight.clamp(max=448), 0.0)
            return found.float() * scales, quantized

        yield from ((_NORM, plain), (f"{_NORM}_static_fp8", static_fp8), (f"{_NORM}_token_fp8", token_fp8))

    def _try(self, name: str, how: str, number: int) -> tuple[Tensor, Tensor]:
        size, rank = self.context.size, self.context.rank
        counts = torch.arange(1000 * size, dtype=torch.float32, device=self.context.device)
        x, total = counts + number * rank, counts * size + number * sum(range(size))
        if name == "all_gather":
            found = x.new_empty(size, x.numel())
            self.all_gather(found, x, how)
            return found, torch.stack([counts + number * each for each in range(size)])
        if name == "reduce_scatter":
            found = x.new_empty(1000)
            self.reduce_scatter(found, x, how)
            return found, total.view(size, 1000)[rank]
        found = torch.empty_like(x)
        self.all_reduce(found, x, how)
        return found, total

    def _raise_death(self) -> None:
        if self.context.deaths():
            raise self._failed("the first call in peer memory")

    def close(self) -> None:
        """Frees the shared memory, or leaks it if calls still run after 10 s. Graph replays must be finished."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self.context.watcher is not None:
            with contextlib.suppress(ValueError):
                self.context.watcher.on_death.remove(self._abort_on_death)
        if self._is_done(_GOODBYE_S):
            self.memory.close()
            if self._kernels is not None:
                release(self._words)
            return
        logger.warning(
            "%s: calls in peer memory were not done within %g s, or failed; the memory of these calls stays mapped",
            self.context, _GOODBYE_S,
        )  # fmt: skip
        self.memory.leak()

    def _is_done(self, timeout_s: float) -> bool:
        """Waits until the device has finished all calls. Returns True, or after `timeout_s` aborts the calls and
        returns False.
        """
        if self._order.last is None:
            return True
        with contextlib.suppress(RuntimeError):  # the CUDA context is lost, most likely by a kernel's trap
            marker = self.streams.marker()
            marker.record(self._order.last)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                if marker.is_reached():
                    return True
                time.sleep(_STEP_S)
            self._words[_ABORT] = 1
        return False

    def _abort_on_death(self) -> None:
        if self.context.deaths() and not self._words[_ABORT]:
            self._words[_ABORT] = 1
            logger.error(
                "%s: a rank has exited, so calls in peer memory are aborted; their results are invalid", self.context
            )

    def _watch_words(self) -> None:
        while not self._closed.wait(_POLL_S):
            if self._words[_REPORT] and not self._words[_ABORT]:
                logger.error("%s", self._failed("peer memory"))
                return

    def _failed(self, operation: str) -> CommunicationError:
        self._failure = self._failure or self._find_failure(operation)
        return self._failure

    def _find_failure(self, operation: str) -> CommunicationError:
        context, report, started = self.context, read_report(self._words[_REPORT]), time.monotonic()
        self._words[_ABORT] = 1  # ends kernels that are still in the stream
        if context.deaths():
            return died(context, operation, started)
        if report is None or report.reason != "deadline":
            return context.failure(
                CommunicationError,
                f"{operation} of {context} was aborted on the device. This group is unusable now; find the first rank "
                "that failed",
                operation,
                timeout_s=context.timeout_s,
            )
        late = tuple(context.ranks[report.peer : report.peer + 1])
        who = f"global rank {late[0]}" if late else "an unknown rank"
        return context.failure(
            CollectiveTimeoutError,
            f"{report.kernel} of {context} waited on the device for {who}, which didn't make this call within "
            f"{context.timeout_s:g} s (block {report.block}, epoch {report.epoch}). This group, and CUDA in this "
            "process, are unusable now; check what that rank does instead (its log, `py-spy dump`), or raise the "
            "timeout",
            report.kernel,
            suspect_ranks=late,
            elapsed_s=context.timeout_s,
            timeout_s=context.timeout_s,
        )

    # Tensors: contiguous, on the group's device, aligned to 16 bytes. `how`: push, pull; two_shot for all_reduce.

    def all_reduce(self, out: Tensor, x: Tensor, how: str) -> None:
        """Writes the sum of all ranks' `x` to `out`, which may be `x`. `how`: the algorithm."""
        self._launch(("all_reduce", how, x.dtype, x.numel(), 0), x, out)

    def all_gather(self, out: Tensor, x: Tensor, how: str) -> None:
        self._launch(("all_gather", how, None, x.nbytes, 0), x, out)

    def reduce_scatter(self, out: Tensor, x: Tensor, how: str) -> None:
        self._launch(("reduce_scatter", how, out.dtype, out.numel(), 0), x, out)

    def has_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> bool:
        if x.dim() == 0 or x.numel() == 0 or x.dtype not in DTYPES:
            return False
        if residual.shape != x.shape or weight.shape != x.shape[-1:]:
            return False
        if any(each.dtype != x.dtype or each.device != x.device for each in (residual, weight)):
            return False
        return self._norm_grid(x.dtype, x.numel(), x.shape[-1])[0] > 0

    def norm(
        self, kind: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Returns the normed tensor, and the unnormed sum of `residual` and all ranks' `x`.

        `kind`: "", or for fp8 output "_static_fp8" (needs `scale`) or "_token_fp8", which returns the normed tensor,
        its scales, and the sum.
        """
        if self._words[_REPORT] or self._words[_ABORT]:
            raise self._failed(f"{_NORM}{kind}_{DTYPES[x.dtype]}")
        out, y = torch.empty_like(x, dtype=FP8 if kind else None), torch.empty_like(x)
        scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) if kind == "_token_fp8" else None
        key = (_NORM, kind, x.dtype, x.numel(), x.shape[-1])
        with self._lock:
            kernel, blocks, threads, call = self._prepared.get(key) or self._prepare(key)
            call.input, call.residual, call.weight = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
            call.output, call.residual_out = out.data_ptr(), y.data_ptr()
            call.scale = 0 if scale is None else scale.data_ptr()
            call.scale_out = 0 if scales is None else scales.data_ptr()
            call.eps = eps
            self._start(kernel, blocks, threads, call)
        return (out, y) if scales is None else (out, scales, y)

    def _launch(self, key: _CallKey, x: Tensor, out: Tensor) -> None:
        if self._words[_REPORT] or self._words[_ABORT]:
            raise self._failed(key[0])
        with self._lock:  # guards the prepared call
            kernel, blocks, threads, call = self._prepared.get(key) or self._prepare(key)
            call.input, call.output = x.data_ptr(), out.data_ptr()
            self._start(kernel, blocks, threads, call)

    def _prepare(self, key: _CallKey) -> tuple[str, int, int, Call]:
        if len(self._prepared) >= _MOST_PREPARED:
            self._prepared.clear()
        operation, how, dtype, numel, hidden = key
        call = self._new_call(numel)
        if dtype is None:
            made = (f"{operation}_{how}", *grid(how, numel, self.context.size, self.max_blocks), call)
        elif hidden == 0:
            places = grid(how, numel * dtype.itemsize, self.context.size, self.max_blocks)
            made = (f"{operation}_{how}_{DTYPES[dtype]}", *places, call)
        else:
            call.rows, call.hidden = numel // hidden, hidden
            made = (f"{operation}{how}_{DTYPES[dtype]}", *self._norm_grid(dtype, numel, hidden), call)
        self._prepared[key] = made
        return made

    def _norm_grid(self, dtype: torch.dtype, numel: int, hidden: int) -> tuple[int, int]:
        return norm_grid(hidden * dtype.itemsize, numel // hidden, self.max_blocks)

    def _start(self, kernel: str, blocks: int, threads: int, call: Call) -> None:
        call.deadline_ns = int(1e9 * self._share_of_timeout * self.context.timeout_s)
        stream = self._order.next()  # two calls at the same time on one rank would use the same epoch
        try:
            if self.streams.is_current_device():
                self._loaded().launch(kernel, blocks, threads, call, stream)
            else:
                with self.streams.guard():
                    self._loaded().launch(kernel, blocks, threads, call, stream)
        except Exception as error:
            if self._words[_REPORT] or self._words[_ABORT]:
                raise self._failed(kernel) from error
            raise self.context.failure(
                CommunicationError,
                f"{kernel} of {self.context} could not be launched: {error}. The other ranks wait for this kernel; "
                "perhaps an earlier kernel on this device failed: run with CUDA_LAUNCH_BLOCKING=1 to find that kernel",
                kernel,
            ) from error

    def _new_call(self, numel: int) -> Call:
        call = Call()
        for rank, address in enumerate(self.memory.addresses):
            call.regions[rank] = address
        call.rank, call.size, call.numel = self.context.rank, self.context.size, numel
        call.report, call.abort = self._words.address + 8 * _REPORT, self._words.address + 8 * _ABORT
        return call

    def _loaded(self) -> Launcher:
        if self._kernels is None:
            raise CommunicationError(
                f"{self.context} can't launch a kernel on the GPU memory that its ranks share, because the group was "
                "destroyed or has failed"
            )
        return self._kernels
