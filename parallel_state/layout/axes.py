"""Lists the parallel axes, the groups that span several axes, and the preset orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

from device_communicators.base.errors import InvalidArgumentError, no_such_name

RankPicker = Callable[[list[int]], Sequence[int]]


@dataclass(frozen=True)
class Axis:
    """A kind of group, such as `tp`: an axis of the grid of ranks, or derived from other kinds.

    A derived kind combines the kinds `spans`, divides groups of the kind `within`, or has some ranks (such as
    the first and last) of each group of the kind `ends_of`. `about`: text for the docs. `experts`: True for axes of
    expert layers only.
    """

    name: str
    long_name: str
    about: str
    size_parameter: str | None = None
    """Argument of initialize_model_parallel for this axis's size. If None, the other sizes determine this size."""
    spans: tuple[str, ...] = ()
    within: str | None = None
    experts: bool = False
    cuts_sequence: bool = False
    """True if the ranks of a group hold parts of one sequence. Expert layers treat them as data-parallel."""
    ends_of: str | None = None
    always_made: bool = False
    """If False, initialize_model_parallel creates the groups only for a passed size other than 1."""


AXES = (
    Axis("tp", "tensor_model_parallel", "Splits the weights of a layer.", "tensor_model_parallel_size",
         always_made=True),
    Axis("cp", "context_parallel", "Splits the sequence, in training.", "context_parallel_size", cuts_sequence=True),
    Axis("pcp", "prefill_context_model_parallel", "Splits the sequence, in vLLM's prefill.",
         "prefill_context_model_parallel_size", cuts_sequence=True),
    Axis("dcp", "decode_context_model_parallel", "Splits the KV cache, in vLLM's decode: over pcp, then tp.",
         "decode_context_model_parallel_size", within="tp"),
    Axis("ep", "expert_model_parallel", "Splits the set of experts.", "expert_model_parallel_size", experts=True),
    Axis("etp", "expert_tensor_parallel", "Splits the weights of an expert.", "expert_tensor_parallel_size",
         experts=True),
    Axis("dp", "data_parallel", "Splits the batch.", "data_parallel_size", spans=("dp_shard", "dp_replicate"),
         always_made=True),
    Axis("dp_shard", "data_parallel_shard", "Data-parallel ranks that hold one copy of the weights, sharded.",
         "data_parallel_shard_size"),
    Axis("dp_replicate", "data_parallel_replicate", "Data-parallel ranks with equal shards, one per copy.",
         "data_parallel_replicate_size"),
    Axis("external_dp", "external_data_parallel", "Separate engines in one world, as vLLM's external DP.",
         "external_data_parallel_size"),
    Axis("pp", "pipeline_model_parallel", "Splits the layers into stages.", "pipeline_model_parallel_size",
         always_made=True),
    Axis("efsdp", "expert_data_parallel_shard", "Ranks that hold one copy of the same experts, sharded.",
         experts=True),
    Axis("edp", "expert_data_parallel", "Ranks with the same experts.", spans=("efsdp", "dp_replicate")),
    Axis("model", "model_parallel", "Ranks that hold one copy of the weights.", spans=("tp", "pp")),
    Axis("dp_cp", "data_and_context_parallel", "Ranks that reduce the gradients of the dense layers.",
         spans=("dp", "cp")),
    Axis("fsdp", "fully_sharded_data_parallel", "Ranks that shard the dense layers: a data-parallel shard with its cp.",
         spans=("dp_shard", "cp")),
    Axis("tp_cp", "tensor_and_context_parallel", "Ranks of one stage with the same batch.", spans=("tp", "cp")),
    Axis("tp_dp", "tensor_and_data_parallel", "Ranks of one stage on the same part of the sequence.",
         spans=("tp", "dp")),
    Axis("tp_dp_cp", "tensor_data_and_context_parallel", "Ranks of one stage.", spans=("tp", "dp", "cp")),
    Axis("tp_ep", "expert_tensor_and_model_parallel", "Ranks that hold one copy of the experts of a stage.",
         spans=("etp", "ep")),
    Axis("tp_ep_pp", "expert_tensor_model_pipeline_parallel", "Ranks that hold one copy of all experts.",
         spans=("etp", "ep", "pp")),
    Axis("replica", "model_replica", "Ranks that hold one copy of the weights, with all shards and sequence parts.",
         spans=("tp", "cp", "pcp", "dp_shard", "pp")),
    Axis("intra_dp_cp", "partial_data_and_context_parallel",
         "Ranks of one optimizer instance that reduce the gradients of the dense layers.", ends_of="dp_cp"),
    Axis("intra_edp", "partial_expert_data_parallel", "Ranks of one optimizer instance with the same experts.",
         within="edp"),
    Axis("intra_dist_opt", "intra_distributed_optimizer_instance", "Ranks of one optimizer instance.",
         spans=("tp_ep_pp", "intra_edp")),
    Axis("inter_dist_opt", "inter_distributed_optimizer_instance",
         "Ranks with equal shards of the optimizer, one in each instance.", "num_distributed_optimizer_instances",
         within="edp"),
    Axis("dp_intra_node", "intra_node_data_parallel", "Data-parallel ranks of one node.", within="dp"),
    Axis("dp_inter_node", "inter_node_data_parallel", "Data-parallel ranks in the same position of each node.",
         within="dp"),
    Axis("embedding", "embedding", "First and last stage, which share the word embedding.", ends_of="pp"),
    Axis("position_embedding", "position_embedding", "The first stage, which has the position embedding.",
         ends_of="pp"),
)  # fmt: skip

BY_NAME = {axis.name: axis for axis in AXES}
BY_PARAMETER = {axis.size_parameter: axis for axis in AXES if axis.size_parameter is not None}


@dataclass(frozen=True)
class Preset:
    order: str
    """Axes joined by `-`, fastest-varying first. `dp` stands for `dp_shard-dp_replicate`."""
    about: str
    spans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Group name -> axes, for groups that span other axes in this preset than in AXES."""
    defaults: Mapping[str, int] = field(default_factory=dict)


PRESETS = {
    "megatron": Preset("tp-cp-ep-dp-pp", "Megatron-core's default, dense and expert layers"),
    "vllm": Preset(
        "tp-pcp-pp-dp-external_dp",
        "vLLM's ExternalDP × DP × PP × PCP × TP (slow to fast), with DCP within TP and EP = DP · PCP · TP",
        spans={"ep": ("tp", "pcp", "dp")},
    ),
    "torchtitan": Preset(
        "tp-cp-ep-dp_shard-dp_replicate-pp",
        "torchtitan's pp, dp_replicate, dp_shard, cp, tp (slow to fast), with ep and efsdp in dp_shard · cp · tp",
        defaults={"etp": 1},
    ),
}

DEFAULT_ORDER = PRESETS["megatron"].order


def embedding_ranks(pipeline: list[int]) -> list[int]:
    return [pipeline[0], pipeline[-1]]


def position_embedding_ranks(pipeline: list[int]) -> list[int]:
    return [pipeline[0]]


def named_sizes(tp: int | None, pp: int | None, dp: int | None, others: Mapping[str, Any]) -> dict[str, int | None]:
    placed = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "data_parallel_size": dp}
    return {name: size for name, size in [*placed.items(), *others.items()] if size is not None}


_Function = TypeVar("_Function", bound=Callable[..., object])


def other_sizes_by_name(function: _Function, also: Callable[..., object] | None = None) -> _Function:
    """Wraps `function` to raise InvalidArgumentError for unknown keywords, and for positional sizes after tp and pp.

    Megatron and vLLM pass different sizes in these positions. Parameters of the function `also` are valid keywords,
    too.
    """
    kinds = [each.kind for each in signature(function).parameters.values()]
    places = kinds.count(Parameter.POSITIONAL_OR_KEYWORD)
    known = {*signature(function).parameters, *signature(also or function).parameters, *BY_NAME, *BY_PARAMETER}

    @wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        if len(args) > places:
            more = args[places:]
            vllm = zip(
                ("prefill_context_model_parallel_size", "decode_context_model_parallel_size"), more, strict=False
            )
            raise InvalidArgumentError(
                f"{function.__name__}() takes only the tensor- and pipeline-parallel sizes by position, but got "
                f"{', '.join(map(repr, more))} after them; pass these by name. In Megatron this is "
                f"virtual_pipeline_model_parallel_size={more[0]!r}, in vLLM "
                f"{', '.join(f'{name}={value!r}' for name, value in vllm)}; or do you mean "
                f"data_parallel_size={more[0]!r}?"
            )
        if unknown := next((name for name in kwargs if name not in known), None):
            problem = no_such_name(f"{function.__name__}() has no argument", unknown, known)
            sizes = "" if problem.endswith("?") else f"; the sizes of axes are {', '.join(BY_PARAMETER)}"
            raise InvalidArgumentError(problem + sizes)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def by_axis(sizes: Mapping[str, int | None]) -> dict[str, int | None]:
    if not isinstance(sizes, Mapping):
        raise InvalidArgumentError(f"the sizes must map axes to numbers of ranks, but are {sizes!r}")
    found: dict[str, int | None] = {}
    for name, size in sizes.items():
        axis = BY_PARAMETER.get(name) or BY_NAME.get(name)
        if axis is None or axis.size_parameter is None:
            raise InvalidArgumentError(
                f"there is no parallel size {name!r}; the sizes are "
                f"{', '.join(f'{row.size_parameter} ({row.name})' for row in BY_PARAMETER.values())}"
            )
        if axis.name in found:
            raise InvalidArgumentError(f"the size of axis {axis.name!r} is passed twice, once as {name!r}")
        found[axis.name] = size
    return found
