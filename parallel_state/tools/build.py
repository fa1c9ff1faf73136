"""`python -m parallel_state build`: compiles in advance what the first use would compile, for container images."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from parallel_state.tools.arguments import PROGRAM, command_parser


def main(arguments: Sequence[str] | None = None) -> int:
    command_parser(
        "build", "",
        "Compiles the native code for the installed torch into the user's cache, unless it is there:\n"
        "the shared-memory collectives with the ops, and the backend of torch.distributed.",
    ).parse_args(arguments)  # fmt: skip
    from device_communicators.base.build_cache import CacheError, about_cache
    from device_communicators.c10d import extension
    from device_communicators.cpu import native
    from device_communicators.cpu.native_build import BuildError

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    started = time.monotonic()
    try:
        recipes = [native.wanted_recipe(), extension.recipe()]
        found = native.find_or_compile(recipes)
    except (OSError, BuildError, CacheError) as error:
        print(f"{PROGRAM}: the native code can't be compiled: {about_cache(error)}", file=sys.stderr)
        return 1
    for recipe, (path, problem) in zip(recipes, found, strict=True):
        if path is None:
            print(f"{PROGRAM}: {recipe.what} can't be compiled: {problem}", file=sys.stderr)
        else:
            print(f"{recipe.what}: {path}")
    print(f"{time.monotonic() - started:.1f} s")
    return 0 if all(path is not None for path, _ in found) else 1
