from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from parallel_state.startup.environment import expand_hostlist

NOTATIONS = (
    "n1",
    "n1,n2",
    "n[1-3]",
    "n[01-03,07]",
    "n[1,3-5,9]",
    "n[8-11]",
    "n[08-11]",
    "n[098-101]",
    "n[0-0]",
    "n[0005-7]",
    "r[1-2]-n[3,5]",
    "r[0-1]n[0-1]",
    "a-b_c[1-2],login.example.org,x9",
    "[1-3]",
    "n[1-2],n[1-2]",
    "n10,n[9-11],n1",
    "n1,m[1-2],n2",
    "n[999-1001]",
)


@pytest.fixture(scope="module", autouse=True)
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a configuration, which `scontrol` needs even without a daemon."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol not found (make test-clusters installs SLURM on a Debian)")
    file = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    file.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=ALL\n")
    return file


def hostnames(configuration: Path, text: str) -> list[str]:
    command = ["scontrol", "show", "hostnames", text]
    done = subprocess.run(
        command, env={"SLURM_CONF": str(configuration)}, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize("text", NOTATIONS)
def test_every_notation(scontrol: Path, text: str) -> None:
    assert list(expand_hostlist(text)) == hostnames(scontrol, text)


def test_lists_at_random(scontrol: Path) -> None:
    random.seed(17)
    for _ in range(100):
        text = ",".join(_item() for _ in range(random.randint(1, 4)))
        assert list(expand_hostlist(text)) == hostnames(scontrol, text), text


def _item() -> str:
    name = random.choice(["n", "node-", "r1n", "a.b", "x_"])
    brackets = random.choice([0, 1, 1, 1, 2])
    for left in reversed(range(brackets)):
        parts = []
        for _ in range(random.randint(1, 3)):
            low = random.choice([random.randint(0, 12), random.randint(95, 102)])
            width = random.choice([0, 0, 3])
            high = low + random.randint(0, 9)
            parts.append(f"{low:0{width}}" if random.random() < 0.4 else f"{low:0{width}}-{high:0{width}}")
        name += f"[{','.join(parts)}]" + (random.choice(["", "-c", "z"]) if left else "")
    return name if brackets else f"{name}{random.randint(0, 20)}"


def test_what_slurm_itself_writes_is_read_back(scontrol: Path) -> None:
    random.seed(18)
    for _ in range(20):
        names = [f"n{number:03}" for number in sorted(random.sample(range(150), 20))]
        names += [f"gpu{number}" for number in sorted(random.sample(range(8, 13), 3))]
        text = subprocess.run(
            ["scontrol", "show", "hostlist", ",".join(names)],
            env={"SLURM_CONF": str(scontrol)}, capture_output=True, text=True, timeout=30, check=True,
        ).stdout.strip()  # fmt: skip
        assert list(expand_hostlist(text)) == names
