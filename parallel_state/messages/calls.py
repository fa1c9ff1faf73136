"""The methods of a group that send objects and tensor dicts."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from device_communicators.base.errors import InvalidArgumentError
from device_communicators.base.host_calls import host_call
from device_communicators.calls.user_call import transfer
from parallel_state.collectives import checks
from parallel_state.collectives.calls import GroupFacts
from parallel_state.messages import tensor_dicts as by_spec
from parallel_state.messages.buffers import Buffers, checked_buffers
from parallel_state.messages.handles import NoReceive, NoSend, ReceiveHandle, SendHandle
from parallel_state.messages.messenger import Messenger
from parallel_state.messages.tensor_dicts import TensorDictSpec
from parallel_state.messages.wire import AllGatherGroup

_SPEC = "pass spec=TensorDictSpec.of(…) of a first exchange on both sides, or call it outside the compiled function"
_OBJECTS = "objects travel by the host; call it outside the compiled function, or send tensors or a dict with spec="
_WAITING_DICT = "compiled code waits for its transfers; use send_tensor_dict and recv_tensor_dict with spec= there"


class MessageCalls(GroupFacts):
    """Sends objects and tensor dicts. `src` and `dst` are ranks in the group.

    Wrong arguments raise InvalidArgumentError before anything is sent. If a value can't be sent, the sender raises
    MessageEncodeError and each receiver RemoteError.
    """

    _messenger: Messenger

    @host_call(_OBJECTS)
    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Returns rank `src`'s object on every rank. The object can contain tensors, at any depth."""
        checks.check_rank(self.context, "broadcast_object", "src", src)
        if self._is_single_rank():
            return self._checked("broadcast_object", obj)
        return self._messenger.broadcast(obj, src, "broadcast_object")

    @host_call(_OBJECTS)
    def broadcast_object_list(self, obj_list: list[Any], src: int = 0) -> list[Any]:
        """Fills every rank's `obj_list` with rank `src`'s objects and returns the list.

        All lists must have the same length.
        """
        checks.check_rank(self.context, "broadcast_object_list", "src", src)
        # A mistake of `src` is raised below: the other ranks wait for it.
        if not isinstance(obj_list, list) and (self.rank_in_group != src or self._is_single_rank()):
            raise InvalidArgumentError(
                f"obj_list of broadcast_object_list on {self.context} must be a list, but is a "
                f"{type(obj_list).__name__}"
            )
        if self._is_single_rank():
            self._checked("broadcast_object_list", obj_list, list)
        else:
            received = self._messenger.broadcast(obj_list, src, "broadcast_object_list", must_be=list)
            if len(received) != len(obj_list):
                raise InvalidArgumentError(
                    f"obj_list of broadcast_object_list on {self.context} must be a list as long as rank {src}'s, "
                    f"{len(received)}, but has {len(obj_list)}"
                )
            obj_list[:] = received
        return obj_list

    @host_call(_OBJECTS)
    def all_sum(self, value: float) -> float:
        """Returns the sum of all ranks' numbers. Sums of ints are exact; floats are added in rank order."""
        if not isinstance(value, numbers.Number):
            raise InvalidArgumentError(
                f"all_sum on {self.context} takes a number, but got a {type(value).__name__}; for tensors use "
                "all_reduce, for other values all_gather_object"
            )
        return value if self._is_single_rank() else sum(self._messenger.all_gather(value, "all_sum"))

    @host_call(_OBJECTS)
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Returns every rank's object, in rank order."""
        if self._is_single_rank():
            return [self._checked("all_gather_object", obj)]
        return self._messenger.all_gather(obj, "all_gather_object")

    @host_call(_OBJECTS)
    @transfer("send_object")
    def send_object(self, obj: Any, dst: int | None = None) -> None:
        """Sends an object to rank `dst` (default: the next rank)."""
        dst = self._destination("send_object", dst)
        self._messenger.send(self._messenger.post(obj, dst, waits=True), dst)

    @host_call(_OBJECTS)
    @transfer("recv_object")
    def recv_object(self, src: int | None = None) -> Any:
        """Returns the object that rank `src` (default: the previous rank) sends."""
        return self._messenger.recv(self._source("recv_object", src))

    @host_call(_OBJECTS)
    @transfer("isend_object")
    def isend_object(self, obj: Any, dst: int | None = None) -> SendHandle:
        """Starts send_object. The object's tensors must not change before `wait()` returns."""
        dst = self._destination("isend_object", dst)
        return self._messenger.isend(self._messenger.post(obj, dst), dst)

    @host_call(_OBJECTS)
    @transfer("irecv_object")
    def irecv_object(self, src: int | None = None) -> ReceiveHandle:
        """Starts recv_object; `wait()` returns the object. Handles receive in the order in which they were started."""
        return self._messenger.irecv(self._source("irecv_object", src))

    def broadcast_tensor_dict(
        self,
        tensor_dict: dict[Any, Any] | None = None,
        src: int = 0,
        *,
        spec: TensorDictSpec | None = None,
        out: Mapping[str, Tensor] | None = None,
        views: bool = False,
    ) -> dict[Any, Any]:
        """Returns rank `src`'s dict on every rank. Rank `src` gets its own dict back.

        Arguments and errors are as in recv_tensor_dict. Rank `src` must not pass `out`. With `views`, several receivers
        can share memory, so they must not write to the tensors.
        """
        checks.check_rank(self.context, "broadcast_tensor_dict", "src", src)
        self._check_options("broadcast_tensor_dict", spec=spec)
        if out is not None and self.rank_in_group == src:
            raise InvalidArgumentError(
                f"out= of broadcast_tensor_dict on {self.context} is for ranks that receive, but this is rank {src}, "
                "which sends; pass out=None on this rank"
            )
        buffers = checked_buffers(self.context, "broadcast_tensor_dict", out, views)
        if spec is not None:
            return by_spec.broadcast(self, tensor_dict, src, spec, buffers, views)
        if self._is_single_rank():
            return self._checked("broadcast_tensor_dict", tensor_dict, dict)
        return self._broadcast_dict(tensor_dict, src, buffers, views)

    @host_call(_SPEC, "broadcast_tensor_dict")
    def _broadcast_dict(
        self, tensor_dict: dict[Any, Any] | None, src: int, out: Buffers | None, views: bool
    ) -> dict[Any, Any]:
        return self._messenger.broadcast(tensor_dict, src, "broadcast_tensor_dict", dict, out, views)

    def send_tensor_dict(
        self,
        tensor_dict: dict[Any, Any],
        dst: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        spec: TensorDictSpec | None = None,
    ) -> dict[Any, Any] | None:
        """Sends a dict of tensors and other values to rank `dst` (default: the next rank). Gradients are not sent.

        Returns None; in a group of one rank, returns the dict itself, as vLLM does.

        - `all_gather_group`: a group whose ranks all hold the same tensors. Each rank sends one slice of each tensor
          that divides evenly. The receivers gather the slices over their own `all_gather_group`.
        - `all_gather_tensors`: `{"residual": False}` sends the tensor `residual` whole. Needed for tensors that differ
          between ranks of `all_gather_group`.
        - `spec`: describes the dict in advance; the receiver passes an equal spec. The call can then be compiled.
        """
        self._check_options("send_tensor_dict", all_gather_group, all_gather_tensors, spec)
        if self.world_size == 1 and _is_only_rank(dst) and self._is_single_rank():
            return self._checked("send_tensor_dict", tensor_dict, dict)
        if spec is not None:
            dst = checks.destination(self.context, "send_tensor_dict", dst)
            by_spec.send(self, tensor_dict, dst, all_gather_group, all_gather_tensors, spec)
        else:
            self._send_dict(tensor_dict, dst, all_gather_group, all_gather_tensors)
        return None

    @host_call(_SPEC, "send_tensor_dict")
    @transfer("send_tensor_dict")
    def _send_dict(
        self,
        tensor_dict: dict[Any, Any],
        dst: int | None,
        all_gather_group: AllGatherGroup | None,
        all_gather_tensors: Mapping[str, bool] | None,
    ) -> None:
        dst = self._destination("send_tensor_dict", dst)
        outgoing = self._messenger.post(tensor_dict, dst, dict, all_gather_group, all_gather_tensors, waits=True)
        self._messenger.send(outgoing, dst)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        spec: TensorDictSpec | None = None,
        out: Mapping[str, Tensor] | None = None,
        views: bool = False,
    ) -> dict[Any, Any] | Any:  # only a group of one rank has nothing to receive
        """Returns the dict that rank `src` (default: the previous rank) sends.

        CPU tensors are received on the CPU, others on the group's device. In a group of one rank, returns None, as vLLM
        does.

        - `all_gather_group`, `spec`: as in send_tensor_dict. `all_gather_tensors` is needed only with `spec`.
        - `out`: tensors to receive into, one for each sent tensor, with equal shape, dtype and device type. The
          returned dict contains them. After an error their content is undefined.
        - `views`: tensors can be views of this host's shared memory. They stay valid after the group or the sender
          ends. Small tensors are copied. While this rank keeps more than 256 MiB of a sender's views, large tensors of
          that sender are copied, too.

        Raises CollectiveMismatchError if the sender of CPU tensors passed another spec. Raises InvalidArgumentError for
        `out` together with `views`, or if `out` doesn't fit the dict. In the latter case, a dict sent without `spec` is
        lost.
        """
        self._check_options("recv_tensor_dict", all_gather_group, all_gather_tensors, spec)
        buffers = checked_buffers(self.context, "recv_tensor_dict", out, views)
        if self.world_size == 1 and _is_only_rank(src) and self._is_single_rank():
            return None
        if spec is not None:
            src = checks.source(self.context, "recv_tensor_dict", src)
            return by_spec.recv(self, src, all_gather_group, all_gather_tensors, spec, buffers, views)
        return self._recv_dict(self._source("recv_tensor_dict", src), all_gather_group, buffers, views)

    @host_call(_SPEC, "recv_tensor_dict")
    @transfer("recv_tensor_dict")
    def _recv_dict(
        self, src: int, all_gather_group: AllGatherGroup | None, out: Buffers | None, views: bool
    ) -> dict[Any, Any]:
        return self._messenger.recv(src, all_gather_group, out, views)

    @host_call(_WAITING_DICT)
    @transfer("isend_tensor_dict")
    def isend_tensor_dict(
        self,
        tensor_dict: dict[Any, Any],
        dst: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> SendHandle:
        """Starts send_tensor_dict. Change the tensors only after `wait()`.

        In a group of one rank the result is an empty list of handles, as in vLLM.
        """
        self._check_options("isend_tensor_dict", all_gather_group, all_gather_tensors)
        if self.world_size == 1 and _is_only_rank(dst) and self._is_single_rank():
            self._checked("isend_tensor_dict", tensor_dict, dict)
            return NoSend(self._messenger)
        dst = self._destination("isend_tensor_dict", dst)
        outgoing = self._messenger.post(tensor_dict, dst, dict, all_gather_group, all_gather_tensors)
        return self._messenger.isend(outgoing, dst)

    @host_call(_WAITING_DICT)
    @transfer("irecv_tensor_dict")
    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        out: Mapping[str, Tensor] | None = None,
        views: bool = False,
    ) -> ReceiveHandle:
        """Starts to receive a dict; the handle's `wait()` returns the dict.

        Every rank of `all_gather_group` must call `wait()`. `all_gather_tensors` has no effect. In a group of one rank
        `wait()` returns None, and the handle unpacks to None and two empty lists, as in vLLM.
        """
        self._check_options("irecv_tensor_dict", all_gather_group, all_gather_tensors)
        buffers = checked_buffers(self.context, "irecv_tensor_dict", out, views)
        if self.world_size == 1 and _is_only_rank(src) and self._is_single_rank():
            return NoReceive()
        return self._messenger.irecv(self._source("irecv_tensor_dict", src), all_gather_group, buffers, views)

    def _check_options(
        self,
        operation: str,
        all_gather_group: AllGatherGroup | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        spec: TensorDictSpec | None = None,
    ) -> None:
        if spec is not None and not isinstance(spec, TensorDictSpec):
            raise InvalidArgumentError(
                f"spec of {operation} on {self.context} must be a TensorDictSpec, but is a {type(spec).__name__}"
            )
        if all_gather_group is not None and not hasattr(all_gather_group, "rank_in_group"):
            raise InvalidArgumentError(
                f"all_gather_group of {operation} on {self.context} must be a GroupCoordinator, but is a "
                f"{type(all_gather_group).__name__}"
            )
        if all_gather_tensors is not None and not isinstance(all_gather_tensors, Mapping):
            raise InvalidArgumentError(
                f"all_gather_tensors of {operation} on {self.context} must be a dict of bools by key, but is a "
                f"{type(all_gather_tensors).__name__}"
            )

    def _checked(self, operation: str, obj: Any, must_be: type | None = None) -> Any:
        """Returns `obj`. Raises the error that a group of several ranks would raise when sending `obj`."""
        if must_be is not None and not isinstance(obj, must_be):
            what = "a tensor dict" if must_be is dict else f"obj_list of {operation}"
            raise InvalidArgumentError(f"{what} must be a {must_be.__name__}, but is a {type(obj).__name__}")
        if not is_dynamo_compiling():  # the graph of a group of one needn't break for this
            checks.check_no_transform(self.context, operation)
            error = self._messenger.encode(obj, must_be).error
            if error is not None:
                raise error
        return obj

    def _destination(self, operation: str, dst: int | None) -> int:
        dst = checks.destination(self.context, operation, dst)
        self._check_message(operation)
        return dst

    def _source(self, operation: str, src: int | None) -> int:
        src = checks.source(self.context, operation, src)
        self._check_message(operation)
        return src

    def _check_message(self, operation: str) -> None:
        """Raises if messages need a gloo group that doesn't exist yet. Sender and receiver alone can't create it."""
        checks.check_no_transform(self.context, operation)
        self.context.check_cpu_group(operation)


def _is_only_rank(rank: object) -> bool:
    return rank is None or (type(rank) is int and rank == 0)
