"""Checks that all ranks are in the same call, before gloo sees a tensor: it mixes up what doesn't match, or aborts.

Each rank tells all others its call, in a *frame* of fixed layout: what the caller called, in which step of it the rank
is, and reduction, dtype, elements, root, dim, sizes, splits. Where they differ, all ranks raise alike, and no tensor
has been touched. A small tensor travels in the frame itself: then the exchange is the whole operation; a larger one
pays for one more.

What is compared, and how frames are laid out, is here; how they travel is the exchange's: `exchange` for calls that
wait, `started_calls` and `checked_pairs` for the others.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from device_communicators.base.errors import CollectiveMismatchError, CommunicationError
from device_communicators.base.torch_internals import all_gather_base
from device_communicators.calls.memory import as_bytes
from device_communicators.calls.user_call import UserCall, begin_sending, current
from device_communicators.routing.communicator import GroupContext
from device_communicators.routing.waiting import Watched

_MAGIC = b"PSC2"
_ALIKE = struct.Struct("<4s16s8s20siIqiI56s")
"""Magic, operation, reduction, dtype, root, number of splits, elements, dim, digest of sizes, kind of user's call."""
_TEXT_BYTES = 160
"""After that the user's call in words, which aren't compared; then the splits, then the tensor."""
_HEAD_BYTES = _ALIKE.size + _TEXT_BYTES
_SPLIT_BYTES = 8
_SMALL_BYTES = 4096
_SMALL_IN_LARGE_GROUPS = 256
_LARGE_GROUP = 16
"""Above so many ranks, frames have less room: each rank receives one of every other."""


class Call(NamedTuple):
    """A call, of which all must be equal on all ranks, but for `text`, and `splits` of an all_to_all."""

    operation: str
    """The step of the user's call."""
    reduce_op: str = ""
    dtype: str = ""
    numel: int = 0
    root: int = -1
    splits: tuple[int, ...] = ()
    dim: int = -1
    digest: int = 0
    kind: str = ""
    text: str = ""

    def of(self, user_call: UserCall) -> Call:
        """Returns this as a step of `user_call`."""
        return self._replace(
            reduce_op=self.reduce_op or user_call.reduce_op or "",
            dim=user_call.dim,
            digest=user_call.digest,
            kind=user_call.kind,
            text=str(user_call)[:_TEXT_BYTES],
        )

    def __str__(self) -> str:
        if self.text:
            return self.text
        arguments = ", ".join([self.reduce_op] * bool(self.reduce_op) + [f"rank {self.root}"] * (self.root >= 0))
        splits = f" in parts of {list(self.splits)} rows" if self.splits else ""
        what = f" of {self.numel} × {self.dtype}" if self.dtype else ""
        return f"{self.operation}{f'({arguments})' if arguments else ''}{what}{splits}"

    def packed(self) -> bytes:
        texts = (text.encode() for text in (self.operation, self.reduce_op, self.dtype))
        facts = (self.root, len(self.splits), self.numel, self.dim, self.digest, self.kind.encode())
        return _ALIKE.pack(_MAGIC, *texts, *facts) + self.text.encode().ljust(_TEXT_BYTES, b"\0")[:_TEXT_BYTES]


def call_of(operation: str, x: Tensor, reduce_op: str = "", root: int = -1, splits: Sequence[int] = ()) -> Call:
    """Returns the step `operation` of the collective that this thread is in."""
    dtype = str(x.dtype).removeprefix("torch.")
    return Call(operation, reduce_op, dtype, x.numel(), root, tuple(splits)).of(current(operation))


def transfer_of(operation: str, x: Tensor) -> Call:
    """Returns the call of a `send` or `recv` between two ranks."""
    return Call(operation, dtype=str(x.dtype).removeprefix("torch."), numel=x.numel())


def room_for(size: int) -> int:
    """Returns how many bytes of a tensor a frame of `size` ranks takes in, beside the splits of all."""
    return _SMALL_BYTES if size <= _LARGE_GROUP else _SMALL_IN_LARGE_GROUPS


class Frames:
    """The frames of all ranks, which are in the same call: `[ranks, frame bytes]` of uint8."""

    def __init__(self, frames: Tensor, call: Call) -> None:
        self._frames = frames
        self._begin = head_bytes(len(call.splits))

    def copy_to(self, out: Tensor, rank: int, begin: int = 0) -> None:
        """Fills contiguous `out` with what came in the frame of `rank`, from its byte `begin` on."""
        begin += self._begin
        as_bytes(out).copy_(self._frames[rank, begin : begin + out.nbytes])

    def copy_all_to(self, out: Tensor) -> None:
        """Fills contiguous `out` with the payloads of all frames, of equal size, in rank order."""
        each = out.nbytes // len(self._frames)
        as_bytes(out).view(len(self._frames), each).copy_(self._frames[:, self._begin : self._begin + each])

    def blocks(self, like: Tensor) -> Tensor:
        """Returns what came in all of them: `[ranks, like.numel()]`."""
        return self._frames[:, self._begin : self._begin + like.nbytes].contiguous().view(like.dtype)

    def splits(self, count: int) -> Tensor:
        """Returns those of all ranks: `[ranks, count]` of int64."""
        return self._frames[:, _HEAD_BYTES : _HEAD_BYTES + _SPLIT_BYTES * count].contiguous().view(torch.int64)


def call_in(frame: Tensor) -> Call | None:
    """Parses a frame's call; None if it has none."""
    head = bytes(frame[:_HEAD_BYTES].tolist())
    magic, *texts, root, count, numel, dim, digest, kind = _ALIKE.unpack(head[: _ALIKE.size])
    if magic != _MAGIC or _HEAD_BYTES + count * _SPLIT_BYTES > frame.numel():
        return None
    try:
        operation, reduce_op, dtype, kind = (text.rstrip(b"\0").decode("ascii") for text in (*texts, kind))
    except UnicodeDecodeError:
        return None
    text = head[_ALIKE.size :].rstrip(b"\0").decode(errors="replace")
    splits = frame[_HEAD_BYTES : _HEAD_BYTES + count * _SPLIT_BYTES].clone().view(torch.int64)
    return Call(operation, reduce_op, dtype, numel, root, tuple(splits.tolist()), dim, digest, kind, text)


def head_bytes(splits: int) -> int:
    """Returns the size of a frame of so many splits without a tensor."""
    return _HEAD_BYTES + splits * _SPLIT_BYTES


def frame_bytes(size: int) -> int:
    """Returns a frame's size: room for an all_to_all's splits of both directions, and for a small tensor."""
    return head_bytes(2 * size) + room_for(size)


def fill(frame: Tensor, call: Call, payload: Tensor | None) -> int:
    """Writes the call, and the tensor that goes with it, to the frame; returns how many bytes it has."""
    head = bytearray(call.packed() + struct.pack(f"<{len(call.splits)}q", *call.splits))
    begin = len(head)
    frame[:begin] = torch.frombuffer(head, dtype=torch.uint8)
    if payload is None or payload.numel() == 0:
        return begin
    end = begin + payload.nbytes
    frame[begin:end] = as_bytes(payload)
    return end


Gather = Callable[[Tensor, Tensor], object]
"""`gather(out, x)`: a flat all_gather of bytes, by another communicator of the group."""


def exchange(context: GroupContext, call: Call, payload: Tensor | None, gather: Gather | None = None) -> Frames:
    """Exchanges frames, and checks that all ranks are in the same call. Every rank calls it.

    `payload`: contiguous, at most `room_for` the group. `gather`: where another communicator carries some of the
    group's collectives, and compares them in its own way: then it must carry the frames, too, so that ranks meet.
    Raises CollectiveMismatchError on every rank.
    """
    count = frame_bytes(context.size)
    mine = torch.zeros(count, dtype=torch.uint8, device="cpu")
    fill(mine, call, payload)
    frames = torch.empty(context.size, count, dtype=torch.uint8, device="cpu")
    begin_sending()
    if gather is None:
        Watched(all_gather_base(context.cpu_group, frames.view(-1), mine), context, call.operation).wait()
    else:
        gather(frames, mine)
    return checked(context, call, frames)


def checked(context: GroupContext, call: Call, frames: Tensor) -> Frames:
    """Checks that `frames` of all ranks agree, and returns them."""
    found = Frames(frames, call)
    heads = frames[:, : _ALIKE.size]
    if not bool((heads == heads[context.rank]).all()):
        raise _mismatch(context, call, frames)
    if call.splits:
        splits = found.splits(len(call.splits))
        if call.operation == "all_to_all":
            _check_directions(context, call, splits)
        elif not bool((splits == splits[context.rank]).all()):
            raise _mismatch(context, call, frames)
    return found


def _check_directions(context: GroupContext, call: Call, splits: Tensor) -> None:
    """Checks input against output splits: what a rank sends to another, that one must expect."""
    sent, expected = splits.view(context.size, 2, context.size).unbind(1)
    wrong = (sent != expected.T).nonzero()
    if not len(wrong):
        return
    src, dst = wrong[0].tolist()
    raise _error(
        context,
        call,
        f"all ranks' splits must match, but global rank {context.ranks[src]} sends {int(sent[src, dst])} rows to "
        f"global rank {context.ranks[dst]}, which expects {int(expected[dst, src])}",
        [context.ranks[src], context.ranks[dst]],
    )


def _mismatch(context: GroupContext, call: Call, frames: Tensor) -> CommunicationError:
    calls = [call_in(frame) for frame in frames]
    for rank, other in enumerate(calls):
        if other is None:
            return _error(
                context,
                call,
                f"global rank {context.ranks[rank]} sent something else over this group's gloo process group; it "
                "must not be used past this library while a call is under way",
                [context.ranks[rank]],
            )
    # As they were compared: without words, and with all splits alike unless all of them are of all_to_all.
    alike = [(other.packed()[: _ALIKE.size], other.splits) for other in calls if other is not None]
    own = alike[context.rank]
    [(usual, count), *_] = Counter(alike).most_common(1)
    if 2 * count <= context.size:  # nobody can tell who is wrong: those that differ from this rank
        usual = own
    different = [rank for rank, other in enumerate(alike) if other != usual]
    shown = next(rank for rank, other in enumerate(alike) if other != own)
    return _error(
        context,
        call,
        f"all ranks must make the same call, but this rank is in {call}, and global rank {context.ranks[shown]} in "
        f"{calls[shown]}",
        [context.ranks[rank] for rank in different],
    )


def _error(context: GroupContext, call: Call, what: str, suspects: Sequence[int]) -> CollectiveMismatchError:
    operation = call.text.partition("(")[0].partition(" ")[0] or call.operation
    return context.mismatch(operation, f"{what}. Nothing was written", suspects, timeout_s=context.timeout_s)
