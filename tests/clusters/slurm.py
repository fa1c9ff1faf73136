"""A SLURM cluster on hosts that are namespaces: one munged, slurmctld on the first host, a slurmd on each."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from tests.clusters.cluster import Cluster, Command, shell

_START_S = 60.0


class Slurm:
    def __init__(self, cluster: Cluster, cpus: int = 8) -> None:
        self._cluster = cluster
        self._folder = cluster.folder / "slurm"
        self._cpus = cpus
        self._daemons: list[Command] = []

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}

    def __enter__(self) -> Slurm:
        folder, cluster = self._folder, self._cluster
        folder.mkdir()
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o400)
        (folder / "slurm.conf").write_text(self._configuration())
        # PMIx makes a folder named after the step. /tmp is shared by the hosts, /dev/shm isn't.
        (folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")
        cluster.common.update(self.variables)
        munge = ["munged", "-F", "-f", f"--socket={folder}/munge", f"--key-file={folder}/key"]
        munge += [f"--log-file={folder}/munge.log", f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/seed"]
        self._daemons.append(cluster.start(0, munge))
        cluster.wait_for(0, f"test -S {folder}/munge", _START_S)
        self._daemons.append(cluster.start(0, ["slurmctld", "-D", "-c"]))
        for host, name in enumerate(cluster.names):
            (folder / f"spool.{name}").mkdir()
            self._daemons.append(cluster.start(host, ["slurmd", "-D", "-N", name]))
        ready = f"test $(sinfo -h -N -t idle -o %N | wc -l) = {len(cluster.names)}"
        cluster.wait_for(0, ready, _START_S)
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.run(0, ["scancel", "--full", "-u", "root"], _START_S)
        self._cluster.wait_for(0, 'test -z "$(squeue -h)"', _START_S)
        for daemon in reversed(self._daemons):
            daemon.kill()

    def _configuration(self) -> str:
        folder, cluster = self._folder, self._cluster
        nodes = "".join(
            f"NodeName={name} NodeAddr={address} CPUs={self._cpus} State=UNKNOWN\n"
            for name, address in zip(cluster.names, cluster.addresses, strict=True)
        )
        return f"""ClusterName=namespaces
SlurmctldHost={cluster.names[0]}({cluster.addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
StateSaveLocation={_made(folder / "state")}
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,sched_min_interval=0
KillWait=2
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def sbatch(cluster: Cluster, folder: Path, options: Sequence[str], script: str) -> Command:
    """Starts a batch job. The returned command ends with the job: `sbatch --wait` would poll only every 30 s."""
    job, done = folder / "job.sh", folder / "job.done"
    job.write_text(f"#!/bin/sh\ntrap 'echo $? > {done}.new && mv {done}.new {done}' EXIT\n{script}")
    wait = f"until test -e {done}; do sleep 0.2; done; cat {folder}/job.log; exit $(cat {done})"
    words = shell(["sbatch", *options, "-o", str(folder / "job.log"), str(job)])
    return cluster.start(0, ["sh", "-c", f"{words} && {{ {wait}; }}"])


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
