"""Program: runs vLLM's CPU engine. Prints its tokens and times as a JSON line after `RESULT `. python
vllm_program.py FOLDER '{"tensor_parallel_size": 2}' [--rounds N] [--kill | --survivors FOLDER]. `--replicas
2` runs data-parallel engines; the tokens are in the prompts' order."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 16, 32


def engine(model: str, options: dict[str, Any]) -> Any:
    from vllm import LLM

    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256, "max_num_seqs": PROMPTS,
        "enforce_eager": True, "seed": 0,
        "gpu_memory_utilization": 0.12, "num_gpu_blocks_override": 64,
    }  # fmt: skip
    return LLM(model=model, **{**defaults, **options})


def generate(llm: Any, prompts: int, tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    rank, size = (
        int(os.environ.get(name, default)) for name, default in (("VLLM_DP_RANK", "0"), ("VLLM_DP_SIZE", "1"))
    )
    asked = [
        {"prompt_token_ids": [(37 * row + 11 * place) % 255 for place in range(PROMPT_TOKENS)]}
        for row in range(prompts)[prompts * rank // size : prompts * (rank + 1) // size]
    ]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return [list(each.outputs[0].token_ids) for each in llm.generate(asked, sampling, use_tqdm=False)]


def traffic(worker: Any) -> dict[str, dict[str, int]]:
    from vllm.distributed import parallel_state

    groups = {name: getattr(parallel_state, f"_{name.upper()}") for name in ("tp", "pp", "dp", "ep")}
    communicators = {name: getattr(each, "device_communicator", None) for name, each in groups.items()}
    return {
        name: {operation: found.calls for operation, found in each.group.traffic().items()}
        for name, each in communicators.items()
        if hasattr(each, "group")
    }


def wait_for_the_dead(worker: Any, folder: str) -> None:
    """Kills the last rank while others wait. Runs in the workers. FOLDER/RANK.json has the time and error of a
    wait, or the time of the exit."""
    import json
    import os
    import signal
    import time
    from pathlib import Path

    import torch
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group

    rank = get_world_group().rank
    if rank == get_world_group().world_size - 1:
        time.sleep(0.5)
        Path(folder, f"{rank}.json").write_text(json.dumps([time.time(), ""]), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if rank == 0:
            get_pp_group().device_communicator.recv(torch.Size([3]), torch.float32, 1)
        else:
            get_tp_group().all_reduce(torch.ones(3))
        error = ""
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    Path(folder, f"{rank}.json").write_text(json.dumps([time.time(), error]), encoding="utf-8")


def workers() -> list[int]:
    import psutil

    found = psutil.Process().children(recursive=True)
    return sorted(each.pid for each in found if "VLLM::Worker" in " ".join(each.cmdline()))


def print_of_replicas(count: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {
            "VLLM_DP_SIZE": count,
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": free.getsockname()[1],
        }
    replicas = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **{name: str(value) for name, value in variables.items()}, "VLLM_DP_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    results = []
    for each in replicas:
        output, _ = each.communicate()
        print(output, flush=True) if "RESULT " not in output else None
        results += [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if "RESULT " in line]
    if len(results) < count:
        sys.exit(f"of {count} replicas {len(results)} have a result")
    whole = {
        "tokens": [row for each in results for row in each["tokens"]],
        "traffic": [each["traffic"] for each in results],
    }
    print("RESULT " + json.dumps(whole), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("options", type=json.loads)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--survivors", default="")
    parser.add_argument("--replicas", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.replicas > 1 and "VLLM_DP_RANK" not in os.environ:
        print_of_replicas(arguments.replicas)
        return
    started = time.monotonic()
    llm = engine(arguments.model, arguments.options)
    result: dict[str, Any] = {"start_s": time.monotonic() - started, "tokens": generate(llm, PROMPTS, NEW_TOKENS)}
    rates, firsts = [], []
    for _ in range(arguments.rounds):
        began = time.monotonic()
        generate(llm, PROMPTS, NEW_TOKENS)
        rates.append(PROMPTS * NEW_TOKENS / (time.monotonic() - began))
        began = time.monotonic()
        generate(llm, 1, 1)
        firsts.append(1000 * (time.monotonic() - began))
    if rates:
        result |= {"tokens_per_s": statistics.median(rates), "first_token_ms": statistics.median(firsts)}
    result["traffic"] = llm.collective_rpc(traffic)
    if arguments.survivors:
        began = time.monotonic()
        try:
            llm.collective_rpc(wait_for_the_dead, args=(arguments.survivors,))
            generate(llm, 1, 1)
            result["error"] = ""
        except Exception as error:
            result |= {"error": f"{type(error).__name__}: {error}", "told_s": time.monotonic() - began}
    if arguments.kill:
        victim = workers()[-1]
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        try:
            generate(llm, PROMPTS, 200)
            result["error"] = ""
        except Exception as error:
            result |= {"error": f"{type(error).__name__}: {error}", "told_s": time.monotonic() - began}
        result["victim"] = victim
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
