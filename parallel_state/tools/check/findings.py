"""The table of findings: each code with its severity, why it matters and what to do. `docs/check.md` shows it.

What exactly was found, where, is said by the rule that finds it (`rules`); it may also know a better remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from device_communicators.base.errors import format_ranks

INFO, WARNING, ERROR = "info", "warning", "error"
SEVERITIES = (INFO, WARNING, ERROR)
EXIT_CODES = {"": 0, INFO: 0, WARNING: 1, ERROR: 2}


def named(ranks: Iterable[int]) -> str:
    """Returns ranks as a sentence has them: `rank 3`, `ranks 0-3, 7`."""
    each = sorted(set(ranks))
    return f"rank {each[0]}" if len(each) == 1 else f"ranks {format_ranks(each).strip('[]')}"


def rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2f} MB/s"


class Kind(NamedTuple):
    """One row of the table."""

    severity: str
    about: str
    why: str
    fix: str


class Finding(msgspec.Struct):
    """One thing that is wrong, or could be better."""

    severity: str
    code: str
    found: str
    why: str
    fix: str
    ranks: list[int] = []
    hosts: list[str] = []

    @property
    def where(self) -> str:
        ranks = named(self.ranks) if self.ranks else ""
        return ", ".join(filter(None, (ranks, " ".join(self.hosts))))


KINDS: dict[str, Kind] = {
    # The launcher and the meeting.
    "environment": Kind(
        ERROR, "the launcher's variables can't be read",
        "init_distributed_environment() would raise the same error.",
        "Start all ranks with one launcher (torchrun, srun, mpirun), or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR "
        "and MASTER_PORT.",
    ),
    "launchers-contradict": Kind(
        ERROR, "variables of two launchers disagree about rank or world size",
        "A rank takes its number from the first of them: ranks come twice, or wait for a world of another size.",
        "Unset the stale variables before the start (`env -u RANK -u WORLD_SIZE -u LOCAL_RANK …`), or start through "
        "one launcher.",
    ),
    "launcher-stale": Kind(
        WARNING, "variables of a launcher that isn't above this process",
        "They were exported by another session: ports and addresses in them lead to a job that is over.",
        "Start from a clean shell, or unset them: `env -u NAME …`.",
    ),
    "host-not-in-job": Kind(
        WARNING, "SLURM's node list doesn't have this host",
        "The SLURM variables are those of another job; rank 0's address is derived from them.",
        "Unset the SLURM_* variables, or start with srun inside the job.",
    ),
    "single-rank": Kind(
        WARNING, "a launcher's process that would run alone",
        "Each process would be rank 0 of 1: nothing is parallel, and nobody notices.",
        "Let the launcher pass its variables on (srun, mpirun -x, torchrun), or set RANK and WORLD_SIZE.",
    ),
    "world-size-differs": Kind(
        ERROR, "ranks were started with different world sizes",
        "Some ranks wait for others that don't exist, until the start's deadline.",
        "Give every node the same --nnodes / --nproc-per-node / WORLD_SIZE, and end ranks of another job at this port.",
    ),
    "rank-missing": Kind(
        ERROR, "a rank never came",
        "All others would wait for it until the start's deadline, then fail.",
        "Look at the launcher's log on that host: not started, ended early, or kept away by a firewall or another "
        "MASTER_ADDR.",
    ),
    "rank-twice": Kind(
        ERROR, "several processes have the same rank",
        "One of them is turned away, or they overwrite each other's data.",
        "Set RANK per process, as launchers do; look for `export RANK=…` in a profile, and for a job started twice.",
    ),
    "rank-extra": Kind(
        ERROR, "a rank that the world doesn't have",
        "It can't join, and its node has one process more than the others count on.",
        "Start exactly WORLD_SIZE processes with ranks from 0, or raise WORLD_SIZE on all of them.",
    ),
    "local-rank-twice": Kind(
        ERROR, "two ranks of one host have the same local rank",
        "They take the same GPU, and the same cores where they are bound by it.",
        "Let the launcher number the ranks of each host from 0: LOCAL_RANK must be 0, 1, … on each.",
    ),
    "local-size-wrong": Kind(
        ERROR, "LOCAL_WORLD_SIZE isn't the number of ranks on the host",
        "Node boundaries, GPUs and interfaces are derived from it.",
        "Start as many processes per host as LOCAL_WORLD_SIZE (--nproc-per-node, --ntasks-per-node) says.",
    ),
    "rank-lost": Kind(
        ERROR, "a rank came, and then ended or hung",
        "The job would lose it in the same way.",
        "Look at its log and at `dmesg` on its host (out of memory, a signal), and run the check again.",
    ),
    "layout": Kind(
        ERROR, "the sizes don't fit the world",
        "initialize_model_parallel() would raise the same error.",
        "Change the sizes or the number of ranks; `python -m parallel_state plan --world-size N …` tries them.",
    ),
    "launch-failed": Kind(
        ERROR, "local ranks can't be started",
        "Nothing can run here in several processes.",
        "Mend what the error says, then run the check again.",
    ),
    # Where they meet.
    "port-taken": Kind(
        ERROR, "another program holds MASTER_PORT",
        "Rank 0 can't serve the store there, and the others may talk to a stranger.",
        "Choose another MASTER_PORT, the same on every rank, or end what listens there.",
    ),
    "port-unusable": Kind(
        ERROR, "rank 0 may not listen on MASTER_PORT",
        "Nobody can meet there.",
        "Choose a port from 1024 to 65535.",
    ),
    "port-ephemeral": Kind(
        INFO, "MASTER_PORT is one that the kernel gives to outgoing connections",
        "Any program's connection may hold it at the moment of the start.",
        "Choose a port outside net.ipv4.ip_local_port_range, as 29500.",
    ),
    "master-unresolved": Kind(
        ERROR, "MASTER_ADDR doesn't resolve",
        "The ranks can't find rank 0.",
        "Set MASTER_ADDR to an address that every host knows, or mend DNS or /etc/hosts.",
    ),
    "master-refused": Kind(
        ERROR, "nobody listens where the ranks should meet",
        "The ranks wait until the start's deadline.",
        "Check that rank 0 was started, and that MASTER_ADDR and MASTER_PORT are equal everywhere.",
    ),
    "master-silent": Kind(
        ERROR, "packets to the meeting place get no answer",
        "A firewall drops them, or the address is of a network that this host isn't in.",
        "Open the port between the hosts, or set MASTER_ADDR to rank 0's address in the network that all share.",
    ),
    "master-unreachable": Kind(
        ERROR, "there is no way to the meeting place",
        "This host has no route to that address.",
        "Set MASTER_ADDR to rank 0's address in the network that all hosts share; look at `ip route get ADDRESS`.",
    ),
    "master-stranger": Kind(
        ERROR, "a stranger listens where the ranks should meet",
        "The ranks would talk to it until the start's deadline.",
        "Choose another MASTER_PORT, the same on every rank, or end what listens there (`ss -ltnp`).",
    ),
    "master-elsewhere": Kind(
        ERROR, "MASTER_ADDR isn't an address of rank 0's host",
        "Rank 0 serves the store where nobody looks for it.",
        "Set MASTER_ADDR, on every rank, to an address of the host that runs rank 0.",
    ),
    "master-loopback": Kind(
        ERROR, "MASTER_ADDR is a loopback address, and ranks are on several hosts",
        "Each host looks for rank 0 on itself.",
        "Set MASTER_ADDR to rank 0's address in the network that all hosts share.",
    ),
    "master-differs": Kind(
        ERROR, "ranks have different MASTER_ADDR or MASTER_PORT",
        "They don't meet, or not all of them.",
        "Set the same MASTER_ADDR and MASTER_PORT on every rank.",
    ),
    "master-resolves-differently": Kind(
        WARNING, "MASTER_ADDR resolves to different addresses",
        "Hosts look for rank 0 at different places: with an entry for 127.0.1.1, on themselves.",
        "Set MASTER_ADDR to a numeric address, or mend /etc/hosts.",
    ),
    # Names, addresses, interfaces.
    "address-loopback": Kind(
        ERROR, "a host would announce a loopback address",
        "gloo tells other hosts the address of the host's own name; at 127.x they find themselves.",
        "Set GLOO_SOCKET_IFNAME there to the interface that leads to the others, or mend its name in /etc/hosts.",
    ),
    "address-shared": Kind(
        ERROR, "two hosts announce the same address",
        "It is a bridge or container network that each host has for itself: ranks connect to the wrong host.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the other hosts.",
    ),
    "address-unknown": Kind(
        ERROR, "no address is found at which others reach a host",
        "gloo takes the address of the host's own name, and that isn't one of its interfaces'.",
        "Set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts, or mend the name in /etc/hosts.",
    ),
    "interface-missing": Kind(
        ERROR, "a variable names an interface that isn't there, or is down",
        "gloo and NCCL fail at the start.",
        "Name one that is up, or unset the variable.",
    ),
    "interface-bridge": Kind(
        WARNING, "gloo or NCCL would take a bridge or a container's network",
        "Such a network mostly ends at its host.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the other hosts.",
    ),
    "networks-differ": Kind(
        WARNING, "the hosts' chosen interfaces aren't in one network",
        "Traffic takes a router or a slow network, or doesn't arrive.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the network that all hosts share.",
    ),
    "interface-slower": Kind(
        WARNING, "a faster interface is there and isn't taken",
        "Traffic over TCP takes the slow one.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the fast one.",
    ),
    "mtu-differs": Kind(
        WARNING, "the chosen interfaces have different MTUs",
        "Small messages pass and large ones vanish: the start works, and the first large tensor hangs.",
        "Set one MTU on all of them (`ip link set DEV mtu 9000`), as the switch allows.",
    ),
    "hostname-twice": Kind(
        WARNING, "two hosts have the same name",
        "NCCL and logs tell hosts apart by name.",
        "Give each host, or container, a name of its own (`--hostname`).",
    ),
    "infiniband-down": Kind(
        WARNING, "an InfiniBand port isn't active",
        "NCCL takes fewer rails, or falls back to TCP, on this host; all others wait for it.",
        "Look at `ibstat`, the cable and the subnet manager; or leave the port out with NCCL_IB_HCA on all hosts.",
    ),
    "infiniband-differs": Kind(
        WARNING, "hosts have different InfiniBand ports",
        "The host with the fewest sets the pace.",
        "Look at `ibstat` on the hosts, or leave the difference out with NCCL_IB_HCA.",
    ),
    # Links.
    "link-blocked": Kind(
        ERROR, "one host doesn't reach another one",
        "gloo and NCCL connect every two ranks, on ports of the kernel's choice, in either direction.",
        "Open all TCP ports between the hosts in both directions, or set GLOO_SOCKET_IFNAME to the network where they "
        "are open.",
    ),
    "link-stranger": Kind(
        ERROR, "at a host's address another one answers",
        "Two hosts have one address: ranks would connect to the wrong one.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the other hosts.",
    ),
    "link-broken": Kind(
        ERROR, "a connection between two hosts broke while data passed",
        "Small messages pass and large ones don't: often a different MTU on the way, or a connection limit.",
        "Try `ping -M do -s 8972 HOST`, and set one MTU everywhere; look at `ip -s link` for errors.",
    ),
    "link-slow": Kind(
        WARNING, "a link is slower than the others, or than its interface",
        "Each collective between hosts goes at the pace of the slowest link.",
        "Look at `ethtool DEV` (speed, duplex), at the cable and switch port, and at who else uses it.",
    ),
    "link-latency": Kind(
        WARNING, "a link takes longer than the others",
        "Small collectives go at the pace of the slowest link.",
        "Look at the way to that host (`traceroute`), at its load, and at its interface's interrupt settings.",
    ),
    "network-slow": Kind(
        WARNING, "the hosts' network carries less than a gigabit per second",
        "Tensors between hosts take seconds.",
        "Take the fast interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or lift its limit (`tc qdisc`, `ethtool`).",
    ),
    "link-loss": Kind(
        WARNING, "packets are lost between two hosts",
        "TCP sends again after a pause, and every rank waits for it.",
        "Look at `ip -s link` and `ethtool -S DEV` for drops on both hosts and the switch, and replace cable or port.",
    ),
    "clock-offset": Kind(
        WARNING, "clocks differ",
        "Logs and traces of ranks can't be laid beside each other; certificates and locks by time fail.",
        "Let chrony or systemd-timesyncd set the clock of that host (`timedatectl`).",
    ),
    # Versions and settings.
    "version-torch": Kind(
        ERROR, "torch differs between ranks",
        "Bytes on the wire and defaults differ between versions: hangs and wrong results.",
        "Install one version everywhere; look at which environment each host activates.",
    ),
    "version-package": Kind(
        ERROR, "parallel_state differs between ranks",
        "Ranks of different versions make different calls.",
        "Install one version everywhere.",
    ),
    "version-compiled": Kind(
        ERROR, "the compiled part differs between ranks, or some have none",
        "Ranks take different routes: they would refuse to start, or fall back to gloo.",
        "Install one version everywhere, with a C++ compiler or a wheel; rm -r ~/.cache/parallel_state compiles anew.",
    ),
    "version-nccl": Kind(
        ERROR, "NCCL differs between ranks",
        "NCCL refuses to connect different versions, or hangs.",
        "Install one torch build everywhere, and unset PARALLEL_STATE_NCCL_LIBRARY and LD_PRELOAD of another libnccl.",
    ),
    "version-driver": Kind(
        WARNING, "the GPU driver differs between hosts",
        "Features of peer memory and NVLink differ, and NCCL takes what all have.",
        "Install one driver on all hosts.",
    ),
    "version-python": Kind(
        WARNING, "Python differs between ranks",
        "Pickled objects and bytecode of one may fail on the other.",
        "Activate the same environment on all hosts.",
    ),
    "compiled-missing": Kind(
        WARNING, "the compiled part isn't there",
        "Collectives on the CPU go over gloo, many times slower than shared memory.",
        "Install a C++ compiler, or a wheel that brings the library; the reason says what failed.",
    ),
    "setting-wrong": Kind(
        ERROR, "a PARALLEL_STATE_ variable can't be read",
        "The job raises SettingError when it comes to it.",
        "Give it a value as the message says, or unset it.",
    ),
    "setting-unknown": Kind(
        WARNING, "a PARALLEL_STATE_ variable that nobody knows",
        "It has no effect: most likely a typing error.",
        "Compare it with docs/settings.md.",
    ),
    "settings-differ": Kind(
        WARNING, "a variable of NCCL, gloo or this package differs between ranks",
        "Ranks choose different algorithms or transports: a hang, or an error at the start.",
        "Set it alike on every rank.",
    ),
    "nccl-crippled": Kind(
        INFO, "a variable turns a fast path of NCCL off",
        "It is often left over from a search for an error.",
        "Unset it, unless it is needed.",
    ),
    # Limits.
    "shm-missing": Kind(
        ERROR, "/dev/shm can't be used",
        "Ranks of one host share memory there; without it they go over loopback sockets, and NCCL fails.",
        "Mount a tmpfs at /dev/shm with mode 1777; in a container `--ipc=host` or `--shm-size=8g`.",
    ),
    "shm-small": Kind(
        ERROR, "/dev/shm is too small",
        "Containers get 64 MB by default. NCCL, data loaders and this package put buffers there; beyond it a process "
        "gets SIGBUS.",
        "Start the container with `--shm-size=8g` or `--ipc=host`; in Kubernetes an emptyDir with medium: Memory.",
    ),
    "shm-full": Kind(
        ERROR, "/dev/shm is full",
        "Segments can't be made; who writes to one that doesn't fit gets SIGBUS.",
        "Remove what dead jobs left there (`ls -l /dev/shm`), or make it larger (`mount -o remount,size=…`).",
    ),
    "shm-split": Kind(
        WARNING, "ranks of one host have different /dev/shm",
        "They are in different containers and can't share memory: all goes over sockets.",
        "Run them in one container, or with `--ipc=host`.",
    ),
    "tmp-full": Kind(
        WARNING, "the folder for temporary files is full or can't be written",
        "Compilers and torch put files there.",
        "Free some, or let TMPDIR name a folder with room.",
    ),
    "files-low": Kind(
        ERROR, "too few open files are allowed",
        "Each pair of ranks takes a socket in each group; gloo ends the process where it can't open one.",
        "Raise the hard limit: `ulimit -Hn 65536`, /etc/security/limits.conf, LimitNOFILE= of slurmd or the service.",
    ),
    "memlock-low": Kind(
        WARNING, "little memory may be locked",
        "RDMA and GPU drivers lock what they transfer: NCCL fails with `ibv_reg_mr` or falls back to TCP.",
        "`ulimit -l unlimited`: /etc/security/limits.conf, LimitMEMLOCK=infinity of slurmd, `--ulimit memlock=-1`.",
    ),
    "limits-differ": Kind(
        WARNING, "limits differ between ranks",
        "One host fails where the others work; its service or profile sets other limits.",
        "Compare `ulimit -a` as the launcher starts it; set limits in the launcher's service on every host.",
    ),
    "processes-low": Kind(
        WARNING, "few processes and threads are allowed",
        "Each rank has dozens of threads; the next one can't be started.",
        "Raise `ulimit -u`, or the container's --pids-limit.",
    ),
    "address-space-limited": Kind(
        WARNING, "address space is limited",
        "torch and CUDA map far more than they use: allocations fail early.",
        "`ulimit -v unlimited`.",
    ),
    "file-size-limited": Kind(
        WARNING, "the size of files is limited",
        "Segments of shared memory and checkpoints are files; at the limit a process gets SIGXFSZ.",
        "`ulimit -f unlimited`.",
    ),
    "memory-low": Kind(
        WARNING, "little memory is left for the ranks of a host",
        "A rank is killed when it runs out, and all others fail.",
        "Ask the scheduler for more (--mem), or start fewer ranks per host.",
    ),
    "users-differ": Kind(
        ERROR, "ranks of one host run as different users",
        "Segments of shared memory are readable by their owner only.",
        "Start all ranks as one user.",
    ),
    # Cores.
    "cores-shared": Kind(
        WARNING, "ranks are bound to the same core",
        "Each waits while the other one runs: collectives take time slices of milliseconds.",
        "Bind each rank to cores of its own (PARALLEL_STATE_CORES=share, srun --cpu-bind=cores), or don't bind.",
    ),
    "cores-few": Kind(
        INFO, "more ranks than cores",
        "Ranks that wait for each other take turns: a collective takes time slices instead of microseconds.",
        "Start fewer ranks here, or ask the scheduler for more cores per task (--cpus-per-task).",
    ),
    "smt-shared": Kind(
        WARNING, "ranks are bound to two threads of one physical core",
        "They share its units, while other cores are idle.",
        "Bind by core, not by thread: `srun --hint=nomultithread`, `mpirun --map-by core`.",
    ),
    "cpu-quota": Kind(
        WARNING, "the cgroup gives the ranks less CPU time than one core each",
        "The kernel stops all of them for the rest of each period: a collective takes 100 ms.",
        "Raise the container's limit (`--cpus`, Kubernetes' limits.cpu) to at least one core per rank.",
    ),
    "cpu-throttled": Kind(
        WARNING, "the cgroup's limit stopped a rank during the measurement",
        "A stopped rank keeps all others waiting.",
        "Raise the container's limit (`--cpus`, Kubernetes' limits.cpu), or start fewer threads.",
    ),
    "rank-slow": Kind(
        WARNING, "a rank computes slower than the others",
        "In every collective the others wait for it.",
        "Look at that host: frequency and governor (`cpupower frequency-info`), temperature, other load (`top`).",
    ),
    "threads-many": Kind(
        WARNING, "torch's threads are more than twice the cores",
        "Ranks that compute at the same time slow each other down.",
        "Set OMP_NUM_THREADS to the cores of a host divided by its ranks.",
    ),
    "numa-unbound": Kind(
        INFO, "ranks may run on any NUMA node",
        "A rank that wanders, or whose memory is far away, loses bandwidth.",
        "Bind ranks to NUMA nodes: `PARALLEL_STATE_CORES=share`, `srun --cpu-bind=ldoms`, `mpirun --map-by numa`.",
    ),
    "governor": Kind(
        INFO, "the CPU's governor saves power",
        "Cores sleep and clock down between collectives: latencies grow and scatter.",
        "`cpupower frequency-set -g performance`.",
    ),
    # GPUs.
    "gpu-few": Kind(
        ERROR, "a host has fewer visible GPUs than ranks",
        "A rank without a GPU fails at the start.",
        "Start fewer ranks per host, or make more visible (CUDA_VISIBLE_DEVICES, --gpus-per-node).",
    ),
    "gpu-shared": Kind(
        ERROR, "two ranks take the same GPU",
        "NCCL refuses it, and both get half of its memory.",
        "Give each rank its own: CUDA_VISIBLE_DEVICES, --gpus-per-task, LOCAL_RANK; or PARALLEL_STATE_SHARE_GPUS=on.",
    ),
    "gpu-somewhere": Kind(
        ERROR, "some ranks have GPUs and others have none",
        "Ranks would choose different backends.",
        "Look at the driver on the hosts without (`nvidia-smi`), or hide all GPUs with CUDA_VISIBLE_DEVICES=.",
    ),
    "gpu-models": Kind(
        WARNING, "ranks have GPUs of different models",
        "The slowest sets the pace, and the smallest memory the sizes.",
        "Ask the scheduler for one model (--constraint, --gres=gpu:MODEL:N).",
    ),
    "gpu-driver": Kind(
        ERROR, "GPUs are there, but the driver doesn't answer, or torch has no CUDA",
        "Everything would run on the CPU.",
        "Install a torch build for CUDA and a driver that fits; in a container the NVIDIA runtime (`--gpus all`).",
    ),
    "nvlink-uneven": Kind(
        WARNING, "some GPUs of a host have fewer NVLinks between them than others",
        "Collectives take the slowest way.",
        "Look at `nvidia-smi nvlink -s` for links that are down, or put tensor-parallel groups on GPUs with NVLink.",
    ),
    "peer-access": Kind(
        WARNING, "GPUs of a host can't access each other's memory",
        "Data goes through the host's memory.",
        "Look at `python -m parallel_state topology`; turn ACS off, and start the fabric manager on NVSwitch "
        "machines.",
    ),
    "acs-redirect": Kind(
        WARNING, "PCI bridges send traffic between GPUs through the CPU",
        "Peer access over PCIe loses bandwidth, or hangs.",
        "Turn ACS off on these bridges (`setpci -s BDF ECAP_ACS+6.w=0000`), or in the BIOS on machines without guests.",
    ),
    "gpu-far": Kind(
        WARNING, "a rank is bound to cores that are far from its GPU",
        "Copies and launches cross the link between the sockets.",
        "Bind by the GPU's NUMA node: `srun --gpu-bind=closest`, or the cores of `nvidia-smi topo -m`.",
    ),
    # Traffic.
    "axis-across-hosts": Kind(
        WARNING, "a tensor-parallel group spans hosts",
        "It communicates in every layer: over the network that is slow.",
        "Choose --tp at most the ranks per host, and the order so that its ranks are neighbours.",
    ),
    "start-failed": Kind(
        ERROR, "the job can't be started",
        "The job would fail with the same error.",
        "The error says what to do.",
    ),
    "traffic-failed": Kind(
        ERROR, "a collective failed",
        "The job would fail with the same error.",
        "The error says what to do; `python -m parallel_state debug` shows the records of a run with "
        "PARALLEL_STATE_DEBUG_DIR.",
    ),
    "traffic-wrong": Kind(
        ERROR, "a collective gave a wrong answer",
        "Results of the job would be wrong without a sign.",
        "Report it with this page. Another route: PARALLEL_STATE_SHARED_MEMORY=off, PARALLEL_STATE_PEER_MEMORY=off.",
    ),
    "group-slow": Kind(
        WARNING, "a group is slower than others of its kind",
        "All others wait for it in the next step.",
        "Look at the hosts and links of its ranks.",
    ),
    "check-late": Kind(
        WARNING, "not everything could be looked at in time",
        "What is missing may be wrong.",
        "Run it again with a longer --timeout; what is slow here is slow in the job, too.",
    ),
}  # fmt: skip


def finding(
    code: str, found: str, ranks: Iterable[int] = (), hosts: Iterable[str] = (), *, severity: str = "", fix: str = ""
) -> Finding:
    """Returns a finding of a row of the table; `severity` and `fix` where this one differs."""
    kind = KINDS[code]
    where = sorted(set(ranks)), list(dict.fromkeys(hosts))
    return Finding(severity or kind.severity, code, found, kind.why, fix or kind.fix, *where)


def sorted_by_severity(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the errors first, in the order of the table within each severity."""
    order = list(KINDS)
    return sorted(findings, key=lambda each: (-SEVERITIES.index(each.severity), order.index(each.code), each.ranks))


def worst(findings: Sequence[Finding]) -> str:
    """Returns the highest severity; empty for none."""
    return max((each.severity for each in findings), key=SEVERITIES.index, default="")
