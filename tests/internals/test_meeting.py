"""Rendezvous of ranks that are threads, over a launcher's store in memory."""

from __future__ import annotations

import errno
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from device_communicators.base.bounded_store import BoundedStore
from device_communicators.base.errors import (
    CommunicationError,
    ConfigMismatchError,
    PeerDiedError,
    RendezvousError,
)
from device_communicators.control.store import ControlStore
from device_communicators.cpu.watching import listen
from device_communicators.liveness.health import Watcher
from parallel_state.startup import interfaces, rendezvous
from parallel_state.startup.binding import different_cores
from parallel_state.startup.environment import ProcessEnvironment
from parallel_state.startup.interfaces import Address
from parallel_state.startup.rendezvous import _Meeting
from parallel_state.startup.stores import StoreWay

SOON_S = 10.0
AMPLE_S = 30.0


class Job:
    def __init__(self) -> None:
        self.launcher = dist.HashStore()
        self._threads = ThreadPoolExecutor(8)
        self._watchers: dict[str, Watcher] = {}

    def meeting(self, rank: int, size: int, timeout_s: float = AMPLE_S) -> _Meeting:
        place = ProcessEnvironment(rank, rank, size, size, "localhost", 1, "explicit")
        pid, watcher = str(secrets.randbits(30)), Watcher()
        self._watchers[pid] = watcher
        own_place = Address("1", "127.0.0.1", pid=pid, endpoint=listen(watcher, "127.0.0.1"))
        way = StoreWay("here", lambda: self.launcher, "start")
        return _Meeting(place, own_place, way, timeout_s, time.monotonic() + timeout_s)

    def start(self, meeting: _Meeting) -> Future[BoundedStore]:
        return self._threads.submit(meeting.enter_world if meeting.place.rank else meeting.open_world)

    def kill(self, meeting: _Meeting) -> None:
        self._watchers[meeting.own_place.pid].close()

    def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.close()
        self._threads.shutdown()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def _entered(monkeypatch: pytest.MonkeyPatch) -> dict[int, BoundedStore]:
    entered: dict[int, BoundedStore] = {}
    enter = _Meeting._enter

    def enter_and_note(meeting: _Meeting, world: BoundedStore) -> bool:
        is_in = enter(meeting, world)
        if is_in:
            entered[meeting.place.rank] = world
        return is_in

    monkeypatch.setattr(_Meeting, "_enter", enter_and_note)
    return entered


def _until(condition: object) -> None:
    until = time.monotonic() + AMPLE_S
    while not condition() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.005)


def test_all_ranks_get_the_places_of_all(job: Job) -> None:
    meetings = [job.meeting(rank, 3) for rank in range(3)]
    stores = [future.result(AMPLE_S) for future in [job.start(meeting) for meeting in meetings]]
    assert all(meeting.places == {rank: each.own_place for rank, each in enumerate(meetings)} for meeting in meetings)
    stores[1].set("key", "value")
    assert stores[2].get("key") == b"value"


def test_a_rank_that_ends_is_named_at_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = _entered(monkeypatch)
    futures = {rank: job.start(job.meeting(rank, 4)) for rank in (0, 2, 3)}
    _until(lambda: len(entered) == 2)
    began = time.monotonic()
    entered[2].raw.close()
    for rank in (0, 3):
        with pytest.raises(PeerDiedError, match=r"global ranks \[2\] exited during") as told:
            futures[rank].result(AMPLE_S)
        assert told.value.suspect_ranks == (2,)
    assert time.monotonic() - began < SOON_S


def test_rank_0_ends(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = _entered(monkeypatch)
    first = job.meeting(0, 3)
    opened, other = job.start(first), job.start(job.meeting(1, 3))
    _until(lambda: 1 in entered)
    job.kill(first)
    with pytest.raises(PeerDiedError) as told:
        other.result(SOON_S)
    assert told.value.suspect_ranks == (0,)
    with pytest.raises(dist.DistError):
        opened.result(SOON_S)


@pytest.mark.slow
def test_a_rank_that_gave_up_is_not_the_one_that_is_missing(job: Job) -> None:
    opened = job.start(job.meeting(0, 3))
    with pytest.raises(RendezvousError, match=r"ranks \[2\] did not come") as own:
        job.meeting(1, 3, 1.0).enter_world()
    with pytest.raises(RendezvousError, match=r"ranks \[2\] did not come") as told:
        opened.result(10.0)
    assert own.value.suspect_ranks == told.value.suspect_ranks == (2,)


def test_a_rank_whose_own_name_resolves_late_is_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(rendezvous, "_OWN_NAME_S", 0.05)
    monkeypatch.setattr(interfaces, "gloo_address", lambda: str(released.wait(AMPLE_S)))
    place = rendezvous._whereabouts(time.monotonic() + AMPLE_S)
    released.set()
    assert place.network == interfaces.process().network != "" and place.pid == interfaces.process().pid


def test_a_rank_joins_the_next_round(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store still names the earlier round's rank 0. While that lives, it refuses a second process as rank 1."""
    old = [job.meeting(rank, 2) for rank in range(2)]
    for future in [job.start(meeting) for meeting in old]:
        future.result(AMPLE_S)
    launcher = dist.PrefixStore("start", job.launcher)
    launcher.set("world", old[0].own_place.endpoint)  # rank 0 was killed before it cleared the key
    entered, second = list[_Meeting](), job.meeting(1, 2)
    enter = _Meeting._enter

    def enter_and_note(meeting: _Meeting, world: BoundedStore) -> bool:
        is_in = enter(meeting, world)
        entered.extend([meeting] * is_in)
        return is_in

    monkeypatch.setattr(_Meeting, "_enter", enter_and_note)
    came = job.start(second)
    _until(lambda: "opened a world with another process" in second.obstacle)
    time.sleep(0.3)
    assert entered == [second], "it must not be there when rank 0 ends"
    job.kill(old[0])
    time.sleep(0.3)
    new = job.meeting(0, 2)
    job.start(new).result(AMPLE_S)
    came.result(AMPLE_S)


def test_a_rank_leaves_the_world_of_an_earlier_round_while_its_rank_0_lives(job: Job) -> None:
    """torchrun starts the next round while the last one's rank 0 still saves a checkpoint."""
    old = job.start(job.meeting(0, 3))
    came = job.start(job.meeting(1, 3))
    time.sleep(0.5)
    new = [job.start(job.meeting(rank, 3)) for rank in (0, 2)]
    for future in (came, *new):
        future.result(SOON_S)
    with pytest.raises(CommunicationError):
        old.result(AMPLE_S)


def test_a_rank_that_reaches_the_launcher_s_store_only(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, far = (job.meeting(rank, 3) for rank in range(3))
    for meeting, host in ((first, "a"), (second, "a"), (far, "b")):
        address = {"a": "10.0.0.1", "b": "10.0.0.2"}[host]
        endpoint = str(rendezvous.Endpoint.parse(meeting.own_place.endpoint)._replace(host=address))
        meeting.own_place = meeting.own_place._replace(network=host, address=address, name=host, endpoint=endpoint)
        meeting.places = {meeting.place.rank: meeting.own_place}
    store_at = rendezvous._store_at

    def refused(endpoint: rendezvous.Endpoint, timeout_s: float, met_at: str) -> ControlStore:
        port = 1 if threading.current_thread().name == "far" else endpoint.port
        return store_at(endpoint._replace(host="127.0.0.1", port=port), timeout_s, met_at)

    monkeypatch.setattr(rendezvous, "_store_at", refused)
    told: list[BaseException] = []

    def enter() -> None:
        try:
            far.enter_world()
        except RendezvousError as error:
            told.append(error)

    began, thread = time.monotonic(), threading.Thread(target=enter, name="far")
    thread.start()
    where = r"ranks \[0, 1\] on host a .* are not reached from rank 2 on host b"
    for future in [job.start(first), job.start(second)]:
        with pytest.raises(RendezvousError, match=where) as error:
            future.result(AMPLE_S)
        assert error.value.suspect_ranks == (0, 1)
    thread.join(AMPLE_S)
    assert "PARALLEL_STATE_PORTS" in str(told[0]) and "The rendezvous was at here" in str(told[0])
    assert time.monotonic() - began < SOON_S


def test_a_rank_stays_in_the_world_that_was_decided(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = _entered(monkeypatch)
    first, other = job.start(job.meeting(0, 3)), job.start(job.meeting(1, 3))
    _until(lambda: 1 in entered)
    far = job.meeting(2, 4)
    third = job.start(far)
    again = job.start(job.meeting(0, 3))
    for future in (first, other, third):
        with pytest.raises(Exception, match="rank 0 has 3 and rank 2 4"):
            future.result(AMPLE_S)
    for future in [again, job.start(job.meeting(1, 3)), job.start(job.meeting(2, 3))]:
        future.result(AMPLE_S)


def test_a_rank_that_can_not_listen_ends_the_start_of_all(job: Job) -> None:
    meetings = [job.meeting(rank, 3) for rank in range(3)]
    deaf = meetings[2]
    deaf.own_place = deaf.own_place._replace(endpoint="", obstacle="ports 5000-5001 are in use")
    deaf.places = {2: deaf.own_place}
    for future in [job.start(meeting) for meeting in meetings]:
        with pytest.raises(RendezvousError, match=r"rank 2 on .* can't listen .*: ports 5000-5001 are in use") as told:
            future.result(AMPLE_S)
        assert told.value.suspect_ranks == (2,)


def _enter_and_lose(
    job: Job, monkeypatch: pytest.MonkeyPatch, cause: Callable[[], Exception], lost_s: float, timeout_s: float = AMPLE_S
) -> tuple[Future[BoundedStore], Future[BoundedStore]]:
    entered = _entered(monkeypatch)
    opened, other = job.start(job.meeting(0, 3)), job.start(job.meeting(1, 3, timeout_s))
    _until(lambda: 1 in entered)
    until = time.monotonic() + lost_s

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: BoundedStore, *args: Any) -> Any:
            if store.raw is entered[1].raw and time.monotonic() < until:
                raise dist.DistNetworkError("no answer") from cause()
            return method(store, *args)

        return call

    for name in ("wait_for", "_ask"):
        monkeypatch.setattr(BoundedStore, name, failing(getattr(BoundedStore, name)))
    return opened, other


@pytest.mark.parametrize(
    ("cause", "lost_s"),
    [(lambda: OSError(errno.ENETUNREACH, "Network is unreachable"), 1.5), (ConnectionRefusedError, 0.4)],
    ids=["network down", "refused for a moment"],
)
def test_a_network_that_fails_for_a_moment_is_no_end(
    job: Job, monkeypatch: pytest.MonkeyPatch, cause: Callable[[], Exception], lost_s: float
) -> None:
    opened, other = _enter_and_lose(job, monkeypatch, cause, lost_s)
    time.sleep(lost_s + 0.1)
    third = job.start(job.meeting(2, 3))
    for future in (opened, other, third):
        future.result(AMPLE_S)


def test_rank_0_that_does_not_answer_is_suspected(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    _, other = _enter_and_lose(job, monkeypatch, lambda: TimeoutError(errno.ETIMEDOUT, "timed out"), 60.0, 1.0)
    with pytest.raises(RendezvousError, match=r"rank 0 serves the world's store, but does not answer") as told:
        other.result(SOON_S)
    assert told.value.suspect_ranks == (0,)


def test_a_late_rank_reads_the_verdict_at_the_launcher_s_store(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = _entered(monkeypatch)
    first = job.meeting(0, 3)
    job.start(first), (other := job.start(job.meeting(1, 3)))
    _until(lambda: 1 in entered)
    name = first.own_place.endpoint
    dist.PrefixStore("start", job.launcher).set(f"verdict{name}", json.dumps(["sizes", 3, 2, 4]))
    job.kill(first)
    with pytest.raises(ConfigMismatchError, match="rank 0 has 3 and rank 2 4"):
        other.result(SOON_S)


def test_a_complaint_of_a_rank_that_enters_then_is_withdrawn(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = job.meeting(0, 3), job.meeting(1, 3)
    name, launcher = first.own_place.endpoint, dist.PrefixStore("start", job.launcher)
    opened = job.start(first)
    for content in (["unreached", 1, other.own_place, "no answer"], ["unreached", 2, other.own_place, "no answer"]):
        launcher.set(f"complaint{name}", json.dumps(content))
        _until(lambda: launcher.get(f"complaint{name}") == b"")
    for future in [opened, job.start(other), job.start(job.meeting(2, 3))]:
        future.result(AMPLE_S)


def test_the_entries_are_read_as_written(job: Job) -> None:
    meeting = job.meeting(1, 2)
    size, *words = json.loads(json.dumps([2, *meeting.own_place]))
    assert size == 2 and Address.parse(words) == meeting.own_place


def test_ranks_of_each_host_must_begin_with_the_same_cores() -> None:
    def place(host: str, cores: str, network: str = "one") -> Address:
        return Address(network, name=host, cores=cores)

    assert different_cores({0: place("a", "0-3"), 1: place("a", "0-3"), 2: place("b", "4-7")}) == []
    assert different_cores({0: place("a", "0-3"), 1: place("a", ""), 2: Address(cores="0")}) == []
    found = different_cores({0: place("a", "0"), 1: place("b", "0-3"), 3: place("b", "4-7"), 2: place("b", "0-3")})
    assert found == ["b", "0-3", "1,2", "4-7", "3"]
