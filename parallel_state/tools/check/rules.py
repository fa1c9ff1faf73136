"""The rules of `check`, one row each: severity, subject, predicate; and texts: what was found, why it matters, the fix.

`found` is a format over the facts of the ranks that the predicate matches (`matches.text_of`). Predicates longer than a
line are in `predicates`. Rules only read the evidence: they make no system calls and don't wait. For rows with
`by_session` the session itself detects the problem. docs/check.md shows the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from device_communicators.base.errors import LayoutError
from parallel_state.tools.check import predicates as find
from parallel_state.tools.check.evidence import Evidence, ranks_of
from parallel_state.tools.check.facts import ERROR, INFO, SEVERITIES, WARNING, Finding
from parallel_state.tools.check.matches import (
    Match,
    Predicate,
    alike,
    described_by,
    differing,
    groups,
    hosts,
    some,
    text_of,
)


class Rule(NamedTuple):
    severity: str
    about: str
    where: Predicate
    found: str
    """The format that `matches.text_of` fills in."""
    why: str
    fix: str


def by_session(about: str, why: str, fix: str) -> Rule:
    """Returns the row of an error that the session itself detects: it matches nothing."""
    return Rule(ERROR, about, lambda _: (), "", why, fix)


RULES: dict[str, Rule] = {
    # Launcher and ranks.
    "environment": Rule(ERROR, "the launcher's variables are missing or wrong",
        alike(lambda facts: filter(None, [facts.place.problem]),
              lambda evidence, group: any(facts.place.rank < evidence.world_size for facts in group)),
        "{key}",
        "init_distributed_environment() would raise the same error.",
        "Start all ranks with one launcher (torchrun, srun, mpirun), or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR "
        "and MASTER_PORT."),
    "launchers-contradict": Rule(ERROR, "variables of two launchers disagree about rank or world size",
        described_by(find.contradiction),
        "rank {place.rank}: {description}{more}",
        "Each rank follows the first launcher that it detects: two processes may get the same rank, or ranks wait "
        "for a world of another size.",
        "Unset the stale variables before the start (`env -u RANK -u WORLD_SIZE -u LOCAL_RANK …`), or start through "
        "one launcher."),
    "host-not-in-job": Rule(WARNING, "SLURM's node list doesn't contain this host",
        hosts(find.outside_the_job),
        "{host} isn't in SLURM's node list {nodes}",
        "The SLURM variables belong to another job, and rank 0's address is derived from them.",
        "Unset the SLURM_* variables, or start with srun inside the job."),
    "single-rank": Rule(WARNING, "a process of a larger job would run alone",
        find.one_of_many,
        "{name} is {size}, but this process is rank 0 of 1",
        "Each process would run as rank 0 of 1, without any error.",
        "Have the launcher pass its variables on (srun, mpirun -x, torchrun), or set RANK and WORLD_SIZE."),
    "world-size-differs": Rule(ERROR, "ranks were started with different world sizes",
        find.world_sizes,
        "the world size is {sizes}",
        "Some ranks wait until the start-up deadline for ranks that don't exist.",
        "Give every node the same --nnodes / --nproc-per-node / WORLD_SIZE, and stop ranks of other jobs that use "
        "this port."),
    "rank-missing": Rule(ERROR, "a rank never arrived",
        find.missing,
        "{absent:ranks} of {world_size} never arrived; expected on {where}",
        "All other ranks would wait for it until the start-up deadline, then fail.",
        "Check the launcher's log on that host. The rank wasn't started, exited early, or can't connect (firewall, "
        "other MASTER_ADDR)."),
    "rank-twice": Rule(ERROR, "several processes have the same rank",
        alike(lambda facts: [facts.place.rank], lambda evidence, group: evidence.met and len(group) > 1),
        "{count} processes are rank {place.rank}: {hosts_and_pids}",
        "One of them is rejected, or they overwrite each other's data.",
        "Set RANK per process, as launchers do. Look for `export RANK=…` in a shell profile, and for a job started "
        "twice."),
    "rank-extra": Rule(ERROR, "a rank isn't below the world size",
        alike(lambda facts: [facts.place.rank],
              lambda evidence, group: evidence.met and group[0].place.rank >= evidence.world_size),
        "rank {place.rank} arrived from {hosts_and_pids}, but the world has {world_size} ranks",
        "It can't join, and its host runs one process more than the other ranks expect.",
        "Start exactly WORLD_SIZE processes with ranks from 0, or raise WORLD_SIZE on all of them."),
    "local-rank-twice": Rule(ERROR, "two ranks of one host have the same local rank",
        groups(lambda facts: facts.place.local_rank, lambda _, group: len(ranks_of(group)) > 1),
        "{ranks} on {host} all have local rank {place.local_rank}",
        "They use the same GPU, and the same cores if cores are bound by local rank.",
        "Have the launcher number the ranks of each host: LOCAL_RANK must be 0, 1, … on each."),
    "local-size-wrong": Rule(ERROR, "LOCAL_WORLD_SIZE isn't the number of ranks on the host",
        hosts(find.wrong_local_size),
        "{host} has {number} ranks, but LOCAL_WORLD_SIZE there is {sizes}",
        "Node boundaries, GPUs and interfaces are derived from it.",
        "Start as many processes per host as LOCAL_WORLD_SIZE says (--nproc-per-node, --ntasks-per-node)."),
    "rank-lost": Rule(ERROR, "a rank arrived, then exited or hung",
        lambda evidence: [Match([evidence.facts_of(number)], stage=stage) for number, stage in evidence.lost.items()],
        "rank {place.rank} (pid {pid}) stopped answering; its last stage: {stage}",
        "The job would lose this rank in the same way.",
        "Check its log and `dmesg` on its host (out of memory, a signal), then run the check again."),
    "layout": Rule(ERROR, "the sizes don't fit the world size",
        lambda evidence: [Match(error=evidence.layout)] if isinstance(evidence.layout, LayoutError) else [],
        "{error}",
        "initialize_model_parallel() would raise the same error.",
        "Change the sizes or the number of ranks; `python -m parallel_state plan --world-size N …` suggests sizes "
        "that fit."),
    "launch-failed": by_session("local ranks can't be started",
        "No job with several local processes can run here.",
        "Fix what the error reports, then run the check again."),
    # MASTER_ADDR and MASTER_PORT.
    "port-taken": by_session("another program holds MASTER_PORT",
        "Rank 0 can't serve the store there, and other ranks may connect to that program.",
        "Choose another MASTER_PORT, the same on every rank, or stop the program that listens there."),
    "port-unusable": by_session("rank 0 can't listen on MASTER_PORT",
        "No rank can connect to rank 0's store.",
        "Choose a port from 1024 to 65535."),
    "master-unresolved": Rule(ERROR, "MASTER_ADDR doesn't resolve",
        find.unresolved_master,
        "{problem}",
        "The ranks can't find rank 0.",
        "Set MASTER_ADDR to an address that every host can resolve, or fix DNS or /etc/hosts."),
    "master-refused": by_session("nobody listens at MASTER_ADDR:MASTER_PORT",
        "The ranks would wait until the start-up deadline.",
        "Check that rank 0 was started, and that MASTER_ADDR and MASTER_PORT are the same on every rank."),
    "master-silent": by_session("packets to MASTER_ADDR get no answer",
        "A firewall drops them, or the address is in a network that this host isn't connected to.",
        "Open the port between the hosts, or set MASTER_ADDR to rank 0's address in the network that all hosts share."),
    "master-unreachable": by_session("MASTER_ADDR can't be reached",
        "This host has no route to that address, or its rules forbid the connection.",
        "Set MASTER_ADDR to rank 0's address in the network that all hosts share; check `ip route get ADDRESS`."),
    "master-stranger": by_session("another program listens at MASTER_ADDR:MASTER_PORT",
        "The ranks would try to use it as their store until the start-up deadline.",
        "Choose another MASTER_PORT, the same on every rank, or stop the program that listens there (`ss -ltnp`)."),
    "master-elsewhere": by_session("MASTER_ADDR isn't an address of rank 0's host",
        "The other ranks would not find the store, which rank 0 serves on its own host.",
        "Set MASTER_ADDR, on every rank, to an address of the host that runs rank 0."),
    "master-loopback": Rule(ERROR, "MASTER_ADDR is a loopback address, and ranks are on several hosts",
        find.master_is_loopback,
        "MASTER_ADDR is {master}, and ranks are on {names}",
        "Ranks on other hosts would look for rank 0 on their own host.",
        "Set MASTER_ADDR to rank 0's address in the network that all hosts share."),
    "master-differs": Rule(ERROR, "ranks have different MASTER_ADDR or MASTER_PORT",
        find.masters_differ,
        "MASTER_ADDR:MASTER_PORT is {places:on_ranks}",
        "Ranks with different addresses can't find each other.",
        "Set the same MASTER_ADDR and MASTER_PORT on every rank."),
    "master-resolves-differently": Rule(WARNING, "MASTER_ADDR resolves to different addresses",
        find.master_resolves_differently,
        "{master} resolves to {answers:on_ranks}",
        "Ranks look for rank 0 at different addresses; with an entry for 127.0.1.1, on their own host.",
        "Set MASTER_ADDR to a numeric address, or fix /etc/hosts."),
    # Names, addresses, interfaces.
    "address-loopback": Rule(ERROR, "a host would announce a loopback address to other hosts",
        hosts(find.announces_loopback),
        "gloo on {host} announces {network.gloo_address}: its host name {network.hostname} resolves to {own}; "
        "available interfaces: {interfaces}",
        "gloo announces the address of the host's own name. Other hosts that connect to 127.x reach themselves.",
        "Set GLOO_SOCKET_IFNAME on that host to the interface that leads to the other hosts, or fix its name in "
        "/etc/hosts."),
    "address-shared": Rule(ERROR, "two hosts announce the same address",
        find.shared_addresses,
        "{address} is announced by {chosen}",
        "Each host has its own bridge or container network with this address: ranks connect to the wrong host.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the other hosts."),
    "address-unknown": Rule(ERROR, "gloo finds no address at which other hosts can reach a host",
        hosts(find.announces_nothing),
        "gloo finds no address on {host}",
        "gloo uses the address of the host's own name, and no interface of the host has it.",
        "Set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts, or fix the host's name in /etc/hosts."),
    "interface-missing": Rule(ERROR, "a variable names an interface that doesn't exist or is down",
        find.missing_interfaces,
        "{setting} on {host}{problem}; available: {interfaces}",
        "gloo or NCCL fails at start-up.",
        "Name an interface that is up, or unset the variable."),
    "interface-bridge": Rule(WARNING, "gloo or NCCL would use a bridge or a container network",
        find.bridges,
        "{library} on {host} uses {taken.name} ({taken.kind}); available: {interfaces}",
        "Other hosts usually can't reach such a network.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the other hosts."),
    "networks-differ": Rule(WARNING, "the hosts' chosen interfaces share no network",
        find.different_networks,
        "gloo's interfaces are in {networks}",
        "Traffic goes through a router or a slow network, or doesn't arrive.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the network that all hosts share."),
    "interface-slower": Rule(WARNING, "a faster interface isn't used",
        find.slower_interfaces,
        "gloo on {host} uses {taken.name} ({taken_gbit:g} Gb/s), but {best.name} has {gbit:g} Gb/s",
        "TCP traffic uses the slower interface.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the faster interface."),
    "mtu-differs": Rule(WARNING, "the chosen interfaces have different MTUs",
        find.different_mtus,
        "the MTU of gloo's interface is {mtus:on_hosts}",
        "Small messages arrive, large ones are dropped: the start works, then the first large tensor hangs.",
        "Set the same MTU on all of them (`ip link set DEV mtu 9000`), if the switch allows it."),
    "infiniband-down": Rule(WARNING, "an InfiniBand port isn't active",
        hosts(find.ports_down),
        "InfiniBand on {host}: {down}",
        "NCCL on this host uses fewer rails or falls back to TCP, and all other hosts wait for it.",
        "Check `ibstat`, the cable and the subnet manager; or exclude the port with NCCL_IB_HCA on all hosts."),
    # Links.
    "link-blocked": Rule(ERROR, "one host can't connect to another",
        partial(find.failed_links, kind="blocked"),
        "no connection {way}: {problem}; interfaces: {ends}",
        "gloo and NCCL connect every two ranks, in either direction, on ports that the kernel chooses.",
        "Open all TCP ports between the hosts in both directions, or set GLOO_SOCKET_IFNAME to a network where they "
        "are open."),
    "link-stranger": Rule(ERROR, "another machine answers at a host's address",
        partial(find.failed_links, kind="stranger"),
        "connection {way}: {problem}; interfaces: {ends}",
        "Two hosts have the same address: ranks would connect to the wrong one.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the other hosts."),
    "link-broken": Rule(ERROR, "a connection between two hosts broke during a transfer",
        partial(find.failed_links, kind="broken"),
        "connection {way}: {problem}; interfaces: {ends}",
        "Small messages pass and large ones don't, often because of another MTU on the path or a limit on "
        "connections.",
        "Try `ping -M do -s 8972 HOST`, and set the same MTU everywhere; check `ip -s link` for errors."),
    "link-slow": Rule(WARNING, "a link is slower than the others, or than its interface allows",
        find.slow_links,
        "{way} carries {speed:rate}, {expected}",
        "Every collective between hosts is as slow as the slowest link.",
        "Check `ethtool DEV` (speed, duplex), the cable, the switch port, and other traffic on the link."),
    "link-latency": Rule(WARNING, "a link has a higher latency than the others",
        find.late_links,
        "a round trip on {way} takes {rtt_us:.0f} µs, the median of all links is {middle_us:.0f} µs",
        "Small collectives are as slow as the slowest link.",
        "Check the path to that host (`traceroute`), its load, and the interrupt settings of its interface."),
    "network-slow": Rule(WARNING, "the hosts' network carries less than a gigabit per second",
        find.slow_network,
        "the best of {number} links carries {best:rate}; the slowest is {way} with {worst:rate}",
        "Large tensors between hosts take seconds.",
        "Use a faster interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or remove a limit (`tc qdisc`, `ethtool`)."),
    "link-loss": Rule(WARNING, "packets are lost between two hosts",
        find.lossy_links,
        "{link.retransmitted} of {link.segments} packets ({share:.1%}) on {way} were retransmitted",
        "TCP retransmits after a pause, during which every rank waits.",
        "Check `ip -s link` and `ethtool -S DEV` for drops on both hosts and the switch; replace the cable or the "
        "port."),
    "clock-offset": Rule(WARNING, "clocks of hosts differ",
        find.clocks,
        "the clock of {clock} is {offset} that of {other}",
        "Logs and traces of ranks can't be compared; certificates and time-based locks fail.",
        "Synchronize the clock of that host with chrony or systemd-timesyncd (`timedatectl`)."),
    # Versions and settings.
    "version-torch": Rule(ERROR, "torch differs between ranks",
        differing(lambda facts: facts.versions.torch),
        "torch is {values}",
        "Wire formats and defaults differ between versions: ranks hang or compute wrong results.",
        "Install the same version everywhere; check which environment each host activates."),
    "version-package": Rule(ERROR, "parallel_state differs between ranks",
        differing(lambda facts: facts.versions.package),
        "parallel_state is {values}",
        "Ranks of different versions make different calls.",
        "Install the same version everywhere."),
    "version-compiled": Rule(ERROR, "the compiled library differs between ranks, or some have none",
        partial(find.compiled_parts, none=False),
        "the compiled library is {values}",
        "Ranks choose different routes: they would refuse to start, or fall back to gloo.",
        "Install the same version everywhere, with a C++ compiler or a wheel; `rm -r ~/.cache/parallel_state` forces "
        "a new build."),
    "version-nccl": Rule(ERROR, "NCCL differs between ranks",
        differing(lambda facts: facts.versions.nccl),
        "NCCL is {values}",
        "NCCL refuses to connect different versions, or hangs.",
        "Install the same torch build everywhere; unset PARALLEL_STATE_NCCL_LIBRARY and any LD_PRELOAD of another "
        "libnccl."),
    "version-driver": Rule(WARNING, "the GPU driver differs between hosts",
        differing(lambda facts: facts.versions.driver),
        "the GPU driver is {values}",
        "Support for peer memory and NVLink differs, and NCCL uses only what all hosts support.",
        "Install the same driver on all hosts."),
    "version-python": Rule(WARNING, "Python differs between ranks",
        differing(lambda facts: ".".join(facts.versions.python.split(".")[:2])),
        "Python is {values}",
        "Pickled objects and bytecode of one version may fail on the other.",
        "Activate the same environment on all hosts."),
    "compiled-missing": Rule(WARNING, "the compiled library is missing",
        partial(find.compiled_parts, none=True),
        "{versions.compiled_problem}",
        "CPU collectives go over gloo, many times slower than shared memory.",
        "Install a C++ compiler, or a wheel that contains the library; the finding's text has the reason."),
    "setting-wrong": Rule(ERROR, "a PARALLEL_STATE_ variable has an invalid value",
        alike(lambda facts: facts.settings_wrong),
        "{key}",
        "The job raises SettingError when it reads the variable.",
        "Set it to a value that the message allows, or unset it."),
    "setting-unknown": Rule(WARNING, "a PARALLEL_STATE_ variable is unknown",
        alike(lambda facts: facts.settings_unknown),
        "{key} isn't a setting of this package",
        "It has no effect; its name is probably misspelled.",
        "Compare it with docs/settings.md."),
    "settings-differ": Rule(WARNING, "a variable of NCCL, gloo or this package differs between ranks",
        find.settings_differ,
        "{what} is {values}",
        "Ranks choose different algorithms or transports, and hang or fail at start-up.",
        "Set it to the same value on every rank."),
    "nccl-crippled": Rule(INFO, "a variable disables a fast path of NCCL",
        alike(find.crippled, lambda evidence, _: any(facts.gpus.visible for facts in evidence.arrivals)),
        "{key} disables a fast path of NCCL",
        "It is often left over from debugging.",
        "Unset it unless you need it."),
    # Limits.
    "shm-missing": Rule(ERROR, "/dev/shm is unusable",
        find.shm("missing"),
        "/dev/shm of {host}: {limits.shm_problem}",
        "Ranks of one host share memory there; without it they use loopback sockets, and NCCL fails.",
        "Mount a tmpfs at /dev/shm with mode 1777; in a container use `--ipc=host` or `--shm-size=8g`."),
    "shm-small": Rule(ERROR, "/dev/shm is too small",
        find.shm("small"),
        "/dev/shm of {host} has {limits.shm_bytes:size}, {limits.shm_free_bytes:size} of it free",
        "Containers get 64 MB by default. NCCL, data loaders and this package keep buffers there; a process that "
        "exceeds it gets SIGBUS.",
        "Start the container with `--shm-size=8g` or `--ipc=host`; in Kubernetes use an emptyDir with medium: Memory."),
    "shm-full": Rule(ERROR, "/dev/shm is full",
        find.shm("full"),
        "/dev/shm of {host} has {limits.shm_free_bytes:size} of {limits.shm_bytes:size} free",
        "Segments can't be created; a process that writes to one that doesn't fit gets SIGBUS.",
        "Remove files that dead jobs left there (`ls -l /dev/shm`), or enlarge it (`mount -o remount,size=…`)."),
    "shm-split": Rule(WARNING, "ranks of one host have different /dev/shm",
        hosts(find.several_shm),
        "{host} has {number} different /dev/shm: {parts}",
        "These ranks are in different containers and can't share memory: all their traffic goes over sockets.",
        "Run them in one container, or with `--ipc=host`."),
    "files-low": Rule(ERROR, "the limit of open files is too low",
        groups(lambda facts: facts.limits.files_hard, find.few_files),
        "ranks on {host} may open {limits.files_hard} files (hard limit), have {limits.files_open} open, and need "
        "{needed}",
        "Each pair of ranks uses a socket in each group; gloo aborts the process if it can't open one.",
        "Raise the hard limit: `ulimit -Hn 65536`, /etc/security/limits.conf, LimitNOFILE= of slurmd or the service."),
    "memlock-low": Rule(WARNING, "the limit of locked memory is low",
        groups(lambda facts: facts.limits.memlock_bytes, find.little_memlock),
        "ranks on {host} may lock {limits.memlock_bytes:size}{rdma}",
        "RDMA and GPU drivers lock the memory that they transfer: NCCL fails with `ibv_reg_mr` or falls back to TCP.",
        "Run `ulimit -l unlimited`, or set it in /etc/security/limits.conf, LimitMEMLOCK=infinity of slurmd or "
        "`--ulimit memlock=-1`."),
    # Cores.
    "cores-shared": Rule(WARNING, "several ranks are bound to the same cores",
        partial(find.crowded, bound=True),
        "{count} ranks on {host} may only use {cores:cores}",
        "A rank waits while another one runs: collectives take milliseconds, as long as time slices.",
        "Bind each rank to cores of its own (PARALLEL_STATE_CORES=share, srun --cpu-bind=cores), or don't bind."),
    "cores-few": Rule(INFO, "more ranks than cores",
        partial(find.crowded, bound=False),
        "{count} ranks on {host} may only use {cores:cores}",
        "Ranks that wait for each other take turns: collectives take milliseconds instead of microseconds.",
        "Start fewer ranks here, or ask the scheduler for more cores per task (--cpus-per-task)."),
    "smt-shared": Rule(WARNING, "ranks are bound to threads of the same physical core",
        find.same_physical_core,
        "{ranks} on {host} are bound to cores {cores}, which are threads of one physical core",
        "They share its execution units, while other cores may be idle.",
        "Bind by core, not by thread: `srun --hint=nomultithread`, `mpirun --map-by core`."),
    "cpu-quota": Rule(WARNING, "the cgroup gives the ranks less CPU time than one core each",
        groups(lambda facts: facts.cpu.cgroup if facts.cpu.quota_cores >= 0 else None, lambda _,
               group: group[0].cpu.quota_cores < len(group)),
        "{count} ranks on {host} together have {cpu.quota_cores:g} cores, by the quota of {cpu.cgroup}",
        "A used-up quota stops all of them until its period ends: a collective can take 100 ms.",
        "Raise the container's limit (`--cpus`, Kubernetes' limits.cpu) to at least one core per rank."),
    "rank-slow": Rule(WARNING, "a rank computes more slowly than the others",
        find.slow_cores,
        "rank {place.rank} takes {took_ms:.2f} ms for work that takes the median rank {middle_ms:.2f} ms",
        "All other ranks wait for it in every collective.",
        "Check that host: frequency and governor (`cpupower frequency-info`), temperature, other load (`top`)."),
    "threads-many": Rule(WARNING, "torch has more than twice as many threads as cores",
        hosts(find.many_threads),
        "torch has {total} threads in {count} ranks on {host}, for {usable} cores",
        "Ranks that compute at the same time slow each other down.",
        "Set OMP_NUM_THREADS to the number of cores of a host divided by the number of its ranks."),
    "numa-unbound": Rule(INFO, "ranks may run on any NUMA node",
        hosts(find.any_numa_node),
        "ranks on {host} may run on any of {nodes} NUMA nodes",
        "A rank loses bandwidth if it moves to another node, or if its memory is on another node.",
        "Bind ranks to NUMA nodes: `PARALLEL_STATE_CORES=share`, `srun --cpu-bind=ldoms`, `mpirun --map-by numa`."),
    # GPUs.
    "gpu-few": Rule(ERROR, "a host has fewer visible GPUs than ranks",
        some(lambda facts: bool(facts.gpus.visible) and not facts.gpus.own),
        "{host} has {gpus.visible:number} visible GPUs for {ranks_of_host} ranks",
        "A rank without a GPU fails at start-up.",
        "Start fewer ranks per host, or make more GPUs visible (CUDA_VISIBLE_DEVICES, --gpus-per-node)."),
    "gpu-shared": Rule(ERROR, "several ranks use the same GPU",
        groups(lambda facts: facts.gpus.own or None, find.shared_gpu),
        "{ranks} on {host} all use {gpus.own}",
        "NCCL refuses two ranks on one GPU, and they share its memory.",
        "Give each rank its own GPU: CUDA_VISIBLE_DEVICES, --gpus-per-task, LOCAL_RANK; or set "
        "PARALLEL_STATE_SHARE_GPUS=on."),
    "gpu-somewhere": Rule(ERROR, "some ranks have GPUs and others have none",
        alike(lambda facts: ["no GPU"] if not facts.gpus.visible else [],
              lambda evidence, group: len(group) < len(evidence.arrivals)),
        "{ranks_and_hosts} see no GPU, the others do",
        "Ranks would choose different backends.",
        "Check the driver on the hosts without GPUs (`nvidia-smi`), or hide all GPUs with CUDA_VISIBLE_DEVICES=."),
    "gpu-models": Rule(WARNING, "ranks have GPUs of different models",
        differing(find.model_of),
        "the GPU is {values}",
        "The slowest GPU slows down all others, and the smallest memory limits the sizes.",
        "Ask the scheduler for one model (--constraint, --gres=gpu:MODEL:N)."),
    "gpu-driver": Rule(ERROR, "the host has GPUs, but the driver doesn't answer or torch has no CUDA",
        hosts(find.no_driver),
        "{host} has {devices} GPUs, but {reason}",
        "Everything would run on the CPU.",
        "Install a torch build with CUDA and a matching driver; in a container use the NVIDIA runtime (`--gpus all`)."),
    "peer-access": Rule(WARNING, "GPUs of a host can't access each other's memory",
        hosts(find.no_peer_access),
        "on {host} {refused} of {pairs} GPU pairs have no peer access, such as {first}",
        "Data goes through host memory.",
        "Check `python -m parallel_state topology`; disable ACS, and start the fabric manager on NVSwitch machines."),
    "gpu-far": Rule(WARNING, "a rank is bound to cores that are far from its GPU",
        find.far_from_gpu,
        "rank {place.rank} on {host} is bound to {cpu.affinity:cores}, but {gpu.cores:cores} are near its "
        "GPU{gpu.index}",
        "Copies and kernel launches cross the link between the sockets.",
        "Bind ranks by their GPU's NUMA node: `srun --gpu-bind=closest`, or the cores of `nvidia-smi topo -m`."),
    # Traffic.
    "axis-across-hosts": Rule(WARNING, "a tensor-parallel group spans hosts",
        find.across_hosts,
        "{spanning} of {groups} tp groups span hosts: {ranks}",
        "The group communicates in every layer, and the network is slow.",
        "Choose --tp at most the number of ranks per host, and an order in which the ranks of a tp group are "
        "neighbours."),
    "start-failed": Rule(ERROR, "the job can't be started",
        partial(find.failures, starting=True),
        "{stage}, rank {rank}: {problem}{more}",
        "The job would fail with the same error.",
        "The error says what to do."),
    "traffic-failed": Rule(ERROR, "a collective failed",
        partial(find.failures, starting=False),
        "{stage}, rank {rank}: {problem}{more}",
        "The job would fail with the same error.",
        "The error says what to do; `python -m parallel_state debug` shows the records of a run with "
        "PARALLEL_STATE_DEBUG_DIR."),
    "traffic-wrong": Rule(ERROR, "a collective returned a wrong result",
        find.wrong_answers,
        "wrong results in the {within.kind} group of {within.ranks:ranks}, over {within.route}, on rank "
        "{place.rank}: {within.wrong:list}",
        "The job would compute wrong results without an error.",
        "Report it with the output of --json. Try another route: PARALLEL_STATE_SHARED_MEMORY=off, "
        "PARALLEL_STATE_PEER_MEMORY=off."),
    "group-slow": Rule(WARNING, "a group is slower than others of its kind",
        find.slow_groups,
        "{what}; the median of its kind is {usual}",
        "All other ranks wait for this group in the next step.",
        "Check the hosts and links of its ranks."),
    "check-late": Rule(WARNING, "some facts couldn't be read",
        alike(lambda facts: filter(None, ["; ".join(f"{name}: {why}" for name, why in facts.late.items())])),
        "couldn't read {key}",
        "The check can't judge what it couldn't read.",
        "Run it again with a longer --timeout; what is slow here is slow in the job, too."),
}  # fmt: skip


def finding(
    code: str, found: str, ranks: Iterable[int] = (), hosts: Iterable[str] = (), *, severity: str = "", fix: str = ""
) -> Finding:
    """Returns a finding with the texts of rule `code`; `severity` and `fix` replace the rule's."""
    rule = RULES[code]
    where = sorted(set(ranks)), list(dict.fromkeys(hosts))
    return Finding(severity or rule.severity, code, found, rule.why, fix or rule.fix, *where)


def judge(evidence: Evidence) -> list[Finding]:
    """Returns the findings of all rules, in the order of the table."""
    return [_found(code, rule, evidence, match) for code, rule in RULES.items() for match in rule.where(evidence)]


def _found(code: str, rule: Rule, evidence: Evidence, match: Match) -> Finding:
    ranks = ranks_of(match.group) if match.ranks is None else match.ranks
    hosts = map(evidence.host, match.group) if match.hosts is None else match.hosts
    return finding(code, text_of(rule.found, evidence, match), ranks, hosts, severity=match.severity, fix=match.fix)


def sorted_by_severity(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings by severity, errors first; within a severity in the order of the table."""
    order = list(RULES)
    return sorted(findings, key=lambda each: (-SEVERITIES.index(each.severity), order.index(each.code), each.ranks))
