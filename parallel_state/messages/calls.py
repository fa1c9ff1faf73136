"""Checks of the calls of a `GroupCoordinator` that send objects and tensor dicts."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from torch.compiler import is_dynamo_compiling

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.routing.communicator import GroupContext
from parallel_state.collectives import checks
from parallel_state.collectives.calls import is_single_rank
from parallel_state.messages.messenger import Messenger
from parallel_state.messages.slices import AllGatherGroup
from parallel_state.messages.tensor_dicts import TensorDictSpec


def broadcast_object_list(messenger: Messenger, obj_list: list[Any], src: int) -> list[Any]:
    context, is_alone = messenger.route.context, is_single_rank(messenger.route)
    # A mistake of `src` is raised below: the other ranks wait for it.
    if not isinstance(obj_list, list) and (context.rank != src or is_alone):
        found = f"is a {type(obj_list).__name__}"
        raise checks.wrong(context, "broadcast_object_list", "obj_list", "be a list", found)
    if is_alone:
        encodable(messenger, "broadcast_object_list", obj_list, list)
    else:
        received = messenger.broadcast(obj_list, src, "broadcast_object_list", must_be=list)
        if len(received) != len(obj_list):
            must = f"be a list as long as rank {src}'s, {len(received)}"
            raise checks.wrong(context, "broadcast_object_list", "obj_list", must, f"has {len(obj_list)}")
        obj_list[:] = received
    return obj_list


def check_number(context: GroupContext, value: object) -> None:
    if not isinstance(value, numbers.Number):
        raise InvalidArgumentError(
            f"all_sum on {context} takes a number, but got a {type(value).__name__}; for tensors use "
            "all_reduce, for other values all_gather_object"
        )


def check_options(
    context: GroupContext,
    operation: str,
    all_gather_group: AllGatherGroup | None = None,
    all_gather_tensors: Mapping[str, bool] | None = None,
    spec: TensorDictSpec | None = None,
) -> None:
    if spec is not None and not isinstance(spec, TensorDictSpec):
        raise checks.wrong(context, operation, "spec", "be a TensorDictSpec", f"is a {type(spec).__name__}")
    if all_gather_group is not None and type(getattr(all_gather_group, "rank_in_group", None)) is not int:
        found = f"is a {type(all_gather_group).__name__}"
        raise checks.wrong(context, operation, "all_gather_group", "be a GroupCoordinator", found)
    if all_gather_tensors is not None and not isinstance(all_gather_tensors, Mapping):
        found = f"is a {type(all_gather_tensors).__name__}"
        raise checks.wrong(context, operation, "all_gather_tensors", "be a dict of bools by key", found)


def encodable(messenger: Messenger, operation: str, obj: Any, must_be: type | None = None) -> Any:
    """Returns `obj`, or raises the error that sending `obj` would raise in a larger group."""
    if must_be is not None and not isinstance(obj, must_be):
        what = "a tensor dict" if must_be is dict else f"obj_list of {operation}"
        raise InvalidArgumentError(f"{what} must be a {must_be.__name__}, but is a {type(obj).__name__}")
    if not is_dynamo_compiling():  # the graph of a group of one needn't break for this
        checks.check_no_transform(messenger.route.context, operation)
        error = messenger.encode(obj, must_be).error
        if error is not None:
            raise error
    return obj


def destination(context: GroupContext, operation: str, dst: int | None) -> int:
    dst = checks.destination(context, operation, dst)
    _check_message(context, operation)
    return dst


def source(context: GroupContext, operation: str, src: int | None) -> int:
    src = checks.source(context, operation, src)
    _check_message(context, operation)
    return src


def _check_message(context: GroupContext, operation: str) -> None:
    checks.check_no_transform(context, operation)
    context.check_cpu_group(operation)


def is_only_rank(rank: object) -> bool:
    return rank is None or (type(rank) is int and rank == 0)
