"""A run of vLLM's CPU engine, in a process of its own: its tokens and times as one line of JSON, after `RESULT `.

    python tests/engines/vllm_program.py FOLDER '{"tensor_parallel_size": 2}' [--rounds N] [--kill]

The engine is stock, or on this project where PARALLEL_STATE_PLUGIN=vllm; nothing here tells the two apart.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
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

    asked = [
        {"prompt_token_ids": [(37 * row + 11 * place) % 255 for place in range(PROMPT_TOKENS)]}
        for row in range(prompts)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return [list(each.outputs[0].token_ids) for each in llm.generate(asked, sampling, use_tqdm=False)]


def workers() -> list[int]:
    """Returns the pids of the engine's workers, in the order of their ranks: they come one after the other."""
    import psutil

    found = psutil.Process().children(recursive=True)
    return sorted(each.pid for each in found if "VLLM::Worker" in " ".join(each.cmdline()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("options", type=json.loads)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--kill", action="store_true")
    arguments = parser.parse_args()
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
