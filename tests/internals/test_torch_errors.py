from __future__ import annotations

import torch.distributed as dist

import parallel_state
from device_communicators.base.errors import CollectiveTimeoutError, PeerDiedError
from device_communicators.c10d.group import as_torch_error
from tests.unit.test_errors import WAYS, _check_same, _made


def test_errors_that_are_torchs_as_well_survive() -> None:
    error = as_torch_error(_made(PeerDiedError))
    assert isinstance(error, dist.DistBackendError) and isinstance(error, PeerDiedError)
    for way in WAYS:
        _check_same(way(error), error)


def test_error_of_reads_the_text_of_torchs_error() -> None:
    text = str(as_torch_error(_made(CollectiveTimeoutError, "all_reduce was late")))
    found = parallel_state.error_of(dist.DistBackendError(f"{text}\nException raised from …"))
    assert isinstance(found, CollectiveTimeoutError) and found.suspect_ranks == (2, 5)
    assert found.__traceback__ is None
    assert parallel_state.error_of(ValueError(text)) is None
