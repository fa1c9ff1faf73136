from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from parallel_state.compat import errors, tables


class Group:
    def gather(self, x: int, dst: int = 0, dim: int = -1, *, out: Any = None) -> tuple[int, int, int]:
        """Gathers."""
        return x, dst, dim


def test_a_renamed_method_has_the_engines_parameters_alone() -> None:
    gather = tables.renamed(Group.gather, "input_ dst", "Theirs.")
    assert str(inspect.signature(gather)) == "(self, input_: 'int', dst: 'int' = 0) -> 'tuple[int, int, int]'"
    assert gather(Group(), input_=3, dst=1) == gather(Group(), 3, 1) == (3, 1, -1)
    assert gather.__doc__ == "Theirs."
    with pytest.raises(TypeError):
        gather(Group(), 3, other=1)


def test_a_renamed_method_may_need_more_ignore_some_and_give_another_type() -> None:
    gather = tables.renamed(Group.gather, "input_ dst! group?", "Theirs.", then=list)
    assert list(inspect.signature(gather).parameters) == ["self", "input_", "dst", "group"]
    assert gather(Group(), 3, 1, None) == gather(Group(), 3, dst=1, group="any") == gather(Group(), 3, 1) == [3, 1, -1]
    with pytest.raises(TypeError, match="dst"):
        gather(Group(), 3)


def test_an_error_becomes_the_engines_kind() -> None:
    class Theirs(LookupError, AssertionError):
        pass

    for error, found in ((KeyError("k"), Theirs), (Theirs("t"), Theirs), (OSError("o"), OSError)):
        with pytest.raises(found) as raised, errors.raised_as(Theirs):
            raise error
        assert raised.type is found and str(error) in str(raised.value)


def test_names_have_the_reason_of_their_row() -> None:
    table = {"is slow": "one Two.(three four)", "is gone": "five"}
    assert tables.reasons(table) == {
        "one": "is slow", "Two.three": "is slow", "Two.four": "is slow", "five": "is gone"
    }  # fmt: skip


def test_a_function_forwards_to_the_group_that_there_is_then() -> None:
    found: list[Group] = []
    call = tables.forward("engine", "tp_gather", Group.gather, lambda: found[0], "the tp group")
    with pytest.raises(IndexError):
        call(1)
    found.append(Group())
    assert call(1, dim=2) == (1, 0, 2)
    assert (call.__name__, call.__module__) == ("tp_gather", "engine")
    assert list(inspect.signature(call).parameters) == ["x", "dst", "dim", "out"]


@pytest.mark.parametrize("engine", ["megatron", "vllm", "sglang", "deepspeed"])
def test_a_name_that_is_missing_says_why(engine: str) -> None:
    module = importlib.import_module(f"parallel_state.compat.{engine}")
    for name, reason in module.MISSING.items():
        if "." not in name:
            with pytest.raises(AttributeError) as raised:
                getattr(module, name)
            assert str(raised.value) == f"module {module.__name__!r} has no attribute {name!r}: {reason}"
    with pytest.raises(AttributeError, match=r"has no attribute '_absent'$"):
        _ = module._absent
