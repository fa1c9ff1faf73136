from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from parallel_state.__main__ import main
from parallel_state.tools.plan import page as page_module
from parallel_state.tools.plan.groups import Plan, Request, make_plan
from parallel_state.tools.plan.page import MAX_RANKS, default_kind, for_script, page
from parallel_state.tools.plan.remarks import Remark, remarks_on

STYLE = Path(page_module.__file__).with_suffix(".css").read_text(encoding="utf-8")
MAX_BYTES = 2_000_000
HOSTILE = "</script><script>alert(1)</script><!--&\"'<b>"

PLANS = {
    "16": Request(16, {"tp": 2, "pp": 4}, "megatron", 8),
    "64": Request(64, {"tp": 4, "cp": 2, "pp": 2, "ep": 4}, "megatron", 8),
    "partly filled": Request(30, {"tp": 2}, "megatron", 8),
    "vllm": Request(32, {"tp": 4, "pp": 2, "dcp": 2}, "vllm", 8),
    "replicas": Request(32, {"tp": 2, "dp_shard": 4, "dp_replicate": 4}, "torchtitan", 4),
    "optimizer instances": Request(48, {"tp": 2, "cp": 4, "inter_dist_opt": 4}, "cp-ep-tp-dp-pp", 8),
    "dcp over pcp": Request(32, {"tp": 2, "pcp": 4, "dcp": 4}, "vllm", 8),
    "1024": Request(1024, {"tp": 8, "cp": 2, "pp": 8, "ep": 8}, "megatron", 8),
    "72 a node": Request(144, {"tp": 8}, "megatron", 72),
    "one": Request(1, {}, "megatron", 8),
}
each_plan = pytest.mark.parametrize("request_", PLANS.values(), ids=PLANS)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "rect"):
            self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def data(self) -> dict[str, Any]:
        (index,) = (i for i, each in enumerate(self.all("script")) if each.get("id") == "data")
        return json.loads(self.texts["script"][index])


def test_large_worlds_stay_small() -> None:
    plan = make_plan(Request(MAX_RANKS, {"tp": 8, "pp": 8}, "megatron", 8))
    assert len(page(plan, default_kind(plan), remarks_on(plan)).encode()) < MAX_BYTES


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_numbers_are_legible_in_light_and_dark() -> None:
    light, dark = (
        dict(re.findall(r"--(c\d+|cell):(#\w{6})", part)) for part in STYLE.split("@media(prefers-color", 2)[:2]
    )
    for colors in (light, dark):
        text = colors.pop("cell")
        assert len(set(colors.values())) == len(colors) == 12
        assert min(contrast(color, text) for color in colors.values()) >= 4.5


def test_default_kind() -> None:
    assert default_kind(make_plan(PLANS["64"])) == "tp"
    assert default_kind(make_plan(Request(8, {"pp": 2}, "megatron", 8))) == "dp"
    assert default_kind(make_plan(PLANS["one"])) == "tp"


def locate(rank: int, kind: dict[str, Any], data: dict[str, Any]) -> tuple[int, int]:
    group = place = 0
    groups = places = 1
    for name, size in data["grids"][kind["grid"]]:
        rank, digit = divmod(rank, size)
        if name in kind["axes"]:
            place, places = place + digit * places, places * size
        else:
            group, groups = group + digit * groups, groups * size
    if kind["places"] is not None:
        if place not in kind["places"]:
            return -1, -1
        place = kind["places"].index(place)
    if kind["parts"] is not None:
        group, place = kind["parts"][group][place // kind["size"]], place % kind["size"]
    return group, place


@each_plan
def test_the_data_of_the_page_gives_the_groups(request_: Request) -> None:
    plan = make_plan(request_)
    data = Page(page(plan, default_kind(plan), [])).data
    named = [name for kind in data["kinds"] for name in kind["names"]]
    assert len(named) == len(set(named))
    assert set(named) >= {kind.name for kind in plan.kinds if kind.size > 1}
    for kind in data["kinds"]:
        for name in kind["names"]:
            expected = [(-1, -1)] * plan.world_size
            for number, ranks in enumerate(plan.layout.groups(name)):
                for place, rank in enumerate(ranks):
                    expected[rank] = (number, place)
            assert [locate(rank, kind, data) for rank in range(plan.world_size)] == expected


@each_plan
def test_the_page_starts_with_the_chosen_kind(request_: Request) -> None:
    plan = make_plan(request_)
    for chosen in {default_kind(plan), *("dp", "embedding", "fsdp", "replica")}:
        if plan.world_size > 1 and plan.kind(chosen).size == 1:  # type: ignore[union-attr]
            continue
        found = Page(page(plan, chosen, remarks_on(plan)))
        pressed = [button for button in found.all("button") if button["aria-pressed"] == "true"]
        assert len(pressed) == 1
        assert chosen in found.data["kinds"][int(str(pressed[0]["data-kind"]))]["names"]
        assert len(found.all("button")) == len(found.data["kinds"])


def test_the_page_needs_nothing_else() -> None:
    html = page(make_plan(PLANS["64"]), "tp", [])
    found = Page(html)
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in found.elements}
    assert not any("src" in attributes or "href" in attributes for _, attributes in found.elements)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttp|innerHTML|eval\(", html)
    (policy,) = (each["content"] for each in found.all("meta") if each.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'")


def test_escaping() -> None:
    plan = make_plan(PLANS["16"])
    layout = replace(plan.layout, title=HOSTILE)
    kinds = tuple(replace(kind, axis=replace(kind.axis, about=HOSTILE, long_name=HOSTILE)) for kind in plan.kinds)
    hostile = Plan(replace(plan.request, order=HOSTILE), layout, kinds)
    honest = Page(page(plan, "tp", [Remark("warning", "code", "text")]))
    found = Page(page(hostile, "tp", [Remark("warning", "code", HOSTILE)]))
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in honest.elements]
    assert found.texts["h1"] == [HOSTILE]
    assert any(HOSTILE in text for text in found.texts["li"])
    assert HOSTILE in str(found.all("button")[0]["title"])
    assert HOSTILE in found.data["kinds"][0]["shows"]


def test_no_text_ends_the_script_that_holds_it() -> None:
    escaped = for_script(json.dumps([HOSTILE]))
    assert not set("<>&") & set(escaped)
    assert json.loads(escaped) == [HOSTILE]


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "plan.html"
    words = ["--world-size", "64", "--tp", "4", "--pp", "2", "--html", str(html)]
    assert main(["plan", *words]) == 0
    plan = make_plan(Request(64, {"tp": 4, "pp": 2}, "megatron", 8))
    assert html.read_text(encoding="utf-8") == page(plan, default_kind(plan), remarks_on(plan))
    assert "64 ranks on 8 nodes" in capsys.readouterr().out
