"""Runs the model all-MiniLM-L6-v2 with real weights, tensor- and pipeline-parallel, on `parallel_state`.

    make demo                                                 TP 2 x PP 2 over this repository's README
    python benchmarks/inference/demo.py --input notes.md --query "what happens when a process dies?"

The driver (global rank 0) cuts a text into sentences, embeds them and the query on all ranks, prints the best matches,
and compares every embedding with the unsharded model's. The exit code is 1 if they differ.

How a batch travels:

    driver       dp.broadcast_tensor_dict                   first rank of each replica
    first rank   tp.broadcast_tensor_dict                   first stage
    stage        pp.send_tensor_dict(all_gather_group=tp)   next stage; tp.all_reduce inside (minilm.py)
    last stage   world.send_tensor_dict                     driver

With `--device cuda` ranks share GPUs if there are fewer than ranks. `--cuda-graph` captures each stage once per shape
of batch; with compiled layers this hasn't run on a GPU yet.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import minilm
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from parallel_state import (
    LaunchError,
    SettingError,
    destroy_distributed_environment,
    destroy_model_parallel,
    get_dp_group,
    get_pp_group,
    get_tp_group,
    get_world_group,
    graph_capture,
    init_distributed_environment,
    initialize_model_parallel,
    is_rank_zero,
    launch,
)
from parallel_state.startup import environment
from parallel_state.tools.bench.devices import Captured, captured

try:
    import minilm
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    from parallel_state.tools.bench.devices import share_gpus
except ModuleNotFoundError as error:
    sys.exit(f"The demo needs {error.name!r}, which is not installed: pip install 'parallel-state[demo]'")

README = Path(__file__).resolve().parents[2] / "README.md"
TOLERANCE = 1e-5  # fp32; another order of summing gives some 1e-7
RUN_TIMEOUT_S = 1800

Batch = dict[str, Tensor]


class Engine:
    """A model that is divided over all ranks. Every rank makes an engine and calls the same methods in the same order.
    Only the driver, global rank 0, passes batches and gets embeddings.
    """

    def __init__(self, compiled: bool, in_graphs: bool = False, sharing: str = "") -> None:
        self.sharing = sharing
        self.world, self.tp, self.pp, self.dp = get_world_group(), get_tp_group(), get_pp_group(), get_dp_group()
        self.is_driver = self.world.is_first_rank
        self.is_feeder = self.pp.is_first_rank and self.tp.is_first_rank
        place = [self.pp.rank_in_group, self.dp.rank_in_group, self.tp.rank_in_group]
        self.places = [Place(*other) for other in self.world.all_gather_object(place)]
        self.stage = minilm.Stage(self.pp.rank_in_group, self.pp.world_size, self.world.device)
        if compiled:
            self.stage.compile_layers()
        self.graphs = StageGraphs(self.stage) if in_graphs else None

    def prepare(self, batches: list[Batch] | None) -> None:
        if self.graphs is not None:
            shapes = sorted({tuple(batch["token_ids"].shape) for batch in batches or ()})
            self.graphs.capture([tuple(shape) for shape in self.world.broadcast_object(shapes)])

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()

    @torch.inference_mode()
    def encode(self, batches: list[Batch] | None, progress: Callable[[int], None] | None = None) -> Tensor | None:
        """Returns the embeddings [texts, hidden] of the driver's batches, in the texts' order; None on other ranks,
        which pass None. Replicas take batches in turn. On the driver, `progress` gets the number of texts that just
        entered the pipelines.
        """
        count = self.world.broadcast_object(len(batches) if self.is_driver else None)
        replica, replicas = self.dp.rank_in_group, self.dp.world_size
        if self.is_feeder:
            batches = [self.dp.broadcast_tensor_dict(batches[i] if self.is_driver else None) for i in range(count)]
        outputs = []
        for index in range(replica, count, replicas):
            output = self._step(batches[index] if self.is_feeder else None)
            if output is not None:
                outputs.append(output)
            if progress is not None:
                progress(sum(len(batch["indices"]) for batch in batches[index : index + replicas]))
        return self._collect(outputs, count)

    def _step(self, batch: Batch | None) -> Batch | None:
        if self.pp.is_first_rank:
            inputs = self.tp.broadcast_tensor_dict(batch)
        else:
            inputs = self.pp.recv_tensor_dict(all_gather_group=self.tp)
        output = self.stage(inputs) if self.graphs is None else self.graphs(inputs)
        if self.pp.is_last_rank:
            return output if self.graphs is None else {name: x.clone() for name, x in output.items()}
        self.pp.send_tensor_dict(output, all_gather_group=self.tp)
        return None

    def _collect(self, outputs: list[Batch], count: int) -> Tensor | None:
        share = {name: torch.cat([output[name] for output in outputs]) for name in (outputs[0] if outputs else ())}
        if not self.is_driver:
            if share and self.tp.is_first_rank:
                self.world.send_tensor_dict(share, dst=0)
            return None
        replicas = range(min(count, self.dp.world_size))
        sources = [self.places.index(Place(self.pp.world_size - 1, replica, 0)) for replica in replicas]
        shares = [share if source == 0 else self.world.recv_tensor_dict(src=source) for source in sources]
        order = torch.cat([share["indices"] for share in shares]).argsort()
        return torch.cat([share["embeddings"] for share in shares])[order].cpu()

    def survey(self) -> list[dict[str, Any]]:
        """Returns for every rank: axis -> its group's ranks, communicators, and traffic as `{operation: [calls,
        bytes]}`.
        """
        groups = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "world": self.world}
        facts = {
            axis: {
                "ranks": list(group.ranks),
                "route": group.explain(),
                "traffic": {operation: [t.calls, t.bytes] for operation, t in group.traffic().items()},
            }
            for axis, group in groups.items()
        }
        return self.world.all_gather_object(facts)


def run_rank(options: argparse.Namespace) -> bool:
    on_gpu = options.device == "cuda"
    sharing = share_gpus() if on_gpu else ""
    init_distributed_environment(backend="nccl" if on_gpu else "gloo")
    initialize_model_parallel(options.tp, options.pp, warm_up=on_gpu)
    engine = Engine(options.compile, options.cuda_graph, sharing)
    driver = Driver(engine, options) if engine.is_driver else None
    routes = engine.survey()
    if driver:
        driver.describe()
        show_routes(driver.console, routes)
    engine.prepare(driver.batches if driver else None)
    engine.encode(driver.batches[-engine.dp.world_size :] if driver else None)
    engine.world.barrier()
    embeddings = driver.encode() if driver else engine.encode(None)
    traffic = engine.survey()
    engine.close()
    destroy_model_parallel()
    destroy_distributed_environment()
    if driver is None:
        return True
    show_traffic(driver.console, traffic)
    driver.show_matches(embeddings)
    return driver.check(embeddings)


Shape = tuple[int, int]
TOKENS = 32


class StageGraphs:
    """Calls a pipeline stage through CUDA graphs, one for each shape of inputs. A result is overwritten by the next
    call with the same shape.
    """

    def __init__(self, stage: minilm.Stage) -> None:
        self._stage = stage
        self._graphs: dict[Shape, tuple[Batch, Captured]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self, shapes: Sequence[Shape]) -> None:
        with graph_capture() as capture:
            for shape in shapes:
                inputs = self._stage.example(*shape)
                self._stage(inputs)  # compiles, and starts what can't start within a capture
                self._graphs[shape] = inputs, captured(lambda inputs=inputs: self._stage(inputs), capture.stream)

    def __call__(self, inputs: Batch) -> Batch:
        texts, tokens = inputs["token_ids" if "token_ids" in inputs else "mask"].shape
        held, graph = self._graphs[texts, tokens]
        for name, x in held.items():
            x.copy_(inputs[name])
        return graph.replay()

    def close(self) -> None:
        self._graphs.clear()


class Driver:
    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine = engine
        self.options = options
        self.console = Console(highlight=False)
        self.texts = [*options.sentences, options.query]
        multiple = TOKENS if options.cuda_graph else 1
        self.batches = minilm.make_batches(self.texts, options.batch_size, engine.world.device, multiple)

    def encode(self) -> Tensor:
        columns = TextColumn("embedding"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
        texts, started = len(self.texts), time.perf_counter()
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            task = bar.add_task("", total=texts, rate="")

            def progress(count: int) -> None:
                bar.advance(task, count)
                rate = bar.tasks[0].completed / (time.perf_counter() - started)
                bar.update(task, rate=f"{rate:.0f} sentences/s")

            embeddings = self.engine.encode(self.batches, progress)
        elapsed = time.perf_counter() - started
        self.console.print(f"{texts} sentences in {elapsed:.2f} s: [bold]{texts / elapsed:.0f} sentences/s[/]\n")
        return embeddings

    def describe(self) -> None:
        engine = self.engine
        stages, replicas, ranks = engine.pp.world_size, engine.dp.world_size, engine.world.world_size
        how = f"{ranks} process{'' if ranks == 1 else 'es'} on {engine.world.device.type}"
        how += f" ({engine.sharing})" if engine.sharing else ""
        how += ", layers compiled" * self.options.compile + ", stages in CUDA graphs" * self.options.cuda_graph
        title = f"[bold]TP {engine.tp.world_size} x PP {stages} x DP {replicas}[/]: {how}"
        show_layout(self.console, title, engine.places)

    def show_matches(self, embeddings: Tensor) -> None:
        scores = embeddings[:-1] @ embeddings[-1]
        best = scores.topk(min(self.options.top, len(scores)))
        table = Table.grid(padding=(0, 2))
        for score, index in zip(best.values, best.indices, strict=True):
            table.add_row(f"  {score:.3f}", escape(self.texts[index]))
        self.console.print(f'[bold]best matches[/] of "{escape(self.options.query)}"', table, "", sep="\n")

    def check(self, embeddings: Tensor) -> bool:
        model, expected = minilm.PlainModel(), torch.empty_like(embeddings)
        model(self.batches[-1]["token_ids"].cpu())
        started = time.perf_counter()
        for batch in self.batches:
            expected[batch["indices"].cpu()] = model(batch["token_ids"].cpu())
        rate = len(self.texts) / (time.perf_counter() - started)
        difference = (embeddings - expected).abs().max().item()
        same = difference <= TOLERANCE
        self.console.print(f"unsharded model on one process: {rate:.0f} sentences/s")
        verdict = "[green]the same[/]" if same else "[red]NOT the same[/]"
        self.console.print(f"largest difference: [bold]{difference:.1e}[/] (limit {TOLERANCE:.0e}): {verdict}")
        return same


class Place(NamedTuple):
    stage: int
    replica: int
    shard: int


def show_layout(console: Console, title: str, places: Sequence[Place]) -> None:
    stages, replicas = (1 + max(place[axis] for place in places) for axis in (0, 1))
    console.print(title)
    table = Table("stage", *(f"replica {replica}" for replica in range(replicas)), box=None, header_style="dim")
    for stage in range(stages):
        ranks: list[list[int]] = [[] for _ in range(replicas)]
        for rank, place in enumerate(places):
            if place.stage == stage:
                ranks[place.replica].append(rank)
        table.add_row(f"{stage}: {minilm.describe_stage(stage, stages)}", *(f"ranks {escape(str(r))}" for r in ranks))
    console.print(table, "")


def show_routes(console: Console, survey: list[dict[str, Any]]) -> None:
    console.print("[bold]routes[/]")
    for axis in survey[0]:
        groups = defaultdict(list)
        for rank in survey:
            _, *route = rank[axis]["route"].splitlines()
            if rank[axis]["ranks"] not in groups["\n".join(route)]:
                groups["\n".join(route)].append(rank[axis]["ranks"])
        for route, members in groups.items():
            title = escape(f"{axis} {' '.join(map(str, members))}")
            console.print(f"{title}\n[dim]{escape(route)}[/]", soft_wrap=True)
    console.print()


def show_traffic(console: Console, survey: list[dict[str, Any]]) -> None:
    table = Table("group", "operation", "calls", "bytes", box=None, header_style="dim")
    table.columns[2].justify = table.columns[3].justify = "right"
    for axis in survey[0]:
        most: dict[tuple[str, str], tuple[int, int]] = {}
        for rank in survey:
            for operation, numbers in rank[axis]["traffic"].items():
                key = operation, str(rank[axis]["ranks"])
                most[key] = max(most.get(key, (0, 0)), tuple(numbers))
        rows = defaultdict(list)
        for (operation, ranks), numbers in most.items():
            rows[operation, numbers].append(ranks)
        for (operation, (calls, size)), groups in rows.items():
            table.add_row(escape(f"{axis} {' '.join(groups)}"), operation, f"{calls:,}", f"{size:,}")
    console.print("[bold]traffic[/] of one rank of each group, warm-up included", table, "", sep="\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--input", type=Path, default=README, help="text or Markdown to search (default: the README)")
    parser.add_argument("--query", default="what happens when a process dies?", help="what to look for")
    parser.add_argument("--top", type=int, default=5, help="how many matches to print")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size; divides the 12 heads")
    parser.add_argument("--pp", type=int, default=2, help="pipeline-parallel size; up to the 6 layers")
    parser.add_argument("--dp", type=int, help="replicas (default: 1, or what is left of torchrun's ranks)")
    parser.add_argument("--batch-size", type=int, default=16, help="most sentences in a batch")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True, dynamic=True) the layers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cuda-graph", action="store_true", help="capture each stage in CUDA graphs; with cuda only")
    options = parser.parse_args()
    problem = find_problem(options)
    if problem is not None:
        if is_rank_zero():
            parser.error(problem)
        sys.exit(2)
    return options


def find_problem(options: argparse.Namespace) -> str | None:
    config = minilm.load_config()
    for name in ("tp", "pp", "dp", "top", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            return f"--{name.replace('_', '-')} must be at least 1, but is {value}"
    if config.num_attention_heads % options.tp:
        return f"--tp must divide the model's {config.num_attention_heads} attention heads, but is {options.tp}"
    if options.pp > config.num_hidden_layers:
        return f"--pp must be at most {config.num_hidden_layers}, the model's layers, but is {options.pp}"
    started, model_ranks = environment.detect().world_size, options.tp * options.pp
    if started > 1 and (started % model_ranks or options.dp not in (None, started // model_ranks)):
        dp = f" x --dp {options.dp}" if options.dp is not None else ""
        return f"--tp {options.tp} x --pp {options.pp}{dp} doesn't fit the {started} ranks that were started"
    options.dp = options.dp or max(started // model_ranks, 1)
    if options.device == "cuda" and not torch.cuda.device_count():  # is_available() would start CUDA too early
        return "--device cuda: torch finds no GPU"
    if options.cuda_graph and options.device != "cuda":
        return "--cuda-graph needs --device cuda: the CPU has no graphs"
    try:
        options.sentences = minilm.split_sentences(options.input.read_text(encoding="utf-8"))
    except OSError as error:
        return f"--input {options.input}: {error.strerror}"
    except UnicodeDecodeError:
        return f"--input {options.input}: not UTF-8 text"
    if not options.sentences:
        return f"--input {options.input} has no sentence of three words or more"
    return None


def main() -> int:
    try:
        options = parse_options()
        if environment.detect().world_size > 1:
            same = run_rank(options)
        else:
            nproc = options.tp * options.pp * options.dp
            same = all(launch(run_rank, nproc=nproc, args=(options,), timeout=RUN_TIMEOUT_S))
    except KeyboardInterrupt:
        return 130
    except (LaunchError, SettingError) as error:  # the first holds the traceback of the rank that failed first
        sys.exit(str(error))
    finally:
        Console().show_cursor()  # a killed rank can't restore the cursor that its progress bar hid
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
