"""The kernels in peer memory for one group: made together, proven, launched, looked after, and ended.

Set-up is a row of steps that all ranks take together; where one fails on any rank, all ranks undo what they have and
the group goes on without (`NotSharedError`, whose text `explain()` shows). What is made then serves every later call,
so that a call does nothing but launch, and may be captured.

A kernel waits for its peers on the device, where no exception can be raised. It writes a *report* into host memory and
ends when its deadline passes; it ends, too, when the host writes the *abort* word, which a rank's death does at once.
The next call raises what happened. What was launched before has undefined results then. Where no call follows, or only
replays of a captured one, a thread that looks at the report says in the log what happened: all that CUDA says then is
that a launch failed.

Two calls at once on one rank would mix. Calls on several streams wait for each other; calls and replays, or replays
beside each other, are ordered by whoever replays.
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
from device_communicators.peer.memory import NotSharedError, PeerMemory, hold, release, share, together
from device_communicators.peer.thresholds import ALGORITHMS, Admission, Thresholds, agree
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.failures import died

logger = logging.getLogger("parallel_state")

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""The dtypes that the kernels reduce."""

_PROOFS = (
    *(("all_reduce", how) for how in ALGORITHMS),
    *((name, how) for name in ("all_gather", "reduce_scatter") for how in ("push", "pull")),
)
_NORM = "all_reduce_add_rms_norm"
_MOST_PREPARED = 4096
"""Calls that are kept ready: sizes may come and go, as those of prompts."""

_What = tuple[str, str, "torch.dtype | None", int, int]
"""Operation, how (of a norm: its kind), dtype (None: bytes), number of elements, of a norm those of a row, else 0."""

_REPORT, _ABORT, _WORDS = 0, 16, 32
"""Places among the words, in cache lines of their own: the device writes the one and reads the other."""
_PROOF_S = 30.0
_GOODBYE_S = 10.0
_STEP_S = 0.0005
_LOOK_S = 0.2


class PeerGroup:
    """Made by `set_up`, on every rank of the group; `close` ends it."""

    def __init__(self, context: GroupContext, device: PeerDevice, admission: Admission, memory: PeerMemory) -> None:
        self.context = context
        self.admission = admission
        self.memory = memory
        self.streams = device.streams
        self._kernels: Launcher | None = None
        self._words: HostWords
        self._deadline_ns = int(1e9 * context.timeout_s)
        self._prepared: dict[_What, tuple[str, int, int, Call]] = {}
        self.max_blocks = 0
        """The number of blocks of any kernel that are on the device at once, on every rank."""
        self._order = StreamOrder(device.streams)
        self._failure: CommunicationError | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        algorithm = self.admission.pinned
        what = f"{algorithm} for every size" if algorithm else str(self.admission.thresholds)
        return f"{self.memory}; {what}"

    # Set-up and end.

    @classmethod
    def set_up(cls, context: GroupContext, device: PeerDevice, thresholds: Thresholds | None = None) -> PeerGroup:
        """Makes the group; every rank calls it. Raises NotSharedError on all ranks alike, or CommunicationError."""
        started = time.monotonic()
        is_auto = thresholds is None and settings.PEER_MEMORY.get() == "auto"
        admission = agree(context, device, thresholds, is_auto=is_auto)
        memory = share(context, REGION_BYTES, device.ways)
        group = cls(context, device, admission, memory)
        try:
            group.max_blocks = min(together(context, "load kernels", lambda: group._load(device)))
            together(context, "prove kernels", group.prove)
        except BaseException:
            group.close()
            raise
        logger.info("%s: peer memory, %s, ready after %.2f s", context, group, time.monotonic() - started)
        return group

    def _load(self, device: PeerDevice) -> int:
        """Returns how many blocks of a kernel this rank has room for."""
        context = self.context
        self._words = device.words(_WORDS)
        hold(self._words)
        if context.watcher is not None:
            context.watcher.on_death.append(self._abort_on_death)
        HelperThread("peers", self._watch_words).start()
        self._kernels = kernels = device.kernels()
        sharers = len(self.admission.topology.sharers(context.rank)) or 1  # under MPS they are on it at once
        return max(1, min(kernels.resident_blocks(name, MAX_THREADS) for name in KERNELS) // sharers)

    def prove(self) -> None:
        """Makes every kind of call once: nothing is first done within a capture, and what can't work shows here.

        Raises NotSharedError: at once where a call doesn't end, behind the last one where a result is wrong, as the
        other ranks go on. PeerDiedError where a rank has ended. The host gives up before the kernels' own deadline,
        whose trap would cost the process its CUDA context; where a launch itself waits, the vote behind has time.
        """
        timeout_s = min(_PROOF_S, self.context.timeout_s / 2)
        self._deadline_ns = int(0.6e9 * self.context.timeout_s)  # below the 0.75 after which `together` may end
        wrong = []
        with self.streams.guard():
            for what, attempt in self._proofs():
                try:
                    found, expected = attempt()
                    done = self._is_done(timeout_s)
                except CommunicationError as error:
                    self._raise_death()
                    raise NotSharedError(f"the first {what} failed: {error}") from error
                if not done:
                    self._raise_death()
                    raise NotSharedError(f"the first {what} was not done within {timeout_s:g} s")
                if not torch.equal(found, expected):
                    wrong.append(what)
        if wrong:
            self._raise_death()
            raise NotSharedError(f"the first {wrong[0]} gave a wrong result: is peer access as it should be?")
        self._deadline_ns = int(1e9 * self.context.timeout_s)

    def _proofs(self) -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor]]]]:
        """Returns small calls by name; each launches something, and gives the result and what it must be."""
        for number, (name, how) in enumerate(_PROOFS, 1):
            yield f"{name} ({how})", functools.partial(self._try, name, how, number)
        # Of the norms results are exact, too: y is 1, the norm is the weight.
        rows, hidden = 3, 96
        x = torch.arange(rows * hidden, dtype=torch.float32, device=self.context.device).view(rows, hidden)
        residual, weight = 1 - x * self.context.size, (x[0] % 8 + 1) * 64  # 64 … 512, exact in float8 up to 448
        quantised = (weight - (weight == 512) * 64).expand(rows, hidden)
        one = torch.ones(1, device=self.context.device)

        def plain() -> tuple[Tensor, Tensor]:
            normed, y = self.norm(x, residual, weight, 0.0)
            return torch.cat([normed, y]), torch.cat([weight.expand(rows, hidden), torch.ones_like(x)])

        def static_fp8() -> tuple[Tensor, Tensor]:
            return self.norm_static_fp8(x, residual, weight, one, 0.0)[0].float(), quantised

        def token_fp8() -> tuple[Tensor, Tensor]:
            found, scales, _ = self.norm_token_fp8(x, residual, weight.clamp(max=448), 0.0)
            return found.float() * scales, quantised

        yield from ((_NORM, plain), (f"{_NORM}_static_fp8", static_fp8), (f"{_NORM}_token_fp8", token_fp8))

    def _try(self, name: str, how: str, number: int) -> tuple[Tensor, Tensor]:
        """Returns a small call, and what it must give; `number` keeps one call's figures apart from another's."""
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
        """Lets go of the regions once this rank's calls are over, or leaves them. Twice is fine.

        Replays of captured calls aren't seen: they must have ended, and their graphs mustn't be replayed again.
        """
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
            "%s: what was put on the device was not done within %g s, or failed: its memory stays mapped",
            self.context, _GOODBYE_S,
        )  # fmt: skip
        self.memory.leave()

    def _is_done(self, timeout_s: float) -> bool:
        """Returns True if the calls so far have run; after `timeout_s` they are told to end."""
        if self._order.last is None:
            return True
        try:
            marker = self.streams.marker()
            marker.record(self._order.last)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                if marker.is_reached():
                    return True
                time.sleep(_STEP_S)
            self._words[_ABORT] = 1
        except RuntimeError:  # the CUDA context is gone, by a trap most likely
            return False
        return False

    # Failures.

    def _abort_on_death(self) -> None:
        """Ends kernels after a rank's death, in the thread that noticed it."""
        if self.context.deaths() and not self._words[_ABORT]:
            self._words[_ABORT] = 1
            logger.error(
                "%s: a rank has ended, so its kernels in peer memory end; their results are void", self.context
            )

    def _watch_words(self) -> None:
        """Watches the words in a thread: they are the host's memory, so CUDA isn't asked."""
        while not self._closed.wait(_LOOK_S):
            if self._words[_REPORT] and not self._words[_ABORT]:
                logger.error("%s", self._failed("peer memory"))
                return

    def _failed(self, operation: str) -> CommunicationError:
        if self._failure is None:
            self._failure = self._find_failure(operation)
        return self._failure

    def _find_failure(self, operation: str) -> CommunicationError:
        context, report, started = self.context, read_report(self._words[_REPORT]), time.monotonic()
        self._words[_ABORT] = 1  # what is still in the stream waits for nobody
        if context.deaths():
            return died(context, operation, started)
        if report is None or report.reason != "deadline":
            return context.failure(
                CommunicationError,
                f"{operation} of {context} was given up on the device. The group can't be used further; look for the "
                "first rank that failed",
                operation,
                timeout_s=context.timeout_s,
            )
        late = tuple(context.ranks[report.peer : report.peer + 1])
        who = f"global rank {late[0]}" if late else "a rank that isn't known"
        return context.failure(
            CollectiveTimeoutError,
            f"{report.kernel} of {context} waited on the device for {who}, which did "
            f"not come within {context.timeout_s:g} s (block {report.block}, epoch {report.epoch}). The group can't be "
            "used further, nor CUDA in this process; look at what that rank does instead (its log, `py-spy dump`), or "
            "raise the timeout",
            report.kernel,
            suspect_ranks=late,
            elapsed_s=context.timeout_s,
            timeout_s=context.timeout_s,
        )

    # Calls; tensors are contiguous, on the group's device, and begin at 16 bytes.

    def all_reduce(self, out: Tensor, x: Tensor, how: str) -> None:
        """Reduces by `how`, one of ALGORITHMS. `out` may be `x`."""
        self._launch(("all_reduce", how, x.dtype, x.numel(), 0), x, out)

    def all_gather(self, out: Tensor, x: Tensor, how: str) -> None:
        """Gathers bytes by `how`: push or pull."""
        self._launch(("all_gather", how, None, x.nbytes, 0), x, out)

    def reduce_scatter(self, out: Tensor, x: Tensor, how: str) -> None:
        """Reduces and scatters by `how`: push or pull."""
        self._launch(("reduce_scatter", how, out.dtype, out.numel(), 0), x, out)

    # With an add and a norm: `x`, `residual` and `weight` are of one dtype; see the coordinator's for what they give.

    def has_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> bool:
        """Returns True if there is a kernel for these; the same on all ranks."""
        if x.dim() == 0 or x.numel() == 0 or x.dtype not in DTYPES:
            return False
        if residual.shape != x.shape or weight.shape != x.shape[-1:]:
            return False
        if any(each.dtype != x.dtype or each.device != x.device for each in (residual, weight)):
            return False
        return self._norm_grid(x.dtype, x.numel(), x.shape[-1])[0] > 0

    def norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, y = torch.empty_like(x), torch.empty_like(x)
        self._launch_norm("", (x, residual, weight, None), (out, y, None), eps)
        return out, y

    def norm_static_fp8(
        self, x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, y = torch.empty_like(x, dtype=FP8), torch.empty_like(x)
        self._launch_norm("_static_fp8", (x, residual, weight, scale), (out, y, None), eps)
        return out, y

    def norm_token_fp8(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out, y = torch.empty_like(x, dtype=FP8), torch.empty_like(x)
        scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        self._launch_norm("_token_fp8", (x, residual, weight, None), (out, y, scales), eps)
        return out, scales, y

    def _launch_norm(
        self,
        kind: str,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
        outputs: tuple[Tensor, Tensor, Tensor | None],
        eps: float,
    ) -> None:
        (x, residual, weight, scale), (out, y, scales) = inputs, outputs
        if self._words[_REPORT] or self._words[_ABORT]:
            raise self._failed(f"{_NORM}{kind}_{DTYPES[x.dtype]}")
        what = (_NORM, kind, x.dtype, x.numel(), x.shape[-1])
        with self._lock:
            kernel, blocks, threads, call = self._prepared.get(what) or self._prepare(what)
            call.input, call.residual, call.weight = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
            call.output, call.residual_out = out.data_ptr(), y.data_ptr()
            call.scale = 0 if scale is None else scale.data_ptr()
            call.scale_out = 0 if scales is None else scales.data_ptr()
            call.eps = eps
            self._start(kernel, blocks, threads, call)

    def _launch(self, what: _What, x: Tensor, out: Tensor) -> None:
        if self._words[_REPORT] or self._words[_ABORT]:
            raise self._failed(what[0])
        with self._lock:  # a prepared call is filled in and launched by one thread at a time
            kernel, blocks, threads, call = self._prepared.get(what) or self._prepare(what)
            call.input, call.output = x.data_ptr(), out.data_ptr()
            self._start(kernel, blocks, threads, call)

    def _prepare(self, what: _What) -> tuple[str, int, int, Call]:
        if len(self._prepared) >= _MOST_PREPARED:
            self._prepared.clear()
        operation, how, dtype, numel, hidden = what
        call = self._new_call(numel)
        if dtype is None:
            made = (f"{operation}_{how}", *grid(how, numel, self.context.size, self.max_blocks), call)
        elif hidden == 0:
            places = grid(how, numel * dtype.itemsize, self.context.size, self.max_blocks)
            made = (f"{operation}_{how}_{DTYPES[dtype]}", *places, call)
        else:
            call.rows, call.hidden = numel // hidden, hidden
            made = (f"{operation}{how}_{DTYPES[dtype]}", *self._norm_grid(dtype, numel, hidden), call)
        self._prepared[what] = made
        return made

    def _norm_grid(self, dtype: torch.dtype, numel: int, hidden: int) -> tuple[int, int]:
        return norm_grid(hidden * dtype.itemsize, numel // hidden, self.max_blocks)

    def _start(self, kernel: str, blocks: int, threads: int, call: Call) -> None:
        call.deadline_ns = self._deadline_ns
        stream = self._order.next()  # two calls at once on one rank would share an epoch
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
                f"{kernel} of {self.context} could not be launched: {error}. The other ranks wait for it; look at what "
                "ran on this device before (CUDA_LAUNCH_BLOCKING=1)",
                kernel,
            ) from error

    def _new_call(self, numel: int) -> Call:
        """Returns a call with what all launches share."""
        call = Call()
        for rank, address in enumerate(self.memory.addresses):
            call.regions[rank] = address
        call.rank, call.size, call.numel = self.context.rank, self.context.size, numel
        call.report, call.abort = self._words.address + 8 * _REPORT, self._words.address + 8 * _ABORT
        return call

    def _loaded(self) -> Launcher:
        if self._kernels is None:
            raise CommunicationError(f"{self.context} has no kernels in peer memory")
        return self._kernels
