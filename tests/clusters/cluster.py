"""Two hosts with names and a shared folder. `cluster.run(0, command, within_s=60)` runs as if typed on the
first; `cluster.agent` replaces ssh: AGENT [-x] HOST COMMAND…"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.failure.leftovers import descendants
from tests.hosts import Host, Hosts

ROOT = Path(__file__).resolve().parents[2]
JOB = ("-m", "tests.clusters.job")
DEMO = ("benchmarks/inference/demo.py",)
PYTHON = sys.executable
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM", "OMPI_", "PMI", "GLOO_", "RAY_")
_ENTERED = ("--net", "--uts", "--ipc", "--mount")


@dataclass
class Ended:
    code: int
    output: str

    def well(self) -> Ended:
        assert self.code == 0, f"exit code {self.code}:\n{self.output[-8000:]}"
        return self


class Command:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self, within_s: float) -> Ended:
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done within {within_s:g} s:\n{self.output()[-8000:]}") from None
        return Ended(code, self.output())

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        below = descendants(self.pid) if self.runs else ()
        for pid in (self.pid, *below):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


class Cluster(Hosts):
    """Simulated hosts n1, n2, …, which share all files of this machine."""

    def __init__(self, folder: Path, hosts: int | Sequence[Host] = 2) -> None:
        super().__init__(hosts)
        self.folder = folder
        self.names = [f"n{index + 1}" for index in range(len(self.hosts))]
        self.agent = folder / "agent"
        self.common: dict[str, str] = {}
        self.commands: list[Command] = []

    def __enter__(self) -> Cluster:
        super().__enter__()
        try:
            lines = [f"{address} {name}\n" for address, name in zip(self.addresses, self.names, strict=True)]
            self.write_names("127.0.0.1 localhost\n" + "".join(lines))
            self.agent.write_text(
                "#!/bin/sh\n# Runs a command on a host, as ssh would.\n"
                'while [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\ncase $host in\n'
                + "".join(f"{names}) pid={self.pid(host)};;\n" for host, names in enumerate(self._patterns()))
                + '*) echo "no host $host" >&2; exit 255;;\nesac\n'
                f'exec nsenter -t $pid {" ".join(_ENTERED)} --wd="{ROOT}" sh -c "$*"\n'
            )
            self.agent.chmod(0o755)
        except BaseException:
            self.close()
            raise
        return self

    def _patterns(self) -> list[str]:
        return [f"{name}|{address}" for name, address in zip(self.names, self.addresses, strict=True)]

    def write_names(self, text: str, hosts: Sequence[int] | None = None) -> None:
        for host in range(len(self.hosts)) if hosts is None else hosts:
            file = self.folder / f"hosts.{self.names[host]}"
            mounted = file.exists()
            file.write_text(text)
            if not mounted:
                self.run_on(host, f"hostname {self.names[host]} && mount --bind {file} /etc/hosts")

    def end_commands(self) -> None:
        for command in reversed(self.commands):
            command.kill()

    def close(self) -> None:
        self.end_commands()
        super().close()

    def start(self, host: int, command: Sequence[str], **variables: str) -> Command:
        usual = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        environment = {**usual, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.common}
        environment |= variables
        enter = ["nsenter", "-t", str(self.pid(host)), *_ENTERED, f"--wd={ROOT}"]
        log = self.folder / f"command.{len(self.commands)}"
        self.commands.append(Command([*enter, *command], environment, log))
        return self.commands[-1]

    def run(self, host: int, command: Sequence[str], within_s: float, **variables: str) -> Ended:
        return self.start(host, command, **variables).end(within_s)

    def wait_for(self, host: int, command: str, within_s: float) -> str:
        until = time.monotonic() + within_s
        while True:
            ended = self.run(host, ["sh", "-c", command], within_s)
            if ended.code == 0:
                return ended.output
            assert time.monotonic() < until, f"{command}: {ended.output}"
            time.sleep(0.1)


def shell(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))
