from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import parallel_state as ps
from tests.failure.jobs import DEADLINE_S, pids_then_compute, running_job

NOBODY = 65_534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def _look(pids: list[int]) -> dict[str, str]:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    told = {}
    for pid in pids:
        for path in ("environ", "mem", "maps", "fd", *(f"fd/{number}" for number in range(64))):
            try:
                os.close(os.open(f"/proc/{pid}/{path}", os.O_RDONLY))
                told[f"{pid} {path}"] = "opened"
            except OSError as error:
                told[f"{pid} {path}"] = type(error).__name__
        try:
            told[f"{pid} list"] = str(os.listdir(f"/proc/{pid}/fd"))
        except OSError as error:
            told[f"{pid} list"] = type(error).__name__
    return told


@needs_root
def test_row_38_another_user_looks_for_the_secret(tmp_path: Path, secret: bytes) -> None:
    options: dict[str, Any] = {"tensor_model_parallel_size": 4, "timeout": DEADLINE_S}
    file = str(tmp_path / "secret")
    with running_job(
        tmp_path, lambda: ps.launch(pids_then_compute, 4, args=(str(tmp_path),), secret_file=file, **options)
    ):
        pids = [os.getpid(), *(int((tmp_path / f"{rank}.pid").read_text()) for rank in range(4))]
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                os.write(writing, json.dumps(_look(pids)).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            told = json.loads(pipe.read())
        os.waitpid(child, 0)
        assert len(told) == 69 * len(pids) and set(told.values()) == {"PermissionError"}, told
        for pid in pids:
            for public in ("cmdline", "environ"):
                content = Path(f"/proc/{pid}/{public}").read_bytes()
                assert secret not in content and secret.hex().encode() not in content


def test_row_38_a_secret_file_that_others_may_have_seen(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(bytes(32))
    for mode in (0o640, 0o604, 0o660, 0o602):
        path.chmod(mode)
        with pytest.raises(ps.InvalidArgumentError, match=rf"secret_file must be closed to others .* mode {mode:o}"):
            ps.launch(os.getpid, 2, secret_file=str(path))
    path.chmod(0o600)
    for size in (0, 31, 4097):
        path.write_bytes(bytes(size))
        with pytest.raises(ps.InvalidArgumentError, match=rf"of 32 to 4096 bytes .*, but has {size}"):
            ps.launch(os.getpid, 2, secret_file=str(path))
    os.mkfifo(tmp_path / "fifo", 0o600)
    for other, text in ((tmp_path / "none", "can't be read"), (tmp_path, "can't be read|a regular file"),
                        (tmp_path / "fifo", "a regular file")):  # fmt: skip
        with pytest.raises(ps.InvalidArgumentError, match=text):
            ps.launch(os.getpid, 2, secret_file=str(other))
    if os.geteuid() == 0:
        path.write_bytes(bytes(32))
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(ps.InvalidArgumentError, match=rf"owned by this user .*, but its owner is uid {NOBODY}"):
            ps.launch(os.getpid, 2, secret_file=str(path))
