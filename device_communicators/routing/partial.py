"""A communicator of some operations: those that it doesn't define raise, should anybody call them past the route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from device_communicators.errors import UnsupportedError
from device_communicators.routing.communicator import Communicator, Work


class PartialCommunicator(Communicator):
    """`refusal` says what is carried; the next communicator of the route carries the rest."""

    def _lacks(self, operation: str) -> NoReturn:
        raise UnsupportedError(f"{self.context}: {self.name} has no {operation}")

    def iall_reduce_(self, x: Tensor, reduce_op: str) -> Work:
        self._lacks("iall_reduce_")

    def iall_gather(self, out: Tensor, x: Tensor) -> Work:
        self._lacks("iall_gather")

    def ireduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> Work:
        self._lacks("ireduce_scatter")

    def flat_all_gather(self, out: Tensor, x: Tensor) -> None:
        self._lacks("all_gather")

    def flat_all_gatherv(self, outs: Sequence[Tensor], x: Tensor) -> None:
        self._lacks("all_gatherv")

    def flat_reduce_scatter(self, out: Tensor, x: Tensor, reduce_op: str) -> None:
        self._lacks("reduce_scatter")

    def flat_gather(self, out: Tensor | None, x: Tensor, dst: int) -> None:
        self._lacks("gather")

    def flat_scatter(self, out: Tensor, x: Tensor | None, src: int) -> None:
        self._lacks("scatter")

    def flat_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        self._lacks("all_to_all")

    def ibroadcast_(self, x: Tensor, src: int) -> Work:
        self._lacks("broadcast")

    def isend(self, x: Tensor, dst: int, tag: int) -> Work:
        self._lacks("send")

    def irecv_(self, out: Tensor, src: int, tag: int) -> Work:
        self._lacks("recv")

    def barrier(self) -> None:
        self._lacks("barrier")
