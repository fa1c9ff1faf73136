"""Each store operation ends by its deadline, and only one file calls a torch store's methods."""

from __future__ import annotations

import ast
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from device_communicators.base.bounded_store import BoundedStore, StoreSilentError
from tests.unit.test_import_direction import SOURCES, Source

DOOR = "device_communicators/base/bounded_store.py"
SERVERS = "device_communicators/control/store.py"
RAW = ("Store", "TCPStore", "PrefixStore", "FileStore", "HashStore", "rendezvous")
NAMES = {*(f"dist.{name}" for name in RAW), *RAW[1:4], "c10d._get_default_store"}
OPERATIONS = ("check", "multi_get", "multi_set", "compare_set", "delete_key", "num_keys")
AMBIGUOUS = ("get", "set", "add", "wait", "append")
"""Also methods of dicts, sets and works. They count if the receiver's name contains "store"."""

MAY_HOLD_RAW = {
    "device_communicators/c10d/group.py:Group.split": "torch's options of a new backend take a store",
    "device_communicators/c10d/group.py:Group.shrink": "torch's options and table of groups take a store",
    "device_communicators/base/torch_internals.py:gloo_backend": "gloo takes one; a helper thread runs it",
    "device_communicators/c10d/world.py:World.__init__": "reads an address",
    "device_communicators/c10d/world.py:address_of": "reads an address",
    "parallel_state/groups/creation.py:follow": "reads an address",
    "parallel_state/groups/world.py:_make_default_group": "torch's fake backend; in memory",
    "parallel_state/groups/world.py:_init_process_group.init": "torch's init; run_watched runs it in a thread",
    "parallel_state/process_groups/pool.py:ProcessGroupPool.alone": "torch's init of one rank; in memory",
    "parallel_state/startup/stores.py:StoreWay": "the type of what makes a store",
    "parallel_state/startup/stores.py:find_store": "the type of what makes a store",
    "parallel_state/startup/stores.py:_torch_rendezvous": "made by torch, within a deadline",
    "parallel_state/startup/stores.py:_serve": "made within a deadline",
    "parallel_state/startup/stores.py:_connect": "made within a deadline",
    "parallel_state/startup/stores.py:_store_of_launch": "made at start",
    "parallel_state/startup/stores.py:open_tcp_store": "made within a deadline",
    "parallel_state/startup/stores.py:join_tcp_store": "made within a deadline",
    "device_communicators/base/torch_internals.py:new_group_of_members": "torch's take a store; run_watched runs it",
    "device_communicators/base/torch_internals.py:find_stores_by": "replaces what torch makes stores with",
    "device_communicators/base/torch_internals.py:find_stores_by.create": "replaces what torch makes stores with",
    "parallel_state/compat/sglang/parallel_state.py:init_distributed_environment": "in memory, or SGLang's own",
    "parallel_state/compat/sglang/utils.py:set_global_tcp_store": "keeps a store for the caller",
    "parallel_state/compat/sglang/utils.py:get_global_tcp_store": "gives it to the caller",
    "parallel_state/compat/sglang/utils.py:StatelessProcessGroup.create": "used through `bounded`",
    "parallel_state/compat/vllm/stateless.py:StatelessProcessGroup.create": "used through `bounded`",
    "parallel_state/compat/vllm/utils.py:create_tcp_store": "the caller's",
    "parallel_state/compat/vllm/utils.py:get_cached_tcp_store_client": "the caller's",
    "parallel_state/compat/vllm/utils.py:stateless_init_torch_distributed_process_group": "given to gloo",
    "parallel_state/tools/check/meeting.py:open_meeting": "given to Meeting, which makes it bounded",
    "parallel_state/tools/check/meeting.py:_serve": "made within a deadline",
    "parallel_state/tools/check/meeting.py:_join_other": "made within a deadline",
    "parallel_state/tools/check/meeting.py:_connect": "made within a deadline",
    "parallel_state/startup/stores.py:store_in_words": "reads an address",
    "parallel_state/launch/store.py:_torch_store": "serves a store, asks it nothing",
}
"""Functions that make, name or pass on a torch store, with what bounds its operations."""


class Found(NamedTuple):
    where: str
    line: int
    what: str


def raw_stores(tree: ast.Module, name: str) -> Iterator[Found]:
    def walk(node: ast.AST, scope: str) -> Iterator[Found]:
        for child in ast.iter_child_nodes(node):
            inside = scope
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{scope}.{child.name}".lstrip(".")
            where = f"{name}:{inside}"
            if isinstance(child, ast.Call):
                function = ast.unparse(child.func)
                if function in ("BoundedStore", "BoundedStore.of"):
                    continue
                if isinstance(child.func, ast.Attribute) and ".raw" in ast.unparse(child.func.value):
                    yield Found(f"{where}: calls a method of `raw`", child.lineno, function)
            text = ast.unparse(child) if isinstance(child, (ast.Attribute, ast.Name)) else ""
            if text in NAMES or (text.endswith(".raw") and "store" in text):
                yield Found(where, child.lineno, text)  # type: ignore[attr-defined]
            yield from walk(child, inside)

    return walk(tree, "")


def operations_in(tree: ast.Module, name: str, functions: set[str]) -> Iterator[Found]:
    def walk(node: ast.AST, scope: str) -> Iterator[Found]:
        for child in ast.iter_child_nodes(node):
            inside = scope
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{scope}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                receiver, operation = ast.unparse(child.func.value), child.func.attr
                is_store = operation in OPERATIONS and receiver != "forks"
                is_store = is_store or (operation in AMBIGUOUS and "store" in receiver.lower())
                is_bounded = receiver.startswith("BoundedStore(") or receiver == "bounded"
                if f"{name}:{inside}" in functions and is_store and not is_bounded:
                    yield Found(f"{name}:{inside}", child.lineno, ast.unparse(child.func))
            yield from walk(child, inside)

    return walk(tree, "")


def _others() -> list[Source]:
    return [each for each in SOURCES if each.name != DOOR and not each.name.startswith(SERVERS)]


def test_no_store_of_torch_is_used_but_through_the_bounded_one() -> None:
    found = [each for source in _others() for each in raw_stores(source.tree, source.name)]
    unknown = [each for each in found if each.where not in MAY_HOLD_RAW]
    assert not unknown, "make it a BoundedStore at once, or add a row with what bounds its operations"
    assert {each.where for each in found} == set(MAY_HOLD_RAW), "a row of the table is stale"
    used = [each for source in _others() for each in operations_in(source.tree, source.name, set(MAY_HOLD_RAW))]
    assert not used, "an operation without a deadline: call it on a BoundedStore"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "def f(self):\n    self.door.raw.check(['key'])",
        "def f(options):\n    store = dist.PrefixStore('a', options.store)\n    store.set('a', 'b')",
        "def f(store: dist.Store):\n    return store.get('key')",
        "def f():\n    return c10d._get_default_store().get('key')",
    ],
)
def test_the_lint_finds(code: str) -> None:
    assert list(raw_stores(ast.parse(code), "file.py"))


class SilentStore:
    def __init__(self) -> None:
        self.answer = threading.Event()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.answer.wait(30.0)
        return True


def test_an_operation_without_an_answer_ends_at_its_deadline() -> None:
    silent = SilentStore()
    store = BoundedStore(silent)
    started = time.monotonic()
    with pytest.raises(StoreSilentError, match="has not answered"):
        store.within(0.2).check(["key"])
    assert 0.2 <= time.monotonic() - started < 1.0
    with pytest.raises(StoreSilentError):
        store.within(0.1).check(["key"])
    assert silent.asked == 1
    silent.answer.set()
    assert store.within(5.0).check(["key"])
    assert silent.asked == 2


def test_a_store_that_owns_its_timeout_is_asked_in_the_calling_thread() -> None:
    class EndsAtTimeout:
        def set_timeout(self, timeout: timedelta) -> None:
            self.timeout_s = timeout.total_seconds()

        def check(self, keys: list[str]) -> bool:
            self.thread = threading.current_thread()
            if keys != ["key"]:
                time.sleep(self.timeout_s)
                raise dist.DistNetworkError("no answer")
            return True

    made = EndsAtTimeout()
    store = BoundedStore(made, owns_timeout=True)
    assert store.within(5.0).check(["key"]) and made.thread is threading.current_thread()
    started = time.monotonic()
    with pytest.raises(StoreSilentError, match="has not answered"):
        store.within(0.2).check(["missing"])
    assert 0.2 <= time.monotonic() - started < 1.0


def test_a_job_in_a_helper_thread_ends_at_a_failure_of_the_store() -> None:
    done, server = threading.Event(), dist.HashStore()

    def job(store: BoundedStore) -> None:
        store.set("key", "value")
        try:
            store.append("log", "")
            raise dist.DistNetworkError("lost")
        finally:
            done.set()

    BoundedStore(server).start(job)
    assert done.wait(30.0) and server.get("key") == b"value"


def test_a_death_ends_an_operation_without_an_answer() -> None:
    dead = threading.Event()
    silent = SilentStore()
    threading.Timer(0.1, dead.set).start()
    started = time.monotonic()
    with pytest.raises(StoreSilentError):
        BoundedStore(silent).until(started + 30.0, dead.is_set).check(["key"])
    assert time.monotonic() - started < 1.0
    silent.answer.set()


def test_errors_of_a_store_are_raised_as_they_are() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = BoundedStore(dist.TCPStore("127.0.0.1", server.port))
    store.set("key", "value")
    assert store.get("key") == b"value" and store.served_by == 0
    del server
    with pytest.raises(dist.DistNetworkError):
        for _ in range(3):
            store.check(["key"])


@pytest.mark.slow
def test_an_idle_helper_holds_no_store() -> None:
    """A server closes its port with its last reference."""
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    bounded = BoundedStore(server)
    bounded.set("key", "value")
    assert bounded.check(["key"])
    alive = weakref.ref(bounded)
    del bounded
    time.sleep(0.05)
    gc.collect()
    assert alive() is None
