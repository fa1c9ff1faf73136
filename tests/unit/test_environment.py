"""Launchers' environment variables. The tests pass mappings, and leave os.environ unchanged."""

from __future__ import annotations

import itertools
import os

import pytest

from device_communicators.base.errors import SettingError
from parallel_state.startup.environment import (
    DERIVED_PORTS,
    ProcessEnvironment,
    detect,
    expand_hostlist,
    explicit,
    export,
    find_local_world_size,
    is_rank_zero,
)

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[03-08]",
}
# in a script of sbatch: a rank, but no step
SBATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "node[03-08]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_PORT": "29500",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4", "MASTER_PORT": "29500"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_nobody_started_us():
    assert detect({}) == ProcessEnvironment(0, 0, 1, 1, "127.0.0.1", None, "single")


def test_torchrun():
    assert detect(TORCHRUN) == ProcessEnvironment(5, 1, 8, 4, "head", 29500, "torchrun")


def test_srun():
    found = detect(SRUN)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (5, 1, 8, 4)
    assert (found.master_addr, found.source) == ("node07", "slurm")
    assert found.master_port in DERIVED_PORTS


def test_open_mpi_and_pmi_on_one_host():
    assert detect(MPIRUN) == ProcessEnvironment(3, 3, 4, 4, "127.0.0.1", 29500, "open_mpi")
    assert detect(HYDRA) == ProcessEnvironment(3, 3, 4, 4, "127.0.0.1", 29500, "pmi")


@pytest.mark.parametrize("other", [SRUN, SBATCH, MPIRUN, HYDRA])
def test_torchrun_wins_within_another_launcher(other):
    assert detect({**other, **TORCHRUN}) == detect(TORCHRUN)


@pytest.mark.parametrize("shell", [SBATCH, without(SBATCH, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")])
def test_a_batch_script_and_an_salloc_shell_are_one_process(shell):
    assert detect(shell) == ProcessEnvironment(0, 0, 1, 1, "127.0.0.1", None, "single")


def test_a_task_without_a_step_is_an_error_and_not_a_second_rank_zero():
    with pytest.raises(SettingError, match="SLURM_STEP_ID"):
        detect({**SBATCH, "SLURM_PROCID": "3"})


def test_a_step_smaller_than_its_allocation():
    assert detect({**SRUN, "SLURM_NTASKS": "64"}).world_size == 8


def test_mpirun_within_a_slurm_step_is_what_started_us():
    # hydra and orted start one proxy per host with srun; the ranks inherit the proxy's SLURM_PROCID
    proxy = {**SRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    for mpi, source in ((MPIRUN, "open_mpi"), (HYDRA, "pmi")):
        found = detect({**proxy, **without(mpi, "MASTER_PORT")})
        assert (found.rank, found.world_size, found.source) == (3, 4, source)


def test_all_ranks_of_an_mpirun_meet_at_one_address_though_only_some_see_a_step():
    two_hosts = {**without(MPIRUN, "MASTER_PORT"), "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    within, beside = detect({**SRUN, **two_hosts}), detect({**SBATCH, **two_hosts})
    assert within.master_addr == beside.master_addr == "node03"
    assert within.master_port == beside.master_port is not None


def test_srun_with_pmi2_is_slurm():
    assert detect({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}) == detect(SRUN)


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE"),
        (without(TORCHRUN, "RANK"), "RANK"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK"),
        ({"LOCAL_RANK": "0"}, "RANK"),
        (without(SRUN, "SLURM_PROCID"), "SLURM_PROCID"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID"),
        (without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS"),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({"PMIX_RANK": "0"}, "PMI_SIZE"),
    ],
)
def test_a_half_set_family_names_what_is_missing_and_what_to_do(environ, names):
    with pytest.raises(SettingError, match=rf"is set, but .*\b{names}\b.* is not: set "):
        detect(environ)


@pytest.mark.parametrize("value", ["x", "-1", "1.0", "0x1", "1_0", "٣", "1" * 5000])
@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_not_a_number(name, value):
    with pytest.raises(SettingError, match=name):
        detect({**TORCHRUN, name: value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "8"},
        {"RANK": "9"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "4"},
        {"LOCAL_WORLD_SIZE": "9"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"MASTER_PORT": "0"},
        {"MASTER_PORT": "65536"},
    ],
)
def test_out_of_range(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        detect({**TORCHRUN, **wrong})


def test_empty_counts_as_unset():
    assert detect(dict.fromkeys(TORCHRUN, " ")).source == "single"


def test_the_only_local_rank_there_can_be_need_not_be_set():
    one_per_host = {**without(TORCHRUN, "LOCAL_RANK"), "LOCAL_WORLD_SIZE": "1"}
    assert detect(one_per_host).local_rank == 0
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}).local_rank == 0


@pytest.mark.parametrize(("coded", "counts"), [("3", [3]), ("4(x2),3", [4, 4, 3]), ("1,2(x3)", [1, 2, 2, 2])])
def test_slurm_tasks_per_node(coded, counts):
    for node, count in enumerate(counts):
        environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": coded, "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
        assert detect(environ).local_world_size == count
    with pytest.raises(SettingError, match="SLURM_NODEID"):
        detect({**SRUN, "SLURM_STEP_TASKS_PER_NODE": coded, "SLURM_NODEID": str(len(counts))})


def test_the_ranks_of_this_host_for_a_process_that_was_told_its_place():
    for environ in (TORCHRUN, SRUN, MPIRUN, HYDRA):
        assert find_local_world_size(environ) == 4
    assert find_local_world_size(SBATCH) is None
    assert find_local_world_size({}) is None


def test_slurm_tasks_per_node_unreadable():
    with pytest.raises(SettingError, match="SLURM_STEP_TASKS_PER_NODE"):
        detect({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(2)"})
    assert detect(without(SRUN, "SLURM_STEP_TASKS_PER_NODE")).local_world_size is None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node1,node3", ["node1", "node3"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("a-b[1-2]-c[3,5]", ["a-b1-c3", "a-b1-c5", "a-b2-c3", "a-b2-c5"]),
        ("gpu[1-2].site.org,x", ["gpu1.site.org", "gpu2.site.org", "x"]),
        ("a[1-2],b[3],c", ["a1", "a2", "b3", "c"]),
    ],
)
def test_hostlist(text, hosts):
    assert list(expand_hostlist(text)) == hosts


@pytest.mark.parametrize(
    "text",
    ["", " ", ",", "a,", ",a", "a b", "a[1", "a1]", "a[]", "a[x]", "a[1-]", "a[1,]", "a[1-2-3]", "a[[1]]", "a;b"],
)
def test_not_a_hostlist(text):
    with pytest.raises(SettingError, match="MASTER_ADDR"):
        expand_hostlist(text)


def test_the_first_of_very_many_hosts_costs_nothing():
    assert list(itertools.islice(expand_hostlist("n[0-999999999]-[0-999999999]"), 2)) == ["n0-0", "n0-1"]


def test_a_hostlist_of_any_length_is_judged_in_linear_time():
    with pytest.raises(SettingError):
        expand_hostlist("a1" * 20_000 + "[")


@pytest.mark.parametrize("nodelist", ["", "node[", "node[3-1]"])
def test_never_an_empty_address(nodelist):
    with pytest.raises(SettingError, match="MASTER_ADDR"):
        detect({**SRUN, "SLURM_STEP_NODELIST": nodelist, "SLURM_JOB_NODELIST": nodelist})


def test_an_arbitrary_distribution_needs_an_address():
    """The list of nodes is sorted, so rank 0 may be on any."""
    arbitrary = {**SRUN, "SLURM_DISTRIBUTION": "arbitrary"}
    with pytest.raises(SettingError, match=r"arbitrary.*set MASTER_ADDR"):
        detect(arbitrary)
    assert detect({**arbitrary, "MASTER_ADDR": "node08"}).master_addr == "node08"
    assert detect({**SRUN, "SLURM_DISTRIBUTION": "cyclic"}).master_addr == "node07"


def test_the_jobs_hosts_where_the_step_has_none():
    assert detect(without(SRUN, "SLURM_STEP_NODELIST")).master_addr == "node03"


@pytest.mark.parametrize("environ", [SRUN, MPIRUN, HYDRA, {}])
def test_a_given_address_wins(environ):
    found = detect({**environ, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (found.master_addr, found.master_port) == ("10.0.0.1", 1234)


@pytest.mark.parametrize(
    "environ",
    [
        {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        without(MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        {**HYDRA, "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
        without(TORCHRUN, "MASTER_ADDR"),
    ],
)
def test_several_hosts_without_an_address(environ):
    with pytest.raises(SettingError, match="set MASTER_ADDR"):
        detect(environ)


def test_the_port_is_the_jobs():
    ports = {
        detect({**SRUN, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4)}).master_port for rank in range(8)
    }
    assert len(ports) == 1


def test_neighbouring_jobs_and_steps_have_ports_of_their_own():
    ports = {
        detect({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(4711, 4811)
        for step in range(10)
    }
    assert len(ports) == 1000
    assert all(1024 < port < 32_768 for port in ports if port)


@pytest.mark.parametrize("environ", [MPIRUN, HYDRA, {**TORCHRUN}])
def test_several_ranks_with_no_port_to_share(environ):
    with pytest.raises(SettingError, match="MASTER_PORT"):
        detect(without(environ, "MASTER_PORT"))


def test_a_job_id_that_is_no_number():
    with pytest.raises(SettingError, match="SLURM_JOB_ID"):
        detect({**SRUN, "SLURM_JOB_ID": "4711_1"})


def test_without_rendezvous_nobody_needs_an_address():
    found = detect(without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), rendezvous=False)
    assert (found.rank, found.master_addr, found.master_port) == (5, None, None)


@pytest.mark.parametrize(
    ("environ", "zero"),
    [
        ({}, True),
        (TORCHRUN, False),
        ({**TORCHRUN, "RANK": "0"}, True),
        (SRUN, False),
        ({**without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "SLURM_PROCID": "0"}, True),
        ({**without(MPIRUN, "MASTER_PORT"), "OMPI_COMM_WORLD_RANK": "0"}, True),
    ],
)
def test_is_rank_zero(environ, zero):
    assert is_rank_zero(environ) is zero


def test_explicit_takes_the_local_rank_where_it_finds_one():
    assert explicit(3, 4, 1, rendezvous=False, environ=TORCHRUN).local_rank == 1
    assert explicit(3, 4, rendezvous=False, environ={"LOCAL_RANK": "2"}).local_rank == 2
    assert explicit(5, 8, rendezvous=False, environ=SRUN).local_rank == 1
    assert explicit(3, 4, rendezvous=False, environ={}).local_rank == 3
    assert explicit(3, 4, rendezvous=False, environ={"WORLD_SIZE": "8"}).local_rank == 3


def test_explicit_needs_an_address_as_detect_does():
    assert explicit(0, 1, environ={}).master_addr == "127.0.0.1"
    with pytest.raises(SettingError, match="MASTER_ADDR"):
        explicit(0, 2, environ={})
    found = explicit(1, 2, environ={"MASTER_ADDR": "head", "MASTER_PORT": "1"})
    assert (found.rank, found.world_size, found.master_addr, found.source) == (1, 2, "head", "explicit")


def test_export_sets_what_is_unset_and_says_what():
    environ = {**SRUN, "MASTER_ADDR": "mine", "RANK": ""}
    before = dict(environ)
    found = detect(environ)
    assert environ == before
    new = export(found, environ)
    assert environ == {**before, **new}
    assert new == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_PORT": str(found.master_port),
    }
    again = detect(environ)
    assert (again.rank, again.master_addr, again.master_port) == (5, "mine", found.master_port)
    assert export(again, environ) == {}


def test_export_leaves_out_what_nobody_knows():
    environ: dict[str, str] = {}
    export(detect({}), environ)
    assert "MASTER_PORT" not in environ
    assert environ["WORLD_SIZE"] == "1"


def test_the_default_is_os_environ_at_the_time_of_the_call(monkeypatch):
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI")):
            monkeypatch.delenv(name)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert detect() == detect(TORCHRUN)
    assert not is_rank_zero()
