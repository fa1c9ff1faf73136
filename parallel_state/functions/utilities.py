"""Helpers that also work before init: over torch's default group if it exists, otherwise in this process alone."""

from __future__ import annotations

import contextlib
import io
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from device_communicators.base.errors import CommunicationError, InvalidArgumentError, RemoteError, plain
from device_communicators.base.host_calls import OUTSIDE, host_call
from device_communicators.base.member import Timeout
from device_communicators.base.torch_internals import is_fake
from device_communicators.routing.communicator import GroupContext
from parallel_state.collectives.calls import all_to_all_by
from parallel_state.collectives.ops import Splits, differentiable
from parallel_state.groups.coordinator import GroupCoordinator
from parallel_state.messages.wire import bytes_of
from parallel_state.state import get_nodes, try_get_pp_group, try_get_world_group


@contextmanager
def _world_or_default_group() -> Iterator[tuple[GroupCoordinator, list[list[int]]] | None]:
    """Yields a group of all ranks, and a list of ranks for each host; or None in a world of one rank."""
    from parallel_state.groups.world import hosts_of

    world = try_get_world_group()
    if world is not None:
        alone = world.world_size == 1 or world.context.simulated or world.context.fake
        yield None if alone else (world, get_nodes())
    elif not dist.is_initialized() or dist.get_world_size() == 1 or is_fake():
        yield None
    else:
        world = GroupCoordinator.from_process_group(dist.group.WORLD, name="default")
        try:
            yield world, hosts_of(world)
        finally:
            world.destroy()


@host_call(OUTSIDE)
def read_file_dist(path: str | PathLike[str]) -> io.BytesIO:
    """Returns a file's content on every rank: rank 0 reads and broadcasts it. Every rank must call this function.

    If rank 0 can't read the file, rank 0 raises the error, and the other ranks raise RemoteError.
    """
    with _world_or_default_group() as found:
        return io.BytesIO(Path(path).read_bytes()) if found is None else _read_and_broadcast(path, found[0])


def _read_and_broadcast(path: str | PathLike[str], world: GroupCoordinator) -> io.BytesIO:
    content: object = None
    failure: Exception | None = None
    if world.is_first_rank:
        try:
            data = bytearray(Path(path).read_bytes())
            content = (
                torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
        except Exception as error:  # the other ranks wait
            failure, content = error, f"{type(error).__name__}: {error}"
    content = world.broadcast_object(content, 0)
    if failure is not None:
        raise failure
    if not isinstance(content, Tensor):
        raise RemoteError(f"rank 0 could not read {str(path)!r}: {content}", rank=world.ranks[0])
    return io.BytesIO(bytes_of(content))


def unwrap_dist(model: nn.Module) -> nn.Module:
    """Returns the module inside DistributedDataParallel, also if wrapped repeatedly."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model


@contextmanager
@host_call(OUTSIDE)
def master_first() -> Iterator[None]:
    """Runs the body on rank 0 of the world, then on all other ranks. Every rank must enter the context.

    The body must not make calls that need other ranks. All ranks leave together. If the body raises on a rank, the
    other ranks raise RemoteError.
    """
    with _leader_first(lambda world, nodes: range(world.world_size)):
        yield


@contextmanager
@host_call(OUTSIDE)
def local_master_first() -> Iterator[None]:
    """Runs the body on the first rank of each host, then on the host's other ranks. Otherwise works as master_first."""
    with _leader_first(lambda world, nodes: next(ranks for ranks in nodes if world.rank_in_group in ranks)):
        yield


@contextmanager
def _leader_first(find_ranks: Callable[[GroupCoordinator, list[list[int]]], Sequence[int]]) -> Iterator[None]:
    with _world_or_default_group() as found:
        if found is None:
            yield
        else:
            with _in_turn(found[0], *find_ranks(*found)):
                yield


@contextmanager
def _in_turn(world: GroupCoordinator, leader: int, *others: int) -> Iterator[None]:
    if world.rank_in_group != leader:
        _raise_if_failed(world, world.recv_object(leader))
    failure: str | None = None
    try:
        yield
    except BaseException:
        failure = traceback.format_exc()
        raise
    finally:
        verdict = (world.rank_in_group, failure) if failure is not None else None
        if world.rank_in_group != leader:
            world.send_object(verdict, leader)
            verdict = world.recv_object(leader)
        else:
            sends = [world.isend_object(verdict, member) for member in others]
            if verdict is None:  # otherwise no other rank ran the body
                verdicts = [world.recv_object(member) for member in others]
                verdict = next((failed for failed in verdicts if failed is not None), None)
                sends += [world.isend_object(verdict, member) for member in others]
            for send in sends:
                send.wait()
        if failure is None:
            _raise_if_failed(world, verdict)


def _raise_if_failed(world: GroupCoordinator, verdict: tuple[int, str] | None) -> None:
    if verdict is not None:
        rank, text = verdict
        raise RemoteError(
            f"the `with` block of master_first() or local_master_first() failed on rank {rank} of {world.context}:\n"
            f"{text}",
            rank=world.ranks[rank],
        )


def all_to_all(
    x: Tensor,
    group: Any = None,
    scatter_dim: int = 0,
    gather_dim: int = 0,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Exchanges slices of `x` between ranks as `GroupCoordinator.all_to_all` does, but needs no init.

    `group` is any torch process group (default: the default group). Without a default group, or in a group of one rank,
    returns `x`. Either all ranks' `x` must require a gradient, or none.
    """
    if isinstance(group, GroupCoordinator):
        return group.all_to_all(
            x, scatter_dim, gather_dim, output_split_sizes=output_split_sizes, input_split_sizes=input_split_sizes
        )
    if group is None and not dist.is_initialized():
        return x
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup) or group.rank() < 0:
        raise InvalidArgumentError(
            f"group of all_to_all must be a ProcessGroup that includes this rank, but is {group!r}"
        )
    return _all_to_all_over(group, x, scatter_dim, gather_dim, output_split_sizes, input_split_sizes)


@host_call("pass a GroupCoordinator, whose all_to_all compiles", "all_to_all")
def _all_to_all_over(
    group: Any,
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    outputs: Sequence[int] | None,
    inputs: Sequence[int] | None,
) -> Tensor:
    ranks = tuple(dist.get_process_group_ranks(group))
    context = GroupContext(str(group.group_name), ranks, group.rank(), torch.device("cpu"), Timeout(0.0))

    def exchange(x: Tensor, outputs: Splits, inputs: Splits, out: Tensor | None = None) -> Tensor:
        if context.size == 1:
            return x
        return differentiable(run, lambda grad, outs, ins: run(grad, ins, outs), x, outputs, inputs)

    def run(x: Tensor, outputs: Splits, inputs: Splits) -> Tensor:
        out = x.new_empty([sum(outputs) if outputs else len(x), *x.shape[1:]])
        started = time.monotonic()
        try:
            dist.all_to_all_single(out, x.contiguous(), outputs, inputs, group=group)
        except RuntimeError as error:
            raise CommunicationError(
                f"all_to_all on {context} failed: {plain(error)}. Look for a rank that exited, "
                "didn't call all_to_all, or passed other split sizes",
                group=context.name,
                operation="all_to_all",
                rank=context.rank,
                elapsed_s=time.monotonic() - started,
            ) from error
        return out

    return all_to_all_by(exchange, context, x, scatter_dim, gather_dim, outputs, inputs)


@host_call(OUTSIDE)
def set_random_seed(seed: int) -> int:
    """Seeds torch (all devices), random and numpy. The seed is `seed` + 1000 × this rank's pipeline stage, and is
    returned.
    """
    pp = try_get_pp_group()
    seed += 1000 * (0 if pp is None else pp.rank_in_group)
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed % 2**32)
    return seed


def divide(numerator: int, denominator: int) -> int:
    """Returns the exact quotient; raises InvalidArgumentError if there is a remainder."""
    if numerator % denominator:
        raise InvalidArgumentError(
            f"{numerator} must be divisible by {denominator}, but the remainder is {numerator % denominator}"
        )
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """Returns `num_partitions` equal slices of the last dim: views, or contiguous tensors if requested."""
    slices = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return [piece.contiguous() for piece in slices] if contiguous_split_chunks else slices


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """Returns the layers of stage `pp_rank` as (first, last + 1). If the layers can't be divided evenly, some stages
    just before the last have one more.
    """
    if not 0 <= pp_rank < pp_size <= num_hidden_layers:
        raise InvalidArgumentError(
            f"pp_rank must be below pp_size, and pp_size at most the number of layers, "
            f"but they are {pp_rank}, {pp_size} and {num_hidden_layers}"
        )
    base, rest = divmod(num_hidden_layers, pp_size)
    layers = [base + (pp_size - 1 - rest <= stage < pp_size - 1) for stage in range(pp_size)]
    return sum(layers[:pp_rank]), sum(layers[: pp_rank + 1])
