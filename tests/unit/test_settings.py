from __future__ import annotations

import re
from pathlib import Path

import pytest

from device_communicators.base import settings
from device_communicators.base.errors import SettingError
from device_communicators.base.settings import (
    BACKEND,
    BARRIER_TIMEOUT_S,
    LOG_LEVEL,
    MAX_METADATA_BYTES,
    START_TIMEOUT_S,
    TIMEOUT_S,
    Setting,
)
from tests.cases import each

ROOT = Path(__file__).resolve().parents[2]
SECONDS = (TIMEOUT_S, START_TIMEOUT_S, BARRIER_TIMEOUT_S)


def name_of(setting: Setting[object]) -> str:
    return setting.name


def test_the_table_holds_every_setting_of_the_module_once() -> None:
    assert settings.TIMEOUT_S in settings.ALL and settings.LOG_LEVEL in settings.ALL
    assert len({setting.name for setting in settings.ALL}) == len(settings.ALL)


def test_every_variable_of_ours_is_read_through_the_table() -> None:
    known = {setting.name for setting in settings.ALL}
    for package in ("parallel_state", "device_communicators"):
        for path in (ROOT / package).rglob("*.py"):
            assert set(re.findall(r"PARALLEL_STATE_[A-Z_]+", path.read_text())) - {settings.PREFIX} <= known
            assert not re.search(r"environ.*PARALLEL_STATE_", path.read_text())


def test_unset_and_empty_mean_the_default() -> None:
    def check(setting: Setting[object]) -> None:
        for text in ("", "   "):
            assert setting.get({setting.name: text}) == setting.default
        assert setting.get({}) == setting.default

    each(settings.ALL, check, name_of)


def test_each_is_documented() -> None:
    each(settings.ALL, _check_documentation, name_of)


def _check_documentation(setting: Setting[object]) -> None:
    assert setting.name.startswith(settings.PREFIX)
    assert setting.must_be
    assert setting.help.endswith(".")
    if setting.default is not None:
        assert setting.parse(str(setting.default)) == setting.default


@pytest.mark.parametrize("setting", SECONDS, ids=name_of)
@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), (" 0.25 ", 0.25), ("1e3", 1000.0)])
def test_seconds(setting: Setting[float], text: str, seconds: float) -> None:
    assert setting.get({setting.name: text}) == seconds


def test_other_values() -> None:
    assert MAX_METADATA_BYTES.get({MAX_METADATA_BYTES.name: "4096"}) == 4096
    assert BACKEND.get({BACKEND.name: "gloo"}) == "gloo"
    assert LOG_LEVEL.get({LOG_LEVEL.name: "debug"}) == "DEBUG"


BAD = [
    *((setting, text) for setting in SECONDS for text in ("0", "-1", "nan", "inf", "-inf", "1e300", "5s", "a", "None")),
    *((MAX_METADATA_BYTES, text) for text in ("0", "-1", "64MiB", "1.5", "1e6", "0x10")),
    *((LOG_LEVEL, text) for text in ("LOUD", "10", "WARN")),
]


def test_a_bad_value_says_name_value_and_remedy() -> None:
    each(BAD, _check_message)


def _check_message(setting: Setting[object], text: str) -> None:
    with pytest.raises(SettingError) as caught:
        setting.get({setting.name: text})
    message = str(caught.value)
    assert message.startswith(f"{setting.name} must be {setting.must_be}, but is {text!r}")
    assert "unset it" in message
    assert isinstance(caught.value.__cause__, ValueError)
    assert isinstance(caught.value, ValueError)


def test_a_value_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_S.name, "7")
    assert TIMEOUT_S.get() == 7.0
    monkeypatch.setenv(TIMEOUT_S.name, "8")
    assert TIMEOUT_S.get() == 8.0
    monkeypatch.delenv(TIMEOUT_S.name)
    assert TIMEOUT_S.get() == TIMEOUT_S.default


def test_names_that_no_setting_has() -> None:
    environ = {
        "PARALLEL_STATE_TIMEOUT": "5",
        TIMEOUT_S.name: "5",
        "PARALLEL_STATE_B": "",
        "OTHER": "x",
        "PARALLEL": "y",
    }
    assert settings.unknown_names(environ) == ["PARALLEL_STATE_B", "PARALLEL_STATE_TIMEOUT"]
    assert settings.unknown_names({}) == []


def test_unknown_names_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings.unknown_names()
    monkeypatch.setenv("PARALLEL_STATE_NO_SUCH_THING", "1")
    assert settings.unknown_names() == sorted([*before, "PARALLEL_STATE_NO_SUCH_THING"])
