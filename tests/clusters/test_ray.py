from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clusters.cluster import DEMO, Cluster
from tests.clusters.install import missing, path_of
from tests.clusters.launchers import logs
from tests.clusters.test_launchers import CHECK, SOON_S, START_S, TEXT, check, told

pytestmark = pytest.mark.slow

DEADLINE_S = 240.0
PORT = 6379


@contextmanager
def _ray(cluster: Cluster) -> Iterator[str]:
    """Yields Ray's address. The folder's path is short, because paths of sockets have a limit."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    command = [str(path_of("ray")), "start", "--block", "--num-cpus", "2", "--num-gpus", "2"]
    command += ["--object-store-memory", "100000000", "--disable-usage-stats"]
    address = f"{cluster.addresses[0]}:{PORT}"
    variables = {"RAY_AT": address, "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    try:
        head = ["--head", "--port", str(PORT), "--temp-dir", str(folder), "--include-dashboard", "false"]
        at = [["--node-ip-address", each] for each in cluster.addresses]
        cluster.start(0, [*command, *at[0], *head], **variables)
        status = f"{path_of('ray')} status --address {address}"
        cluster.wait_for(0, status, DEADLINE_S)
        cluster.start(1, [*command, *at[1], "--address", address], **variables)
        cluster.wait_for(0, f"{status} | grep -q '/4.0 GPU'", DEADLINE_S)
        cluster.common.update(variables)
        yield address
    finally:
        cluster.end_commands()
        shutil.rmtree(folder, ignore_errors=True)


def _drive(cluster: Cluster, *options: str) -> dict[str, list[object]]:
    with _ray(cluster):
        python = str(path_of("ray", "python"))
        ended = cluster.run(0, [python, "-m", "tests.clusters.ray_driver", str(cluster.folder), *options], DEADLINE_S)
        assert ended.code == 0, logs(cluster)
    return dict(json.loads((cluster.folder / "driver.json").read_text()))


@pytest.fixture(autouse=True)
def ray_is_there() -> None:
    if problem := missing("ray"):
        pytest.skip(problem)


def test_actors_of_a_placement_group(cluster: Cluster) -> None:
    driver = _drive(cluster)
    assert driver == {"ends": ["ok"] * 4, "gpus": [["0"], ["1"]] * 2}
    facts = told(cluster)
    check(facts, "explicit")
    assert [each["visible"] for each in facts.values()] == ["0", "1", "0", "1"]


def test_an_actor_that_is_killed_is_named_by_all_others(cluster: Cluster) -> None:
    driver = _drive(cluster, "--kill", "3")
    assert driver["ends"] == ["ok"] * 3 + ["died"]
    facts = told(cluster)
    for rank in range(3):
        error = facts[rank]["error"]
        assert (error["kind"], error["suspect_ranks"]) == ("PeerDiedError", [3]) and error["seconds"] < SOON_S


def test_an_actor_that_never_joins_is_named_by_all_others(cluster: Cluster) -> None:
    cluster.common["PARALLEL_STATE_START_TIMEOUT_S"] = f"{START_S}"
    driver = _drive(cluster, "--absent", "3")
    assert len(driver["ends"]) == 3
    for rank, end in enumerate(driver["ends"]):
        assert f"RendezvousError: rank {rank} of 4" in str(end)
        assert f"ranks [3] did not come within {START_S} s" in str(end)


def test_check_in_place_of_the_program(cluster: Cluster) -> None:
    page = cluster.folder / "check.json"
    driver = _drive(cluster, "--program", *CHECK, "--json", str(page))
    found = json.loads(page.read_text())
    errors = {each["code"] for each in found["findings"] if each["severity"] == "error"}
    assert errors == set() and found["world_size"] == 4 and found["complete"], found["findings"]
    assert driver["ends"] == [f"exit code {found['exit_code']}"] * 4


def test_the_demo(cluster: Cluster) -> None:
    text = cluster.folder / "text.md"
    text.write_text(TEXT)
    driver = _drive(cluster, "--program", *DEMO, "--input", str(text))
    assert driver["ends"] == ["exit code 0"] * 4, logs(cluster)
