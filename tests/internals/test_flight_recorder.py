"""torch's flight recorder analyzer reads our records: missing ranks and mismatched calls."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.flight_recorder import fr_trace

from device_communicators.calls import recorder
from parallel_state.tools import debug, flight_recorder


def _operation(sequence: int, name: str, shape: tuple[int, ...] = (6, 2), ended: bool = True, **facts: Any) -> Any:
    ended_s = 10.5 + sequence if ended else None
    return {"sequence": sequence, "name": name, "dtype": "float32", "shape": shape, "started_s": 10.0 + sequence,
            "ended_s": ended_s, "site": "", "call_text": "", "peer": -1, **facts}  # fmt: skip


ALIKE = [
    _operation(1, "all_reduce"), _operation(2, "all_gather"), _operation(3, "reduce_scatter"),
    _operation(4, "broadcast_"), _operation(5, "send", peer=1), _operation(5, "barrier", (), dtype=""),
]  # fmt: skip


def _analysed(folder: Path, caplog: pytest.LogCaptureFixture, *ranks: list[Any]) -> tuple[str, Any]:
    for rank, operations in enumerate(ranks):
        group = {"group": f"tp:{rank}", "ranks": list(range(len(ranks))), "failure": None, "operations": operations}
        recorder.write(folder / "ours", rank, [group])
    assert debug.main([str(folder / "ours"), "--flight-recorder", str(folder / "torch's")]) == 0
    out = folder / "db"
    caplog.set_level(logging.INFO, "Flight Recorder")
    fr_trace.main([str(folder / "torch's"), "--prefix", flight_recorder.PREFIX, "-o", str(out)])
    return caplog.text, pickle.loads(out.read_bytes())[1]


def test_ranks_that_agree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, found = _analysed(tmp_path, caplog, ALIKE, ALIKE[1:])
    names = [collective.collective_name for collective in found.collectives]
    assert names == ["gloo:_all_gather_base", "gloo:_reduce_scatter_base", "gloo:broadcast", "gloo:barrier"]
    assert all(collective.pass_check for collective in found.collectives), "from the first one that both still have"


def test_a_rank_that_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last = _operation(6, "all_reduce", ended=False)
    text, found = _analysed(tmp_path, caplog, [*ALIKE, last], [*ALIKE, last], ALIKE)
    assert found.collectives[-1].missing_ranks == {2}
    assert "Not all ranks joining collective, sequence number: 6" in text


def test_a_rank_in_another_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = _operation(6, "all_reduce", ended=False, site="train.py:12", call_text="all_reduce(sum) of 8 × float32")
    other = _operation(6, "all_gather", ended=False, site="train.py:30")
    text, found = _analysed(tmp_path, caplog, [*ALIKE, here], [*ALIKE, here], [*ALIKE, other])
    assert set(found.collectives[-1].mismatch_collectives) in ({2}, {0, 1}), "by the rank that it begins with"
    assert "COLLECTIVE_TYPE_MISMATCH" in text and "train.py:" in text


def test_nothing_of_ours_reads_a_pickle() -> None:
    assert "pickle.load" not in Path(flight_recorder.__file__).read_text(encoding="utf-8")
