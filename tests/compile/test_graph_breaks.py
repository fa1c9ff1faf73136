"""Every public method of a group in compiled code. A host method breaks the graph only at its call, and tells
`fullgraph=True` users what to do instead. Compiling must not touch the group."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import Tensor

import parallel_state as ps
from device_communicators import Handle
from device_communicators.base.host_calls import host_call
from tests.contract.attempts import environment, world
from tests.helpers.doors import op_arguments
from tests.workers import WorkerPool

THIN = ("broadcast_tensor_dict", "all_reduce", "irecv_tensor_dict", "isend", "send_tensor_dict", "broadcast_object")
Group = ps.GroupCoordinator


class Call(NamedTuple):
    use: Callable[[Group, Tensor], Any]
    advice: str | None = None
    """Text of the error under `fullgraph=True`; None if it compiles."""


def _to_second(send: Callable[[Group, Tensor], Any], recv: Callable[[Group, Tensor], Any]) -> Any:
    def use(group: Group, x: Tensor) -> Any:
        return send(group, x) if group.rank_in_group == 0 else recv(group, x)

    return use


def _filled(group: Group, x: Tensor) -> list[Any]:
    objects = [x, "one", 2] if group.rank_in_group == 1 else [None, None, None]
    return group.broadcast_object_list(objects, 1)


def _dict(group: Group, x: Tensor) -> dict[str, Any] | None:
    return {"hidden": x, "step": 3, "names": ["a", "b"]} if group.rank_in_group == 0 else None


def _started(group: Group, x: Tensor) -> Any:
    transfer = group.irecv(list(x.shape), x.dtype) if group.rank_in_group == 1 else group.isend(x * 2)
    y = x * 3
    return y, transfer.wait(), transfer.is_completed()


def _started_object(group: Group, x: Tensor) -> Any:
    transfer = group.irecv_object() if group.rank_in_group == 1 else group.isend_object([x * 2, "one"])
    return x * 3, transfer.wait()


def _broken_up(group: Group, x: Tensor) -> Any:
    handles = group.irecv_tensor_dict() if group.rank_in_group == 1 else group.isend_tensor_dict({"x": x, "n": 1})
    y = x * 2
    got = handles.wait()
    return y if got is None else (y, got)


def _destroyed(group: Group, x: Tensor) -> Any:
    sub = group.make_sub_group([0, 1], name="ended")
    y = sub.all_reduce(x) if torch.compiler.is_compiling() else x * 2
    sub.destroy()
    sub.close()
    return y.shape


def _sub_group(group: Group, x: Tensor) -> Any:
    sub = group.make_sub_group([0, 1])
    y = sub.all_reduce(x)
    sub.destroy()
    return y


_GIVEN: dict[str, Any] = {}


def _given(group: Group, x: Tensor) -> Any:
    if not torch.compiler.is_compiling():  # true in the eager call, which is first
        _GIVEN["group"] = group.device_group
    given = Group.from_process_group(_GIVEN["group"])
    y = given.all_reduce(x)
    given.destroy()
    return y


def _batched(group: Group, x: Tensor) -> Any:
    y, other = torch.empty_like(x), 1 - group.rank_in_group
    for handle in group.batch_isend_irecv([("isend", x * 2, other), ("irecv", y, other)]):
        handle.wait()
    return y


def _captured(group: Group, x: Tensor) -> Any:
    with group.graph_capture():
        return x + 1


def _within(group: Group, x: Tensor) -> Any:
    with group.within(30.0):
        return x + 1


def _norm(group: Group, x: Tensor) -> Any:
    return group.all_reduce_add_rms_norm(x, torch.zeros_like(x), torch.ones(x.shape[-1]), 1e-6)


def _static_fp8(group: Group, x: Tensor) -> Any:
    outs = group.all_reduce_add_rms_norm_static_fp8_quant(
        x, torch.zeros_like(x), torch.ones(x.shape[-1]), torch.ones(1), 1e-6
    )
    return [out.float() for out in outs]


def _dynamic_fp8(group: Group, x: Tensor) -> Any:
    outs = group.all_reduce_add_rms_norm_dynamic_per_token_fp8_quant(
        x, torch.zeros_like(x), torch.ones(x.shape[-1]), 1e-6
    )
    return [out.float() for out in outs]


SPEC = ps.TensorDictSpec.of({"hidden": torch.ones(4, 6), "step": 3})


def _spec_dict(group: Group, x: Tensor) -> dict[str, Any]:
    return {"hidden": x, "step": 3}


WAITING = "compiled code waits for its"
OBJECTS = "objects travel by the host"
DICTS = "spec=TensorDictSpec"
STATE = "outside the compiled function"

PARTNERS = {
    "irecv": "isend", "irecv_object": "isend_object", "irecv_tensor_dict": "isend_tensor_dict",
    "recv_object": "send_object", "recv_tensor_dict": "send_tensor_dict", "close": "make_sub_group",
    "destroy": "make_sub_group",
}  # fmt: skip
PARTNERS |= {sender: receiver for receiver, sender in PARTNERS.items() if sender != "make_sub_group"}

CALLS: dict[str, Call] = {
    "all_gather": Call(lambda group, x: group.all_gather(x, 0)),
    "all_gather(out)": Call(lambda group, x: group.all_gather(x, 0, out=torch.empty(8, 6))),
    "all_gather_into_tensor": Call(lambda group, x: group.all_gather_into_tensor(torch.empty(2, 4, 6), x)),
    "all_gather_async": Call(lambda group, x: group.all_gather_async(x, 0).wait(), WAITING),
    "all_gather_object": Call(lambda group, x: group.all_gather_object({"x": x, "n": 1}), OBJECTS),
    "all_gather_to_list": Call(lambda group, x: group.all_gather_to_list(x)),
    "all_gatherv(list)": Call(lambda group, x: group.all_gatherv([x, x * 2], 0, [4, 4])),
    "all_gatherv": Call(lambda group, x: group.all_gatherv(x, 0, [4, 4])),
    "all_reduce": Call(lambda group, x: group.all_reduce(x)),
    "all_reduce_": Call(lambda group, x: group.all_reduce_(x.clone())),
    "all_reduce_add_rms_norm": Call(_norm),
    "all_reduce_add_rms_norm_dynamic_per_token_fp8_quant": Call(_dynamic_fp8),
    "all_reduce_add_rms_norm_static_fp8_quant": Call(_static_fp8),
    "all_reduce_async": Call(lambda group, x: group.all_reduce_async(x).wait(), WAITING),
    "all_sum": Call(lambda group, x: x * group.all_sum(group.rank_in_group), OBJECTS),
    "all_to_all": Call(lambda group, x: group.all_to_all(x, 0, 1)),
    "all_to_all_single": Call(lambda group, x: group.all_to_all_single(torch.empty(4, 6), x)),
    "as_process_group": Call(lambda group, x: (x + 1, group.as_process_group().size())[0], STATE),
    "barrier": Call(lambda group, x: (x + 1, group.barrier())[0]),
    "batch_isend_irecv": Call(_batched, WAITING),
    "broadcast": Call(lambda group, x: group.broadcast(x, 1)),
    "broadcast_": Call(lambda group, x: group.broadcast_(x.clone(), 1)),
    "broadcast_async": Call(lambda group, x: group.broadcast_async(x, 1).wait(), WAITING),
    "broadcast_flag": Call(lambda group, x: x + 1 if group.broadcast_flag(group.is_first_rank) else x, "broadcast_"),
    "broadcast_object": Call(lambda group, x: group.broadcast_object({"x": x}, 1), OBJECTS),
    "broadcast_object_list": Call(_filled, OBJECTS),
    "broadcast_tensor_dict": Call(lambda group, x: group.broadcast_tensor_dict(_dict(group, x)), DICTS),
    "broadcast_tensor_dict(spec)": Call(
        lambda group, x: group.broadcast_tensor_dict(_spec_dict(group, x), spec=SPEC)["hidden"]
    ),
    "close": Call(_destroyed, STATE),
    "cpu_group": Call(lambda group, x: (x + 1, group.cpu_group.size())[0], STATE),
    "destroy": Call(_destroyed, STATE),
    "device_group": Call(lambda group, x: (x + 1, group.device_group.size())[0], STATE),
    "empty": Call(lambda group, x: group.empty([2, 3], torch.float32).fill_(2)),
    "explain": Call(lambda group, x: (x + 1, group.explain()), STATE),
    "first_global_rank": Call(lambda group, x: x + group.first_global_rank),
    "first_rank_in_group": Call(lambda group, x: x + group.first_rank_in_group),
    "from_process_group": Call(_given, STATE),
    "gather": Call(lambda group, x: group.gather(x, 1, 0)),
    "graph_capture": Call(_captured, STATE),
    "irecv": Call(_started, WAITING),
    "irecv_object": Call(_started_object, OBJECTS),
    "irecv_tensor_dict": Call(_broken_up, "with spec="),
    "is_first_rank": Call(lambda group, x: x + 1 if group.is_first_rank else x),
    "is_last_rank": Call(lambda group, x: x + 1 if group.is_last_rank else x),
    "isend": Call(_started, WAITING),
    "isend_object": Call(_started_object, OBJECTS),
    "isend_tensor_dict": Call(_broken_up, "with spec="),
    "last_global_rank": Call(lambda group, x: x + group.last_global_rank),
    "last_rank_in_group": Call(lambda group, x: x + group.last_rank_in_group),
    "make_sub_group": Call(_sub_group, STATE),
    "memory_stats": Call(lambda group, x: (x + 1, sorted(group.memory_stats())), STATE),
    "next_global_rank": Call(lambda group, x: x + group.next_global_rank),
    "next_rank_in_group": Call(lambda group, x: x + group.next_rank_in_group),
    "ranks": Call(lambda group, x: x + group.ranks[-1]),
    "prev_global_rank": Call(lambda group, x: x + group.prev_global_rank),
    "prev_rank_in_group": Call(lambda group, x: x + group.prev_rank_in_group),
    "recv": Call(_to_second(lambda g, x: g.send(x * 2), lambda g, x: g.recv(list(x.shape), x.dtype))),
    "recv_object": Call(_to_second(lambda g, x: g.send_object([x, 1]), lambda g, x: g.recv_object()), OBJECTS),
    "recv_tensor_dict": Call(
        _to_second(lambda g, x: g.send_tensor_dict({"x": x * 2, "n": 1}), lambda g, x: g.recv_tensor_dict()), DICTS
    ),
    "recv_tensor_dict(spec)": Call(
        _to_second(
            lambda g, x: g.send_tensor_dict(_spec_dict(g, x), spec=SPEC), lambda g, x: g.recv_tensor_dict(spec=SPEC)
        )
    ),
    "reduce_scatter": Call(lambda group, x: group.reduce_scatter(x, 0)),
    "reduce_scatter_tensor": Call(lambda group, x: group.reduce_scatter_tensor(torch.empty(2, 6), x)),
    "reduce_scatter_async": Call(lambda group, x: group.reduce_scatter_async(x, 0).wait(), WAITING),
    "reduce_scatterv": Call(lambda group, x: group.reduce_scatterv(x, 0, [3, 1])),
    "resume": Call(lambda group, x: (x + 1, group.resume())[0], STATE),
    "scatter": Call(lambda group, x: group.scatter(x if group.is_first_rank else None), "size"),
    "scatter(size)": Call(
        lambda group, x: group.scatter(x if group.is_first_rank else None, size=[2, 6], dtype=torch.float32)
    ),
    "send": Call(_to_second(lambda g, x: g.send(x * 2), lambda g, x: g.recv(list(x.shape), x.dtype))),
    "send_object": Call(_to_second(lambda g, x: g.send_object([x, 1]), lambda g, x: g.recv_object()), OBJECTS),
    "send_tensor_dict": Call(
        _to_second(lambda g, x: g.send_tensor_dict({"x": x * 2, "n": 1}), lambda g, x: g.recv_tensor_dict()), DICTS
    ),
    "size": Call(lambda group, x: x + group.size),
    "split": Call(lambda group, x: group.split(x, 0) + 1),
    "suspend": Call(lambda group, x: (x + 1, group.suspend(), group.resume())[0], STATE),
    "supports_process_group": Call(lambda group, x: x + 1 if group.supports_process_group else x),
    "timeout": Call(lambda group, x: (x + 1, group.timeout), STATE),
    "traffic": Call(lambda group, x: (x + 1, sorted(group.traffic())), STATE),
    "window": Call(lambda group, x: (x + 1, group.window([2]))[0], STATE),
    "within": Call(_within, STATE),
}


def _public(of: type) -> set[str]:
    names = {name for name in dir(of) if not name.startswith("_")}
    return {name for name in names if type(inspect.getattr_static(of, name)).__name__ != "_Renamed"}


def test_every_public_method_has_a_row() -> None:
    assert {name.split("(")[0] for name in CALLS} == _public(Group)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    return one == other


def _check(
    use: Callable[[Group, Tensor], Any], advice: str | None, names: set[str], group: Group, backend: str
) -> str | None:
    x = torch.arange(24.0).view(4, 6) + group.rank_in_group
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected = use(group, x)
    # A new function, because the cache would serve another's; an op beside the call, so that every branch has one.
    whole = torch.compile(lambda group, x: (use(group, x), x + 1), backend=backend, fullgraph=True)
    if advice is None:
        for _ in range(2):
            if not _same(expected, found := whole(group, x)[0]):
                return f"compiled whole it gives {found}, eagerly {expected}"
        return None
    broken = torch.compile(use, backend=backend)
    for _ in range(2):
        if not _same(expected, found := broken(group, x)):
            return f"with breaks it gives {found}, eagerly {expected}"
        breaks = torch._dynamo.utils.counters["graph_break"]
        if unmarked := [text for text in breaks if "runs on the host" not in text]:
            return f"it breaks the graph elsewhere: {unmarked}"
    try:
        whole(group, x)
    except torch._dynamo.exc.Unsupported as error:
        told = re.search(r"reason: (\w+) runs on the host: (.*)\)", str(error))
        if told is None or told[1] not in names or advice not in told[2]:
            return f"fullgraph must say {advice!r} of {names}, but: {error}"
        return None
    return "fullgraph compiled what the host does"


def _wrong_of(rows: Mapping[str, Call], group: Group, backend: str) -> dict[str, str]:
    wrong = {}
    for name, (use, advice) in rows.items():
        method = name.split("(")[0]
        try:
            told = _check(use, advice, {method, PARTNERS.get(method, method)}, group, backend)
        except Exception as error:
            told = f"{type(error).__name__}: {str(error)[:500]}"
        if told is not None:
            wrong[name] = told
        if group.all_sum(1) != 2:
            wrong[name] = "the next call gives something else"
    return wrong


def _methods_body(transport: str, backend: str, names: Sequence[str]) -> dict[str, str]:
    off = "off" if transport == "connections" else None
    with environment(PARALLEL_STATE_SHARED_MEMORY=off, PARALLEL_STATE_TIMEOUT_S="20"), world(2):
        return _wrong_of({name: CALLS[name] for name in names}, ps.get_tp_group(), backend)


HOST_CALLS = [name for name, call in CALLS.items() if call.advice is not None]


@pytest.mark.parametrize(
    ("backend", "transport", "names"),
    [
        ("eager", "shared_memory", list(CALLS)),
        pytest.param("eager", "connections", HOST_CALLS, marks=pytest.mark.long),
        ("aot_eager", "connections", THIN),
        ("inductor", "shared_memory", THIN[:3]),
    ],
)
def test_methods_compile_whole_or_break_cleanly(
    pools: Callable[[int], WorkerPool], backend: str, transport: str, names: Sequence[str]
) -> None:
    for wrong in pools(2).run(_methods_body, transport, backend, names, timeout_s=300):
        assert not wrong, "\n".join(f"{name}: {told}" for name, told in wrong.items())


def test_what_ends_the_group_or_waits_is_the_hosts() -> None:
    for function in (
        ps.cleanup_dist_env_and_memory, ps.create_parallel_groups, ps.destroy_distributed_environment,
        ps.destroy_model_parallel, ps.ensure_model_parallel_initialized, ps.graph_capture,
        ps.init_distributed_environment, ps.init_world_group, ps.initialize_model_parallel, ps.launch, ps.reinitialize,
        ps.set_custom_all_reduce, ps.simulated_group, ps.write_record, ps.ParallelGroups.close,
    ):  # fmt: skip
        assert function._torchdynamo_disable, function
    for of in (Handle, ps.TensorHandle, ps.SendHandle, ps.ReceiveHandle):
        for name in _public(of):
            member = inspect.getattr_static(of, name)
            function = member.fget if isinstance(member, property) else member
            assert function._torchdynamo_disable, (of, name)


def _first_alone(group: Group, x: Tensor) -> Tensor:
    with ps.master_first():
        y = x + 1
    with ps.local_master_first():
        return y * 2


def _new_group(group: Group, x: Tensor) -> Tensor:
    made = ps.init_model_parallel_group([[0, 1]], 0, "gloo", group_name="made")
    y = made.broadcast_object(x)
    made.destroy()
    return y


def _simulated(group: Group, x: Tensor) -> Tensor:
    with ps.simulate(0, 8, tensor_model_parallel_size=8).use():
        return ps.get_tp_group().all_reduce(x)


def _file(group: Group, x: Tensor) -> tuple[Tensor, io.BytesIO]:
    return x + 1, ps.read_file_dist(__file__)


FUNCTIONS: dict[str, Call] = {
    "broadcast_tensor_dict": Call(lambda group, x: ps.broadcast_tensor_dict(_dict(group, x)), DICTS),
    "divide": Call(lambda group, x: x + ps.divide(4, 2)),
    "get_device_mesh": Call(lambda group, x: (x + 1, ps.get_device_mesh().shape), STATE),
    "in_the_same_node_as": Call(lambda group, x: (x + 1, ps.in_the_same_node_as(group)), STATE),
    "init_model_parallel_group": Call(_new_group, STATE),
    "is_rank_in_embedding_group": Call(lambda group, x: x + ps.is_rank_in_embedding_group(), STATE),
    "master_first": Call(_first_alone, STATE),
    "read_file_dist": Call(_file, STATE),
    "set_random_seed": Call(lambda group, x: (ps.set_random_seed(3), x + 1)[1], STATE),
    "simulate": Call(_simulated, STATE),
    "split_tensor_along_last_dim": Call(lambda group, x: ps.split_tensor_along_last_dim(x, 2)),
}


def _takes_nothing(function: Callable[..., Any]) -> bool:
    return all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in inspect.signature(function).parameters.values()
    )


def _functions_body() -> dict[str, str]:
    with world(2):
        group = ps.get_tp_group()
        facts = [
            getattr(ps, name)
            for name in ps.__all__
            if name.startswith(("get_", "try_get_", "is_", "model_parallel_"))
            and not hasattr(getattr(ps, name), "_torchdynamo_disable")
            and not name.endswith("_gloo")
            and _takes_nothing(getattr(ps, name))
        ]
        known = []
        for fact in facts:
            with contextlib.suppress(ps.ParallelStateError):
                known.append((fact, fact()))

        def all_facts(group: Group, x: Tensor) -> Any:
            return x + 1, [fact() for fact, _ in known]

        return _wrong_of({**FUNCTIONS, "facts": Call(all_facts)}, group, "eager") | (
            {} if len(known) > 100 else {"facts": str(len(known))}
        )


def test_functions_compile_whole_or_break_cleanly(pools: Callable[[int], WorkerPool]) -> None:
    for wrong in pools(2).run(_functions_body, timeout_s=300):
        assert not wrong, "\n".join(f"{name}: {told}" for name, told in wrong.items())


def _given_up_body() -> None:
    """Calls an op's Python kernel in a function that dynamo doesn't trace, while dynamo's frame hook is still set."""
    with environment(PARALLEL_STATE_SHARED_MEMORY="off"), world(2):
        token, key = op_arguments(ps.get_tp_group())

        @torch.compiler.disable(recursive=False)
        def given_up(x: Tensor) -> Tensor:
            return torch.ops.parallel_state.all_reduce(x, token, "sum", key)

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        seen: list[str] = []

        def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            seen.append(graph.code)
            return graph.forward

        compiled = torch.compile(lambda x: given_up(x + 1) * 2, backend=look)
        assert compiled(torch.ones(3)).tolist() == [8.0] * 3
        assert len(seen) == 2, seen
        breaks = [text for text in torch._dynamo.utils.counters["graph_break"] if "given_up" not in text]
        assert not breaks, breaks


def test_kernels_in_python_are_not_traced(pools: Callable[[int], WorkerPool]) -> None:
    pools(2).run(_given_up_body, timeout_s=120)


def test_marks_are_those_of_torch() -> None:
    reason = "made runs on the host: another way"

    def made(x: Tensor) -> Tensor:
        return x * 2

    theirs = torch.compiler.disable(lambda x: made(x), reason=reason)
    ours = host_call("another way")(made)
    names = ("_torchdynamo_disable", "_torchdynamo_disable_msg", "_torchdynamo_disable_recursive")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert ours is made, "the function must not be wrapped"
