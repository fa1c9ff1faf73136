"""`import parallel_state` starts nothing, changes nothing, and imports nothing slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300

LOOK_AROUND = """
import gc, json, locale, logging, multiprocessing, os, random, signal, socket, sys, threading, warnings
import torch, torch.distributed as dist
def look():
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the descriptor of the listing itself
            pass
    return {
        "environment": dict(os.environ),
        "threads": len(os.listdir("/proc/self/task")),
        "sockets": sorted(link for link in links if link.startswith("socket:")),
        "files": len(links),
        "segments": [line for line in open("/proc/self/maps") if "/dev/shm/" in line],
        "modules": sorted(sys.modules),
        "default_dtype": str(torch.get_default_dtype()),
        "torch_threads": torch.get_num_threads(),
        "hooks": repr((sys.excepthook, sys.unraisablehook, threading.excepthook, gc.callbacks, sys.gettrace())),
        "imports": repr((sys.path, sys.meta_path, sys.path_hooks)),
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "warnings": repr(warnings.filters),
        "logging": [
            repr((name, logger.level, logger.handlers, logger.propagate))
            for name, logger in [("", logging.root), *sorted(logging.root.manager.loggerDict.items())]
            if isinstance(logger, logging.Logger) and (logger.level or logger.handlers or not logger.propagate)
        ],
        "random": repr((random.getstate(), torch.get_rng_state().tolist())),
        "others": repr((locale.setlocale(locale.LC_ALL), multiprocessing.get_start_method(allow_none=True))),
    }
before = look()
import device_communicators
upper = [name for name in sys.modules if name.split(".")[0] == "parallel_state"]
import parallel_state
after = look()
ops = torch.ops.parallel_state
names = [str(ops.all_reduce.default), str(ops.all_reduce_add_rms_norm.default)]
print(json.dumps(
    {"before": before, "after": after, "initialized": dist.is_initialized(), "upper": upper, "names": names}
))
"""

LOOK_AT_TORCH = """
import atexit, json, os, signal, sys, types, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")  # some of torch's names warn as they are read
calls = []
def count(module, name):
    original = getattr(module, name)
    def counted(*args, **options):
        calls.append(f"{name}{args}")
        return original(*args, **options)
    setattr(module, name, counted)
count(os, "register_at_fork")
count(atexit, "register")
count(signal, "signal")
def look():
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for name, value in vars(module).items():
                found[f"{module_name}.{name}"] = value
                if isinstance(value, type) and value.__module__ == module_name:
                    found.update({f"{module_name}.{name}.{inner}": each for inner, each in vars(value).items()})
    return found
def backends():
    return {name: [*value] for name, value in vars(dist.Backend).items() if isinstance(value, (dict, list))}
before, backends_before = look(), backends()
import device_communicators, parallel_state
after, backends_after = look(), backends()
parents = {name.rpartition(".")[0] for name in before}
print(json.dumps({
    "changed": [name for name in before if after.get(name) is not before[name]],
    "new": sorted(name for name in set(after) - set(before) if name.rpartition(".")[0] in parents),
    "calls": calls,
    "backends": {
        name: value[len(backends_before[name]) :]
        for name, value in backends_after.items()
        if value != backends_before[name]
    },
}))
"""

BLOCK = """
import sys
class Block:
    blocked = set({blocked!r})
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)
sys.meta_path.insert(0, Block())
"""


def run(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    environment["PYTHONPATH"] = str(ROOT)
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def looks() -> dict[str, Any]:
    return json.loads(run(LOOK_AROUND).splitlines()[-1])


def test_import_leaves_alone(looks: dict[str, Any]) -> None:
    names = set(looks["before"]) - {"modules"}
    assert {name: looks["after"][name] for name in names} == {name: looks["before"][name] for name in names}


def test_import_does_not_initialise_torch_distributed(looks: dict[str, Any]) -> None:
    assert not looks["initialized"]


def test_import_changes_nothing_of_torch_but_its_backends() -> None:
    """Up to torch 2.13 only the import can register the backend: torch asks for no entry point. torch also gains the
    namespaces of the ops.
    """
    found = json.loads(run(LOOK_AT_TORCH).splitlines()[-1])
    assert found["changed"] == []
    assert found["new"] == [
        "torch.distributed.distributed_c10d.Backend.PARALLEL_STATE",
        "torch.ops.parallel_state",
        "torch.ops.parallel_state_python",
    ]
    named = {key: ["parallel_state"] for key in ("backend_list", "backend_capability", "backend_type_map")}
    assert found["backends"] == {"_plugins": ["PARALLEL_STATE"], **named}
    assert found["calls"] == []


NOT_BROUGHT = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic",
    "torch.distributed._symmetric_memory",
    "torch.testing",
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "numpy",
    "pynvml",
    "cuda",
    # Ours: imported when ranks meet, a launcher starts ranks, or a group has GPUs.
    "parallel_state.groups.world",
    "parallel_state.startup.rendezvous",
    "parallel_state.startup.stores",
    "device_communicators.control.store",
    "parallel_state.messages.media",
    "parallel_state.launch.store",
    "parallel_state.launch.worker",
    "parallel_state.launch.processes",
    "parallel_state.tools.plan",
    "parallel_state.tools.tune",
    "device_communicators.cpu.host_memory",
    "device_communicators.cpu.native",
    "device_communicators.cpu.message_queue",
    "device_communicators.peer.thresholds",
    "device_communicators.machine.topology",
    "device_communicators.machine.nvml",
    "device_communicators.peer.kernels",
    "device_communicators.cuda.nccl_library",
    "device_communicators.peer.memory",
)


def test_import_does_not_bring(looks: dict[str, Any]) -> None:
    """numpy and parts of torch may come with torch itself."""
    new = set(looks["after"]["modules"]) - set(looks["before"]["modules"])
    assert "parallel_state.state" in new
    assert not [name for name in new for module in NOT_BROUGHT if name == module or name.startswith(f"{module}.")]


def test_import_registers_the_ops(looks: dict[str, Any]) -> None:
    assert looks["names"] == ["parallel_state.all_reduce.default", "parallel_state.all_reduce_add_rms_norm.default"]


def test_import_brings_nothing_of_torch_but_what_it_uses(looks: dict[str, Any]) -> None:
    new = set(looks["after"]["modules"]) - set(looks["before"]["modules"])
    tops = {name.split(".")[0] for name in new if name.split(".")[0] not in sys.stdlib_module_names}
    assert tops == {"parallel_state", "device_communicators", "msgspec"}


def test_works_without_numpy_and_pynvml() -> None:
    code = BLOCK.format(blocked=["numpy", "pynvml"]) + textwrap.dedent(
        """
        import warnings
        warnings.simplefilter("ignore")  # torch says that it found no numpy
        import torch
        import parallel_state as ps
        for name in ("numpy", "pynvml"):
            try:
                __import__(name)
            except ModuleNotFoundError:
                pass
            else:
                raise SystemExit(f"{name} was not blocked")
        ps.init_distributed_environment(1, 0)
        ps.initialize_model_parallel()
        print(ps.get_tp_group().all_reduce(torch.ones(2)).tolist())
        ps.destroy_distributed_environment()
        with ps.simulate(1, 4, 2).use():
            print(ps.get_tp_group().all_reduce(torch.ones(2)).tolist())
        from parallel_state.messages.codec import coding as codec
        encoded = codec.encode({"x": torch.ones(2), "y": (1, b"z")})
        print(codec.read(encoded.metadata).build(encoded.tensors))
        ps.set_random_seed(3)
        print("numpy" in __import__("sys").modules)
        """
    )
    # gloo of torch 2.10 prints its own lines.
    assert [line for line in run(code).splitlines() if not line.startswith("[Gloo]")] == [
        "[1.0, 1.0]",
        "[2.0, 2.0]",
        "{'x': tensor([1., 1.]), 'y': (1, b'z')}",
        "False",
    ]


def test_the_lower_package_comes_alone(looks: dict[str, Any]) -> None:
    assert looks["upper"] == []
