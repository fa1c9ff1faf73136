"""The demo: all-MiniLM-L6-v2, real weights, as a small tensor- and pipeline-parallel engine on `parallel_state`.

    make demo                                                 TP 2 x PP 2 over this repository's README
    python benchmarks/inference.py --input notes.md --query "what happens when a process dies?"
    torchrun --nproc-per-node 4 benchmarks/inference.py       the same, started by torchrun

The driver (global rank 0) cuts a text into sentences, embeds them and the query on all ranks, prints the best matches,
and checks every embedding against the unsharded model on one process. The exit code is 1 if they differ.

How a batch travels:

    driver       dp.broadcast_tensor_dict                   first rank of each replica
    first rank   tp.broadcast_tensor_dict                   first stage
    stage        pp.send_tensor_dict(all_gather_group=tp)   next stage; tp.all_reduce inside (minilm.py)
    last stage   world.send_tensor_dict                     driver

With `--device cuda` ranks may share a GPU where there are fewer, `--cuda-graph` captures each stage once for each shape
of batch (`inference_graphs.py`), also of compiled layers. Neither has been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
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
    init_distributed_environment,
    initialize_model_parallel,
    is_rank_zero,
    launch,
)
from parallel_state.startup import environment

try:
    import inference_report
    import minilm
    from inference_graphs import TOKENS, StageGraphs
    from inference_report import Place
    from measure.devices import share_gpus
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
except ModuleNotFoundError as error:
    sys.exit(f"The demo needs {error.name!r}, which is not installed: pip install 'parallel-state[demo]'")

README = Path(__file__).resolve().parent.parent / "README.md"
TOLERANCE = 1e-5  # fp32; another order of summing gives some 1e-7
RUN_TIMEOUT_S = 1800

Batch = dict[str, Tensor]


# ---- the engine: every rank ------------------------------------------------------------------------------------------


class Engine:
    """One rank of the engine: every rank makes one, and calls the same methods in the same order.

    Batches come from the driver and embeddings return to it; the other ranks pass and get None.
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
        """Captures what the driver's batches need."""
        if self.graphs is not None:
            shapes = sorted({tuple(batch["token_ids"].shape) for batch in batches or ()})
            self.graphs.capture([tuple(shape) for shape in self.world.broadcast_object(shapes)])

    def close(self) -> None:
        """Before the groups end."""
        if self.graphs is not None:
            self.graphs.close()

    @torch.inference_mode()
    def encode(self, batches: list[Batch] | None, progress: Callable[[int], None] | None = None) -> Tensor | None:
        """Embeddings [texts, hidden] of the driver's batches, in the texts' order; replicas take batches in turn.

        `progress` is called on the driver with the number of texts that went into the pipelines.
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
        """One batch through this rank's stage; its output on the last stage.

        A stage that has sent turns to the next batch while the next stage computes: all stages work at the same time.
        """
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
        """From the last stage of each replica to the driver, which puts the rows in order."""
        share = {name: torch.cat([output[name] for output in outputs]) for name in (outputs[0] if outputs else ())}
        if not self.is_driver:
            if share and self.tp.is_first_rank:
                self.world.send_tensor_dict(share, dst=0)
            return None
        replicas = range(min(count, self.dp.world_size))  # with fewer batches than replicas, some had none
        sources = [self.places.index(Place(self.pp.world_size - 1, replica, 0)) for replica in replicas]
        shares = [share if source == 0 else self.world.recv_tensor_dict(src=source) for source in sources]
        order = torch.cat([share["indices"] for share in shares]).argsort()
        return torch.cat([share["embeddings"] for share in shares])[order].cpu()

    def survey(self) -> list[dict[str, Any]]:
        """Of every rank: axis -> its group's ranks, route, and traffic so far as `{operation: [calls, bytes]}`."""
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
    """The whole life of one rank; False on the driver if the sharded model's answer is wrong, else True."""
    on_gpu = options.device == "cuda"
    sharing = share_gpus() if on_gpu else ""
    init_distributed_environment(backend="nccl" if on_gpu else "gloo")
    initialize_model_parallel(options.tp, options.pp, warm_up=on_gpu)
    engine = Engine(options.compile, options.cuda_graph, sharing)
    driver = Driver(engine, options) if engine.is_driver else None
    routes = engine.survey()
    if driver:
        driver.show_layout()
        inference_report.show_routes(driver.console, routes)
    engine.prepare(driver.batches if driver else None)
    engine.encode(driver.batches[-engine.dp.world_size :] if driver else None)  # warms up, and compiles
    engine.world.barrier()
    embeddings = driver.encode() if driver else engine.encode(None)
    traffic = engine.survey()
    engine.close()
    destroy_model_parallel()
    destroy_distributed_environment()
    if driver is None:
        return True
    inference_report.show_traffic(driver.console, traffic)
    driver.show_matches(embeddings)
    return driver.check(embeddings)


# ---- the driver: text in, report out ---------------------------------------------------------------------------------


class Driver:
    """Rank 0's part: the text, the timing, the report and the check."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine = engine
        self.options = options
        self.console = Console(highlight=False)
        self.texts = [*options.sentences, options.query]
        multiple = TOKENS if options.cuda_graph else 1
        self.batches = minilm.make_batches(self.texts, options.batch_size, engine.world.device, multiple)

    def encode(self) -> Tensor:
        """All embeddings, under a progress bar where there is a terminal."""
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

    def show_layout(self) -> None:
        engine = self.engine
        stages, replicas, ranks = engine.pp.world_size, engine.dp.world_size, engine.world.world_size
        how = f"{ranks} process{'' if ranks == 1 else 'es'} on {engine.world.device.type}"
        how += f" ({engine.sharing})" if engine.sharing else ""
        how += ", layers compiled" * self.options.compile + ", stages in CUDA graphs" * self.options.cuda_graph
        title = f"[bold]TP {engine.tp.world_size} x PP {stages} x DP {replicas}[/]: {how}"
        inference_report.show_layout(self.console, title, engine.places)

    def show_matches(self, embeddings: Tensor) -> None:
        """The sentences next to the query; the dot product is the cosine, as embeddings have length 1."""
        scores = embeddings[:-1] @ embeddings[-1]
        best = scores.topk(min(self.options.top, len(scores)))
        table = Table.grid(padding=(0, 2))
        for score, index in zip(best.values, best.indices, strict=True):
            table.add_row(f"  {score:.3f}", escape(self.texts[index]))
        self.console.print(f'[bold]best matches[/] of "{escape(self.options.query)}"', table, "", sep="\n")

    def check(self, embeddings: Tensor) -> bool:
        """Whether the plain model, alone on this process, gives the same embeddings."""
        model, expected = minilm.PlainModel(), torch.empty_like(embeddings)
        model(self.batches[-1]["token_ids"].cpu())  # warms up, as the engine did
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


# ---- the command line ------------------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """The arguments, checked, and the text's `sentences`; leaves with a message and 2 where they can't be used."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--input", type=Path, default=README, help="text or Markdown to search (default: the README)")
    parser.add_argument("--query", default="what happens when a process dies?", help="what to look for")
    parser.add_argument("--top", type=int, default=5, help="how many matches to print")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size; divides the 12 heads")
    parser.add_argument("--pp", type=int, default=2, help="pipeline-parallel size; up to the 6 layers")
    parser.add_argument("--dp", type=int, help="replicas (default: 1, or what is left of torchrun's ranks)")
    parser.add_argument("--batch-size", type=int, default=16, help="most sentences in a batch")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True, dynamic=True) the layers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: not run on a GPU yet")
    parser.add_argument("--cuda-graph", action="store_true", help="capture each stage in CUDA graphs; with cuda only")
    options = parser.parse_args()
    problem = find_problem(options)
    if problem is not None:
        if is_rank_zero():
            parser.error(problem)
        sys.exit(2)
    return options


def find_problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, or None; fills in `dp` and `sentences`."""
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
    if options.device == "cuda" and not torch.cuda.device_count():  # is_available() would start CUDA: too early
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
        Console().show_cursor()  # which a progress bar hides, and a rank that was killed could not bring back
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
