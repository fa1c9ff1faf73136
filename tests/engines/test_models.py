from __future__ import annotations

import importlib.metadata
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines import install, running
from tests.engines.models import KINDS
from tests.failure.leftovers import descendants


def test_the_environment_has_the_locked_versions() -> None:
    if Path(sys.prefix) != install.place():
        pytest.skip(f"ENGINES names another environment than the one of the lock file, {install.place()}")
    locked = re.findall(r"^([\w.-]+)==(\S+)", "".join(path.read_text() for path in install.LOCKS), re.MULTILINE)
    found = {project: importlib.metadata.version(project) for project, _ in locked}
    assert found == dict(locked) and len(locked) > 100


def test_the_locks_are_of_digests_and_name_no_host() -> None:
    for path in install.LOCKS:
        pins = re.split(r"^# .*\n", path.read_text(), flags=re.MULTILINE)
        assert pins.pop(0) == ""
        for pin in pins:
            assert re.fullmatch(r"[\w.-]+==[\w.]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n", pin), pin


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_says_more_than_one_thing(kind: str, models: Callable[..., Path]) -> None:
    import transformers

    path = models(kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    asked = tokenizer("tensor-parallel?", return_tensors="pt")
    assert tokenizer.decode(asked["input_ids"][0]) == "tensor-parallel?"
    answer = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert len(set(answer.tolist())) > 2


def test_a_program_ends_with_what_it_started() -> None:
    before = descendants()
    children = "import subprocess; subprocess.Popen(['setsid', 'nohup', 'sleep', '1000']); print('started', flush=True)"
    with running.Started(running.python("-c", children + "; import time; time.sleep(1000)"), {}) as program:
        program.wait_for("started", timeout_s=30)
        with pytest.raises(AssertionError, match=r"runs after 0.1 s"):
            program.wait(0.1)
    with running.Started(running.python("-c", children), {}) as program:
        assert program.wait(30) == "started\n"
    time.sleep(0.1)
    assert descendants() <= before
    with pytest.raises(AssertionError, match="ended with 3"):
        running.run(running.python("-c", "raise SystemExit(3)"), {}, timeout_s=30)


def test_entry_points_are_found(plugins: Path) -> None:
    code = "from importlib.metadata import entry_points as e; print(*e(group='torch.distributed.backends').names)"
    assert running.run(running.python("-c", code), running.environment(plugins), 60) == "parallel_state\n"
