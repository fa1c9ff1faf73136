"""Program: Megatron-core's layers, model, data parallelism, optimizer and pipeline in two ranks on the CPU.
python megatron_layers.py stock|ours FOLDER [CASE …] writes FOLDER/CASE.RANK.pt, {what: tensor}, or
CASE.RANK.txt, the error."""

from __future__ import annotations

import copy
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HIDDEN, VOCABULARY, SEQUENCE, BATCH = 32, 64, 16, 2
Found = dict[str, Tensor]


def main(which: str, folder: Path, names: list[str]) -> None:
    if which == "ours":
        from parallel_state.compat import megatron

        megatron.install()
    stand_in_for_cuda()
    import megatron.core
    from megatron.core import optimizer, pipeline_parallel  # noqa: F401
    from megatron.core.models.gpt import GPTModel  # noqa: F401
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import torch_norm

    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    make = torch_norm.WrappedTorchNorm.__new__

    def norm(kind: type, config: Any, *sizes: Any, **options: Any) -> Any:
        alone = copy.copy(config)  # it refuses sequence parallelism, whose gradients DDP would complete
        alone.sequence_parallel = False
        return make(kind, alone, *sizes, **options)

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(norm)

    for name in names or CASES:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        children = [start(name, rank, port, folder) for rank in range(2)]
        for child in children:
            os.waitpid(child, 0)


def stand_in_for_cuda() -> None:
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    kind = Tensor.type
    Tensor.type = lambda x, *to, **more: (  # type: ignore[method-assign,assignment]
        kind(x, *to, **more) if to else kind(x).replace("torch.", "torch.cuda.")
    )


def on_cpu(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **options: Any) -> Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return function(*args, **options)

    return made


def start(name: str, rank: int, port: str, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }  # fmt: skip
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        torch.manual_seed(1234)
        torch.save(CASES[name](), folder / f"{name}.{rank}.pt")
        dist.barrier()
    except BaseException:
        (folder / f"{name}.{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(0)


def gradients(module: torch.nn.Module) -> Found:
    found = {name: getattr(each, "main_grad", each.grad) for name, each in module.named_parameters()}
    return {f"gradient of {name}": each.detach().clone() for name, each in found.items() if each is not None}


def layers(sequence_parallel: bool) -> Found:
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, use_cpu_initialization=True,
        params_dtype=torch.float32,
    )  # fmt: skip

    def init(weight: Tensor) -> Tensor:
        return torch.nn.init.normal_(weight, std=0.1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = tensor_parallel.VocabParallelEmbedding(
                VOCABULARY, HIDDEN, init_method=init, config=config, reduce_scatter_embeddings=sequence_parallel
            )
            self.up = tensor_parallel.ColumnParallelLinear(
                HIDDEN, 4 * HIDDEN, config=config, init_method=init, gather_output=False
            )
            self.down = tensor_parallel.RowParallelLinear(
                4 * HIDDEN, HIDDEN, config=config, init_method=init, bias=True, input_is_parallel=True,
                skip_bias_add=False,
            )  # fmt: skip
            self.head = tensor_parallel.ColumnParallelLinear(
                HIDDEN, VOCABULARY, config=config, init_method=init, bias=False, gather_output=False
            )

        def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embedding(tokens)
            x = x if sequence_parallel else x.transpose(0, 1).contiguous()
            y, _ = self.up(x)
            y, _ = self.down(torch.nn.functional.gelu(y))
            logits, _ = self.head(x + y)
            losses = tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels.transpose(0, 1).contiguous())
            return losses.mean(), logits

    model = Model()
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    found: Found = {}
    for step in range(2):
        model.zero_grad()
        loss, logits = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        found |= {f"loss {step}": loss.detach(), f"logits {step}": logits.detach()}
        found |= {f"{name} in step {step}": each for name, each in gradients(model).items()}
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.1 * each.grad
    return found


def gpt(tp: int = 1, pp: int = 1, sequence_parallel: bool = False) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        sequence_parallel=sequence_parallel, pipeline_dtype=torch.float32, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    return GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE, share_embeddings_and_output_weights=pp == 1,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    return tokens, torch.arange(SEQUENCE).expand(BATCH, -1), torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5


def gpt_tensor_parallel(sequence_parallel: bool) -> Found:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = gpt(tp=2, sequence_parallel=sequence_parallel)
    tokens, positions, mask = batch(7)
    losses = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
    losses.mean().backward()
    return {"losses": losses.detach(), **gradients(model)}


def data_parallel(distributed_optimizer: bool) -> Found:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel_state.initialize_model_parallel()
    inner = gpt()
    model = DistributedDataParallel(
        inner.config,
        DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=True),
        inner,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=0.01, use_distributed_optimizer=distributed_optimizer, bf16=False, fp16=False,
            params_dtype=torch.float32, clip_grad=1.0,
        ),
        [model],
    )  # fmt: skip
    found: Found = {}
    for step in range(3):
        tokens, positions, mask = batch(10 * step + dist.get_rank())
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
        losses.mean().backward()
        model.finish_grad_sync()
        found |= {f"losses {step}": losses.detach()}
        found |= {f"{name} in step {step}": each for name, each in gradients(inner).items()}
        _, norm, _ = optimizer.step()
        found[f"norm {step}"] = torch.tensor(float(norm))
    return found | {f"weight {name}": each.detach().clone() for name, each in inner.named_parameters()}


def pipeline() -> Found:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = gpt(pp=2)

    def forward(batches: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        tokens, positions, mask = next(batches)
        output = model(tokens, positions, mask, labels=tokens.roll(-1, 1))

        def loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return losses.mean(), {"loss": losses.mean().detach()}

        return output, loss

    losses = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter([batch(seed) for seed in range(4)]), model=model,
        num_microbatches=4, seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=False,
    )  # fmt: skip
    found = {f"loss {at}": each["loss"] for at, each in enumerate(losses)}
    return {**found, **gradients(model)}


def collection() -> Found:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    made = [ProcessGroupCollection.use_mpu_process_groups()]
    if hasattr(parallel_state, "process_group_collection"):
        made.append(parallel_state.process_group_collection())
    found = [
        {
            name: torch.tensor(dist.get_process_group_ranks(group))
            for name, group in vars(each).items()
            if group is not None
        }
        for each in made
    ]
    if any(each.keys() != found[0].keys() for each in found):
        raise ValueError([sorted(each) for each in found])
    return {name: tensor for each in found for name, tensor in each.items()}


CASES: dict[str, Callable[[], Found]] = {
    "layers": lambda: layers(False),
    "layers with sequence parallelism": lambda: layers(True),
    "GPT": lambda: gpt_tensor_parallel(False),
    "GPT with sequence parallelism": lambda: gpt_tensor_parallel(True),
    "data parallelism": lambda: data_parallel(False),
    "distributed optimizer": lambda: data_parallel(True),
    "pipeline": pipeline,
    "collection": collection,
}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
