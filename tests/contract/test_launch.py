from __future__ import annotations

import itertools
import logging
import multiprocessing
import multiprocessing.util
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import parallel_state
from device_communicators.base.errors import ConfigMismatchError, InvalidArgumentError, LaunchError, RendezvousError
from parallel_state import GroupOptions, LaunchConfig, launch
from tests.programs import FORK_SERVERS, Program, script

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
_numbers = itertools.count()


def processes_named(prefix: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it exited meanwhile
            state = (process / "stat").read_text("utf-8", "replace").rsplit(")", 1)[1].split()[0]
            if (process / "comm").read_text("utf-8", "replace").startswith(prefix) and state != "Z":
                found.append(int(process.name))
    return found


def listening(port: int | None = None) -> list[str]:
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()
    ]
    own = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    }
    if port is None:
        return sorted(row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own)
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]


@pytest.fixture(autouse=True)
def name():
    ports = listening()
    name = f"t{os.getpid() % 100_000}.{next(_numbers)}"
    yield name
    left = processes_named(f"{name}-")
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    assert listening() == ports


def half_of_the_ranks_return_first() -> float:
    parallel_state.init_distributed_environment()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_dp_group()
    if parallel_state.get_tp_group().rank_in_group == 1:
        time.sleep(1.0)
    return float(group.all_reduce(torch.ones(1)))


def test_a_rank_that_returns_without_destroying_its_groups_has_left() -> None:
    """The other ranks' groups keep working, as after an exit of a program that multiprocessing didn't start."""
    for method in ("forkserver", "spawn"):
        assert launch(half_of_the_ranks_return_first, nproc=4, start_method=method) == [2.0] * 4


def rank() -> int:
    return int(os.environ["RANK"])


def store() -> dist.Store:
    return next(iter(dist.rendezvous("env://")))[0]


def wait_for_ever() -> None:
    threading.Event().wait()


def describe(factor: float) -> dict[str, object]:
    dist.init_process_group("gloo")
    total = torch.full((3,), float(rank()))
    dist.all_reduce(total)
    dist.destroy_process_group()
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    return {
        "environ": [os.environ[name] for name in names],
        "total": total * factor,
        "name": multiprocessing.current_process().name,
        "threads": torch.get_num_threads(),
        "listeners": listening(int(os.environ["MASTER_PORT"])),
        "port": int(os.environ["MASTER_PORT"]),
    }


@pytest.mark.parametrize(("start_method", "nproc"), [("forkserver", 4), ("spawn", 2)])
def test_workers_find_what_torchrun_would_give_them(name, start_method, nproc, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = {"timeout": DEADLINE_S, "name": name, "start_method": start_method}
    results = launch(describe, nproc, kwargs={"factor": 2.0}, **options)
    for index, result in enumerate(results):
        assert result["environ"] == [str(index), str(index), str(nproc), str(nproc), "127.0.0.1", "1"]
        assert result["total"].tolist() == [nproc * (nproc - 1.0)] * 3
        assert result["name"] == f"{name}-{index}"
        assert result["threads"] == 1
        assert result["listeners"] == ["0100007F"]  # only 127.0.0.1
        assert listening(result["port"]) == []


def read_environ(names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_workers_have_the_environment_of_now_and_not_of_the_fork_servers_start(name, monkeypatch):
    monkeypatch.setenv("LAUNCH_TEST_A", "old")
    names = ["LAUNCH_TEST_A", "LAUNCH_TEST_B"]
    launch(read_environ, 2, args=[names], timeout=DEADLINE_S, name=name)
    monkeypatch.delenv("LAUNCH_TEST_A")
    found = launch(read_environ, 2, args=[names], timeout=DEADLINE_S, name=name, env={"LAUNCH_TEST_B": "new"})
    assert found == [[None, "new"]] * 2
    assert "LAUNCH_TEST_B" not in os.environ


def cores_and_words() -> tuple[list[int], list[int], str, list[int]]:
    before = sorted(os.sched_getaffinity(0))
    parallel_state.init_distributed_environment()
    within, words = sorted(os.sched_getaffinity(0)), parallel_state.get_world_group().explain()
    parallel_state.destroy_distributed_environment()
    return before, within, words, sorted(os.sched_getaffinity(0))


def two_cores() -> list[int]:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("needs two cores")
    return usable


def listed(text: str) -> list[int]:
    spans = [map(int, (part if "-" in part else f"{part}-{part}").split("-")) for part in text.strip(";,").split(",")]
    return [core for low, high in spans for core in range(low, high + 1)]


def listed_in(words: str) -> list[list[int]]:
    return [listed(text) for text in re.search(r"cores (\S+) \| (\S+)", words).groups()]  # type: ignore[union-attr]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no processes")
def test_each_rank_is_bound_to_its_share_of_the_launchers_cores(name):
    usable = two_cores()
    found = launch(cores_and_words, 2, bind="cores", name=name, timeout=DEADLINE_S)
    shares = [before for before, *_ in found]
    assert sorted(shares[0] + shares[1]) == usable
    assert all(shares)
    for before, within, words, after in found:
        assert within == after == before
        assert listed_in(words) == shares
    assert sorted(os.sched_getaffinity(0)) == usable
    with pytest.raises(InvalidArgumentError, match=rf"each of {len(usable) + 1} ranks must have a core of its own"):
        launch(cores_and_words, len(usable) + 1, bind="cores", name=name)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no processes")
def test_a_variable_binds_ranks_as_long_as_there_is_a_world(name):
    usable = two_cores()
    found = launch(cores_and_words, 2, env={"PARALLEL_STATE_CORES": "share"}, name=name, timeout=DEADLINE_S)
    assert sorted(found[0][1] + found[1][1]) == usable
    for before, _, words, after in found:
        assert before == after == usable
        assert listed_in(words) == [found[0][1], found[1][1]]
    with pytest.raises(LaunchError, match=r"must have a list of cores, but the number of lists is 1 for 2"):
        launch(cores_and_words, 2, env={"PARALLEL_STATE_CORES": str(usable[0])}, name=name, timeout=DEADLINE_S)


def told_on(lists: tuple[list[int], ...]) -> str:
    os.sched_setaffinity(0, lists[rank()])
    try:
        parallel_state.init_distributed_environment()
    except ConfigMismatchError as error:
        return str(error)
    return "nothing"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no processes")
@pytest.mark.parametrize("few", [0, 1])
def test_ranks_that_may_use_different_cores_share_none(name, few):
    """The ranks compare their cores. Otherwise each would take a share of its own, and one with too few fails alone."""
    usable = two_cores()[:2]
    lists = tuple(usable[:1] if each == few else usable for each in range(2))
    for told in launch(told_on, 2, args=(lists,), env={"PARALLEL_STATE_CORES": "share"}, name=name, timeout=DEADLINE_S):
        for each, cores in enumerate(lists):
            assert listed(re.search(rf"ranks \[{each}\] may use (\S+)", told)[1]) == cores  # type: ignore[index]
        assert "must be allowed the same cores" in told


def much(size: int) -> tuple[bytes, torch.Tensor]:
    return bytes(size), torch.full((size // 4,), rank())


def test_large_results_come_back_whole(name):
    size = 48 << 20
    for index, (data, tensor) in enumerate(launch(much, 2, args=(size,), timeout=DEADLINE_S, name=name)):
        assert len(data) == size
        assert tensor.numel() == size // 4 and bool((tensor == index).all())


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.add_(1)


def test_tensors_are_copied_and_a_config_stays_as_it_is(name):
    env = {"A": "1"}
    config = LaunchConfig(nproc=2, timeout=DEADLINE_S, name=name, env=env)
    tensors = [torch.zeros(1) for _ in range(300)]
    assert launch(sum_in_place, args=(tensors,), config=config, env={"B": "2"}) == [300.0, 300.0]
    assert sum(tensors).item() == 0
    assert config == LaunchConfig(nproc=2, timeout=DEADLINE_S, name=name, env={"A": "1"})


def sum_in_place(tensors: list[torch.Tensor]) -> float:
    return float(sum(add_one(tensor) for tensor in tensors))


calls: list[str] = []


def set_up() -> None:
    calls.append(f"logging at {logging.getLevelName(logging.getLogger().level)}")
    calls.append("setup")
    recorder = ModuleType("parallel_state.state")
    for function in (
        "init_distributed_environment",
        "initialize_model_parallel",
        "destroy_model_parallel",
        "destroy_distributed_environment",
    ):
        setattr(recorder, function, lambda _name=function, **kwargs: calls.append(f"{_name} {kwargs}"))
    sys.modules["parallel_state.state"] = recorder
    parallel_state.state = recorder


def record_call() -> tuple[list[str], str]:
    calls.append("fn")
    record = logging.LogRecord("a.b", logging.INFO, "", 1, "hello", None, None)
    return calls, logging.getLogger().handlers[0].format(record)  # `calls` is pickled after the groups are destroyed


def test_logging_then_setup_then_groups_then_the_function(name):
    options = {"tensor_model_parallel_size": 2, "sizes": {"cp": 1}, "order": "tp-cp-dp-pp"}
    options |= {"backend": "gloo", "axis_backends": {"tp": "gloo"}}
    asked = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "order": "tp-cp-dp-pp"}
    asked |= {"backend": "gloo", "axis_options": {"tp": GroupOptions("gloo")}, "cp": 1}
    results = launch(record_call, 2, setup=set_up, log_level="INFO", timeout=DEADLINE_S, name=name, **options)
    for index, (order, line) in enumerate(results):
        assert order == [
            "logging at INFO",
            "setup",
            "init_distributed_environment {'distributed_init_method': 'env://', 'backend': 'gloo'}",
            "initialize_model_parallel " + str(asked),
            "fn",
            "destroy_model_parallel {}",
            "destroy_distributed_environment {}",
        ]
        assert line.endswith(f"rank {index} INFO a.b: hello")


def coordinates() -> tuple[int, int, list[float]]:
    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return tp.rank_in_group, pp.rank_in_group, tp.all_reduce(torch.ones(1)).tolist()


def test_the_groups_are_made_and_destroyed_around_the_function(name):
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    results = launch(coordinates, 4, timeout=DEADLINE_S, name=name, **sizes)
    assert results == [(0, 0, [2.0]), (1, 0, [2.0]), (0, 1, [2.0]), (1, 1, [2.0])]


def test_one_worker_leaves_no_group_behind():
    assert launch(coordinates, 1, tensor_model_parallel_size=1) == [(0, 0, [1.0])]
    with pytest.raises(LaunchError):
        launch(fail, 1, tensor_model_parallel_size=1)
    assert parallel_state.try_get_world_group() is None and not dist.is_initialized()


def fail() -> None:
    raise ValueError("the reason")


def meet(world_size: int) -> tuple[list[str | None], float]:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    shared = store()
    if rank() == 0:
        shared.set("rank 0", str(os.getpid()))
    else:
        gone = os.pidfd_open(int(shared.get("rank 0")))
        shared.add("held", 1)
        assert select.select([gone], [], [], DEADLINE_S)[0]
        for _ in range(100):
            shared.add("after", 1)
    while rank() == 0 and shared.add("held", 0) < world_size - 1:
        pass
    return read_environ(["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]), total.item()


def test_a_rank_offset_starts_this_nodes_ranks_and_the_nodes_leave_together(name):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = LaunchConfig(world_size=3, master_port=port, timeout=DEADLINE_S, name=name)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(launch, meet, 2, args=(3,), config=config, rank_offset=1)
        first = pool.submit(launch, meet, 1, args=(3,), config=config)
        assert first.result() == [(["0", "0", "3", "1"], 3.0)]
        assert second.result() == [(["1", "0", "3", "2"], 3.0), (["2", "1", "3", "2"], 3.0)]


class Unpicklable(Exception):
    def __init__(self, lock: object, *, text: str) -> None:
        super().__init__(text)
        self.lock = lock

    def __reduce__(self):
        raise TypeError("not me")


def fail_as(how: str) -> object:
    if rank() != 1:
        wait_for_ever()
    if how == "raise":
        raise ValueError("the reason")
    if how == "unpicklable exception":
        raise Unpicklable(threading.Lock(), text="the reason")
    if how == "huge message":
        raise ValueError("the reason " + "x" * (32 << 20) + " the end")
    if how == "unpicklable result":
        return threading.Lock()
    if how.startswith("exit"):
        sys.exit(int(how[-1]))
    if how.startswith("_exit"):
        os._exit(int(how[-1]))
    os.kill(os.getpid(), signal.Signals[how])
    return None


@pytest.mark.parametrize(
    ("how", "exit_code", "text"),
    [
        ("raise", 1, r"raised ValueError: the reason[\s\S]*in fail_as\n.*raise ValueError"),
        ("unpicklable exception", 1, r"Unpicklable: the reason[\s\S]*in fail_as\n"),
        ("huge message", 1, r"ValueError: the reason xxx[\s\S]*characters left out[\s\S]*the end"),
        ("unpicklable result", 1, r"rank 1 must return a picklable value, but returned a lock"),
        ("exit 0", 0, r"SystemExit\(0\); a function that is done must return[\s\S]*in fail_as\n"),
        ("exit 2", 2, r"SystemExit\(2\)"),
        ("_exit 0", 0, r"ended with exit code 0 before the function returned"),
        ("_exit 3", 3, r"ended with exit code 3 before the function returned"),
        ("SIGKILL", -9, r"signal 9 \(SIGKILL\) before the function returned.*out of memory"),
        ("SIGSEGV", -11, r"signal 11 \(SIGSEGV\)[\s\S]*Segmentation fault[\s\S]*in fail_as"),
    ],
)
def test_a_failing_rank_is_told_with_its_reason_and_the_others_are_stopped(name, how, exit_code, text):
    with pytest.raises(LaunchError, match=text) as caught:
        launch(fail_as, 2, args=(how,), timeout=DEADLINE_S, name=name)
    assert (caught.value.rank, caught.value.exit_code) == (1, exit_code)
    assert re.match(rf"rank 1 \({name}-1, pid \d+\)", str(caught.value))
    assert "later failures" not in str(caught.value)
    assert len(str(caught.value)) < 40_000
    assert processes_named(f"{name}-") == []


def fail_one_after_the_other() -> None:
    shared = store()
    if rank() == 2:

        def leave() -> None:
            shared.set("rank 2 has reported", "")
            for other in range(4):
                if other != 2:
                    select.select([pidfds[other]], [], [], DEADLINE_S)

        shared.wait([f"pid {other}" for other in range(4) if other != 2])
        pidfds = {other: os.pidfd_open(int(shared.get(f"pid {other}"))) for other in range(4) if other != 2}
        multiprocessing.util.Finalize(None, leave, exitpriority=0)
        raise ValueError("the first")
    shared.set(f"pid {rank()}", str(os.getpid()))
    shared.wait(["rank 2 has reported"])
    raise RuntimeError("a later one")


def test_the_first_failure_in_time_is_the_one_whoever_exits_first(name):
    with pytest.raises(LaunchError, match=r"rank 2 .* raised ValueError: the first") as caught:
        launch(fail_one_after_the_other, 4, timeout=DEADLINE_S, name=name)
    later = re.findall(r"later failures: (.*)", str(caught.value))
    assert len(later) == 1 and "raised RuntimeError: a later one" in later[0]
    assert (caught.value.rank, caught.value.exit_code) == (2, 1)


def crash_among_peers() -> None:
    dist.init_process_group("gloo")
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(1), src=1)


def test_a_crash_comes_before_what_it_does_to_others(name):
    with pytest.raises(LaunchError, match=r"^rank 1 .*SIGKILL") as caught:
        launch(crash_among_peers, 4, timeout=DEADLINE_S, name=name)
    assert (caught.value.rank, caught.value.exit_code) == (1, -9)


def hang_on_rank_one() -> None:
    if rank() == 1:
        wait_for_ever()


def test_the_deadline_tells_who_hangs_and_where(name):
    begin = time.monotonic()
    with pytest.raises(
        LaunchError, match=r"timed out after 2.5 s: of 2 ranks 1 were still running[\s\S]*in wait_for_ever"
    ) as caught:
        launch(hang_on_rank_one, 2, timeout=2.5, name=name)
    assert caught.value.rank == 1 and "rank 0 was" not in str(caught.value)
    assert time.monotonic() - begin < 4.5


def never_leave(exiting: bool) -> None:
    threading.Thread(target=wait_for_ever).start()  # not a daemon, so the interpreter waits for it
    if exiting and rank() == 1:
        raise ValueError("the reason")


def test_a_worker_that_returns_and_does_not_leave_is_held_to_the_deadline(name):
    with pytest.raises(LaunchError, match=r"timed out after 2 s: of 2 ranks 0, 1 were still running"):
        launch(never_leave, 2, args=(False,), timeout=2, name=name)


def interrupt(pid: int) -> None:
    if rank() == 0:
        os.kill(pid or os.getpid(), signal.SIGINT)
    wait_for_ever()


@pytest.mark.parametrize("whom", ["launcher", "worker"])
def test_an_interrupt_is_no_failure(name, whom):
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    with pytest.raises(KeyboardInterrupt):
        launch(interrupt, 2, args=(os.getpid() if whom == "launcher" else 0,), timeout=DEADLINE_S, name=name)
    assert processes_named(f"{name}-") == []
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers


def clean_up_on_interrupt(done: Path) -> None:
    """A terminal sends Ctrl-C to all ranks. Rank 0 exits at once; the others clean up."""
    try:
        store().set(f"pid {rank()}", str(os.getpid()))
        if rank() == 0:
            for other in range(1, 4):
                os.kill(int(store().get(f"pid {other}")), signal.SIGINT)
            raise KeyboardInterrupt
        wait_for_ever()
    except KeyboardInterrupt:
        if rank() != 0:
            threading.Event().wait(0.5)
            (done / str(rank())).touch()
        raise


def test_an_interrupt_leaves_the_others_time_to_clean_up(name, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        launch(clean_up_on_interrupt, 4, args=(tmp_path,), timeout=DEADLINE_S, name=name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]


def has_ended(pid: int) -> bool:
    """A zombie has exited; only the fork server can reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stay(pids: Path) -> None:
    (pids / str(os.getpid())).touch()
    wait_for_ever()


@pytest.mark.parametrize(("error", "raised"), [(OSError("no more"), LaunchError), (KeyboardInterrupt(), None)])
def test_a_start_that_is_broken_off_leaves_no_rank_behind(name, error, raised, tmp_path, monkeypatch):
    original = multiprocessing.context.ForkServerProcess._Popen

    def start_the_first(process):
        if not process.name.endswith("-0"):
            while not list(tmp_path.iterdir()):
                assert multiprocessing.active_children()
            raise error
        return original(process)

    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "_Popen", staticmethod(start_the_first))
    with pytest.raises(
        raised or KeyboardInterrupt, match="ranks 0 to 2 could not be started.*no more" if raised else None
    ):
        launch(stay, 3, args=(tmp_path,), timeout=DEADLINE_S, name=name)
    (pid,) = tmp_path.iterdir()
    assert has_ended(int(pid.name)) and processes_named(f"{name}-") == []


def test_a_handler_of_the_program_stays_and_its_exception_comes_through(name):
    class Stop(Exception): ...

    def stop(number, frame):
        raise Stop

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Stop):
            launch(terminate, 2, args=(os.getpid(),), timeout=DEADLINE_S, name=name)
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
    assert processes_named(f"{name}-") == []


def terminate(pid: int) -> None:
    if rank() == 0:
        os.kill(pid, signal.SIGTERM)
    wait_for_ever()


KILL_THE_FORK_SERVER = """
import os, signal, threading
from device_communicators.base.errors import LaunchError
from parallel_state.launch.launcher import launch

def kill():
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()

def rank():
    return os.environ["RANK"]

if __name__ == "__main__":
    try:
        launch(kill, 2, timeout=60, name="{name}")
    except LaunchError:
        print(launch(rank, 2, timeout=60, name="{name}"))
"""

PROGRAM = """
import os, re, sys
from parallel_state.launch.launcher import launch

def hold():
    print(os.getpid(), os.getppid(), flush=True)
    while True:
        re.match("(a+)+$", "a" * 30 + "b")  # holds the GIL

if __name__ == "__main__" or {unguarded}:
    launch(hold, {nproc}, start_method="{start_method}", timeout=60, name="{name}")
"""


SIGNALS = """
import os, re, signal, sys, threading
from parallel_state.launch.launcher import launch

def tell(number, frame):
    os.write(1, f"told {{signal.Signals(number).name}}\\n".encode())
    sys.exit(0)

def hold(deaf_rank):
    deaf = os.environ["RANK"] == deaf_rank
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if not deaf:
            signal.signal(number, tell)
    os.write(1, f"{{os.getpid()}}\\n".encode())
    while deaf:
        re.match("(a+)+$", "a" * 30 + "b")  # holds the GIL
    threading.Event().wait()

if __name__ == "__main__":
    launch(hold, 2, args=("{deaf_rank}",), timeout=60, name="{name}")
"""

HOLD_THE_FORK_SERVER = """
import signal, sys, threading

if "forkserver" in sys.orig_argv[-1]:
    print("the fork server starts", flush=True)
    while signal.SIGINT not in signal.sigpending():
        threading.Event().wait(0.01)
"""


def start_program(path: Path, text: str = PROGRAM, **values: object) -> Program:
    path.write_text(text.format(**values), encoding="utf-8")
    return Program(f"{FORK_SERVERS}{script(path, [])}", environment_of(path))


def start_interpreter(path: Path, text: str = PROGRAM, **values: object) -> subprocess.Popen[str]:
    path.write_text(text.format(**values), encoding="utf-8")
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment_of(path),
        cwd=path.parent,
        start_new_session=True,  # a terminal signals a whole process group
    )


def environment_of(path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{path.parent}"}


@pytest.mark.parametrize(("start_method", "nproc"), [("forkserver", 2), ("spawn", 1)])
def test_workers_die_with_a_launcher_that_is_killed(name, start_method, nproc, tmp_path):
    program = start_program(tmp_path / "program.py", start_method=start_method, name=name, nproc=nproc, unguarded=False)
    try:
        lines = program.lines(nproc, DEADLINE_S)
        workers, parents = zip(*(map(int, line.split()) for line in lines), strict=True)
        watched = [*workers, *({*parents} - {program.pid})]
        gone = [os.pidfd_open(pid) for pid in watched]
    finally:
        program.kill()
    assert len(gone) == {"forkserver": nproc + 1, "spawn": nproc}[start_method]
    for fd, limit_s in zip(gone, [2.0] * nproc + [DEADLINE_S], strict=False):
        assert select.select([fd], [], [], limit_s)[0]
        os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_stops_the_ranks_and_then_the_launcher(name, number, tmp_path):
    program = start_program(tmp_path / "program.py", SIGNALS, name=name, deaf_rank="")
    try:
        pids = program.lines(2, DEADLINE_S)
        stops_its_ranks(program.pid, number, pids)
        output, errors = program.communicate(DEADLINE_S)
    finally:
        program.kill()
    assert output.split("\n")[2:] == [f"told {number.name}"] * 2 + [""]
    assert program.returncode == -number
    assert "Traceback" not in errors, errors


def test_ctrl_c_stops_a_rank_that_does_not_heed_it_and_shows_one_traceback(name, tmp_path):
    with start_interpreter(tmp_path / "program.py", FORK_SERVERS + SIGNALS, name=name, deaf_rank="1") as program:
        try:
            stops_its_ranks(program.pid, signal.SIGINT, [program.stdout.readline() for _ in range(2)])
            output, errors = program.communicate(timeout=DEADLINE_S)
        finally:
            program.kill()
    assert output == "told SIGINT\n"
    assert program.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1, errors


def stops_its_ranks(launcher: int, number: signal.Signals, pids: Sequence[str]) -> None:
    gone = [os.pidfd_open(int(pid)) for pid in pids]
    os.kill(launcher, number)
    begin = time.monotonic()
    for fd in gone:
        assert select.select([fd], [], [], DEADLINE_S)[0]
        os.close(fd)
    assert time.monotonic() - begin < 2.0


def test_ctrl_c_while_the_fork_server_starts_shows_the_launchers_traceback_alone(name, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HOLD_THE_FORK_SERVER)
    with start_interpreter(
        tmp_path / "program.py", start_method="forkserver", name=name, nproc=2, unguarded=False
    ) as program:
        try:
            assert program.stdout.readline() == "the fork server starts\n"
            os.killpg(program.pid, signal.SIGINT)
            output, errors = program.communicate(timeout=DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    assert (output, program.returncode) == ("", -signal.SIGINT)
    assert errors.count("Traceback") == 1 and errors.endswith("KeyboardInterrupt\n"), errors


def test_workers_die_with_the_fork_server_and_the_next_launch_has_a_new_one(name, tmp_path):
    # a separate program, because this process's fork server has other workers
    program = start_program(tmp_path / "program.py", KILL_THE_FORK_SERVER, name=name)
    output, errors = program.communicate(DEADLINE_S)
    assert output == "['0', '1']\n", errors


def test_a_program_without_a_main_guard_is_told_so(name, tmp_path):
    program = start_program(tmp_path / "program.py", start_method="spawn", name=name, nproc=1, unguarded=True)
    _, errors = program.communicate(DEADLINE_S)
    assert program.returncode == 1
    assert "LaunchError: rank 0 " in errors and "InvalidArgumentError: launch was called" in errors
    assert errors.count("if __name__ == '__main__':") >= 2


def test_one_worker_runs_in_this_process_and_the_environment_comes_back(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    before = dict(os.environ)
    makes = import_module("torch.distributed.rendezvous")._create_c10d_store

    def inline() -> tuple[int, list[str | None], float]:
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        found = read_environ(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "EXTRA"])
        os.environ["NEW"] = "1"
        del os.environ["KEPT"]
        return os.getpid(), found, total.item()

    assert launch(inline, 1, env={"EXTRA": "x"}) == [(os.getpid(), ["0", "1", "0", "1", "x"], 1.0)]
    assert dict(os.environ) == before
    assert import_module("torch.distributed.rendezvous")._create_c10d_store is makes


def test_one_worker_per_accelerator_or_one():
    devices = torch.accelerator.device_count()
    assert devices > 1 or launch(os.getpid) == [os.getpid()]


def test_one_worker_with_a_deadline_is_a_process(name):
    assert launch(os.getpid, 1, timeout=DEADLINE_S, name=name) != [os.getpid()]


@pytest.mark.parametrize("error", [ValueError("the reason"), SystemExit(3)])
def test_one_worker_fails_as_many_do(error):
    def inline() -> None:
        raise error

    before = dict(os.environ)
    with pytest.raises(LaunchError, match=str(error)) as caught:
        launch(inline, 1)
    assert caught.value.__cause__ is error and caught.value.rank == 0
    assert dict(os.environ) == before


def test_one_worker_is_interrupted():
    def inline() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(inline, 1)


def read_port() -> int:
    return int(os.environ["MASTER_PORT"])


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=rf"127\.0\.0\.1 port {port}: .*in use; pass .*a free port as master_port"
        ):
            launch(read_port, 1, master_port=port)
        assert launch(read_port, 1, preferred_port=port) != [port]
    assert launch(read_port, 1, preferred_port=port) == [port]
    assert launch(read_port, 1, master_port=port) == [port]


@pytest.mark.parametrize("address", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours(address):
    with pytest.raises(RendezvousError, match=address):
        launch(read_port, 1, master_addr=address)


def test_a_node_that_finds_no_store():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"rank 1 .*127.0.0.1:{port}"):
            launch(rank, 1, world_size=2, rank_offset=1, master_port=port, timeout=0.1)


def local_function():
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("fn", "options", "text"),
    [
        (rank, {"nproc": 0}, "nproc must be at least 1, but is 0"),
        (rank, {"nproc": -2}, "nproc must be at least 1, but is -2"),
        (rank, {"nproc": 4, "world_size": 2}, "world_size must be at least nproc"),
        (rank, {"nproc": 2, "rank_offset": 1}, "rank_offset must be from 0 to 0, but is 1"),
        (rank, {"nproc": 2, "world_size": 4, "rank_offset": 3, "master_port": 1}, "rank_offset must be from 0 to 2"),
        (rank, {"nproc": 2, "world_size": 4, "rank_offset": -1, "master_port": 1}, "rank_offset must be"),
        (rank, {"nproc": 2, "world_size": 4}, "several nodes need one master_port"),
        (rank, {"nproc": 2, "master_port": 65_536}, "a port must be from 0 to 65535, but is 65536"),
        (rank, {"nproc": 2, "master_port": -1}, "a port must be from 0 to 65535, but is -1"),
        (rank, {"nproc": 2, "master_port": 5, "preferred_port": 5}, "exclude each other"),
        (rank, {"nproc": 2, "bind": "sockets"}, "bind must be 'cores' or None, but is 'sockets'"),
        (rank, {"nproc": 2, "bind": "cores", "env": {"PARALLEL_STATE_CORES": "0|1"}}, "must not both set"),
        (rank, {"nproc": 2, "start_method": "fork"}, "start_method must be 'forkserver' or 'spawn'"),
        (rank, {"nproc": 2, "timeout": 0}, "timeout must be positive"),
        (rank, {"nproc": 2, "timeout": float("nan")}, "timeout must be positive"),
        (rank, {"nproc": 2, "grace": -1}, "grace must not be negative"),
        (rank, {"nproc": 2, "env": {"RANK": "0"}}, "env must not have .* RANK"),
        (rank, {"nproc": 2, "log_level": "LOUD"}, "log_level must be one of"),
        (rank, {"nproc": 2, "backend": "gloo"}, "need sizes"),
        (rank, {"nproc": 2, "init_method": "tcp://h:1"}, "need sizes"),
        (lambda: 0, {"nproc": 2}, "fn must be picklable.*top level of a module"),
        (local_function(), {"nproc": 2}, "fn must be picklable.*top level of a module"),
        (rank, {"nproc": 2, "setup": lambda: 0}, "setup must be picklable.*top level of a module"),
        (rank, {"nproc": 2, "args": (threading.Lock(),)}, "args and kwargs must be picklable"),
    ],
)
def test_arguments_that_can_not_work(fn, options, text):
    with pytest.raises(InvalidArgumentError, match=text):
        launch(fn, **options)
