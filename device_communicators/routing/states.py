"""Describes what a rank is doing, as text for errors: its call and program line, or why it can't answer.

Doesn't import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_ASKED = 16
SILENT = "running, but no Python thread answers: native code holds the interpreter lock"


class State(NamedTuple):
    key: str = ""
    """Identifies the call's group; empty outside of calls."""
    group: str = ""
    call: str = ""
    place: str = ""
    """Source lines of the user's program on the stack, innermost first."""
    obstacle: str = ""
    """Why the rank can't answer. The other fields are then empty."""
    is_compiling: bool = False
    idle_s: float = 0.0
    """Seconds since the rank's last call, or -1 if the rank makes calls one after another."""
    peer: int = -1
    """Global rank of the peer in a transfer, else -1."""
    ranks: Sequence[int] = ()
    """Global ranks of the call's group; empty for all ranks of the world."""

    def is_in_call_of(self, other: State) -> bool:
        return (self.key, self.call) == (other.key, other.call)

    def in_words(self, group: str = "") -> str:
        """Returns text that follows "global rank 3 is ". Omits the group's name if the group is `group`."""
        if self.obstacle:
            return self.obstacle
        where = f" of group {self.group!r}" if self.group != group else ""
        at = f", at {self.place}" if self.place else ""
        if self.key:
            return f"in {self.call}{where}{at}"
        if self.idle_s >= 0:
            return f"in no call of a group{', compiling' if self.is_compiling else ''}{at}"
        return f"making calls that complete, most recently {self.call}{where}{at}"


def describe_states(states: dict[int, State], group: str) -> list[str]:
    ranks_in: dict[str, list[str]] = {}
    for rank, state in states.items():
        ranks_in.setdefault(state.in_words(group), []).append(str(rank))
    return [
        f"global rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} {'are' if len(ranks) > 1 else 'is'} {what}"
        for what, ranks in ranks_in.items()
    ]
