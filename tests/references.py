"""Fetches single files of other projects, from wheels. Tests compare with these files or compile with them.

`python tests/references.py` fetches the files that the cache lacks. Range requests fetch single files, because vLLM's
wheel alone has 336 MB. pip finds the wheels, so pip's configuration applies.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import urllib.request
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallel_state" / "references"
_DOWNLOAD_S = 30
CHUNK_BYTES = 1 << 18  # of a request; a wheel's table of contents, at its end, is 0.1 to 0.7 MB


@dataclass(frozen=True)
class Reference:
    project: str
    version: str
    path: str
    sha256: str = ""
    """The file's digest. Empty if `url` contains a commit, which determines the content."""
    url: str = ""
    """The URL of the folder that contains `path`. Empty for a file in a wheel."""

    @property
    def cached(self) -> Path:
        return CACHE / f"{self.project}-{self.version}" / self.path

    def is_cached(self) -> bool:
        if not self.cached.exists():
            return False
        return not self.sha256 or hashlib.sha256(self.cached.read_bytes()).hexdigest() == self.sha256

    def keep(self, content: bytes) -> None:
        """Writes the file to the cache. Raises LookupError if the file's digest differs."""
        found = hashlib.sha256(content).hexdigest()
        if self.sha256 and found != self.sha256:
            raise LookupError(f"{self.path} must have the digest {self.sha256}, but has {found}")
        self.cached.parent.mkdir(parents=True, exist_ok=True)
        part = self.cached.with_name(f"{self.cached.name}.{os.getpid()}")
        part.write_bytes(content)
        part.replace(self.cached)

    def path_in_cache(self) -> Path:
        """Returns the file's path. If the cache lacks the file, skips the test; in CI, fails the test."""
        if not self.is_cached():
            reason = f"{self.project} {self.version} isn't in {CACHE}; python tests/references.py fetches it"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
        return self.cached

    def read(self) -> str:
        return self.path_in_cache().read_text()

    def cut(self, *names: str, strip_decorators: bool = False) -> CodeType:
        tree = ast.parse(self.read())
        found = [node for node in ast.walk(tree) if getattr(node, "name", None) in names]
        assert sorted(node.name for node in found) == sorted(names), f"{self.path} has changed"  # type: ignore[attr-defined]
        for node in found:
            if strip_decorators:
                node.decorator_list = []  # type: ignore[attr-defined]
        future = ast.parse("from __future__ import annotations").body
        return compile(ast.Module(body=[*future, *found], type_ignores=[]), str(self.path), "exec")  # type: ignore[list-item]


VLLM = Reference(
    "vllm",
    "0.33.0",
    "vllm/distributed/parallel_state.py",
    "c40796553e6797ce3e10d116ad58a30ce52a95156f4c393a4d11758c15fd1f1f",
)
VLLM_CONFIG = Reference(
    "vllm", "0.33.0", "vllm/config/parallel.py", "61f4e257fbe61145ddac89740952d0bcceed80f9a0fc48eb653e549d3738007a"
)
VLLM_OPS = Reference(
    "vllm",
    "0.33.0",
    "vllm/distributed/communication_op.py",
    "3c3f8ac60db38ece891d39dc1e2f6f1947ad438685893d2e5777d072320bd1b8",
)
VLLM_UTILS = Reference(
    "vllm",
    "0.33.0",
    "vllm/distributed/utils.py",
    "67311b2504737fbc9b7091e8fc85f0f918b5fc4390c77cfce33c4fef868c596e",
)
VLLM_QUEUE = Reference(
    "vllm",
    "0.33.0",
    "vllm/distributed/device_communicators/shm_broadcast.py",
    "7f253343529f09de0a6b2365d7719ac03a532756fd2439cef7983fbb3e834563",
)
SGLANG = Reference(
    "sglang",
    "0.5.23",
    "sglang/srt/distributed/parallel_state.py",
    "bd356b92933a4e5eb08f22cf3eda8b788cc09efbbb2fb421745803847b8d2f5c",
)
SGLANG_WIDTHS = Reference(
    "sglang",
    "0.5.23",
    "sglang/srt/runtime_context.py",
    "c36673ec3abb38e7f95c840fd6da8552de3b3f5e4ab5a498c22958e3988b4b1e",
)
SGLANG_OPS = Reference(
    "sglang",
    "0.5.23",
    "sglang/srt/distributed/communication_op.py",
    "f93114fdfe4583bcb93ce80505476691453b19aec51ec67c9c0207834afe97b9",
)
SGLANG_UTILS = Reference(
    "sglang",
    "0.5.23",
    "sglang/srt/distributed/utils.py",
    "c15020f4d013eff37daad37a9a96089d5bb70e7b7f192c6c22fb020148871f1b",
)
SGLANG_DP_ATTENTION = Reference(
    "sglang",
    "0.5.23",
    "sglang/srt/layers/dp_attention.py",
    "c010d3e4da7d1887a5c4d11b7feb59e2ffd9372d54b2990f72e49f7774d6cbf7",
)
FAIRSEQ2 = Reference(
    "fairseq2", "0.8.1", "fairseq2/gang.py", "3d4200fefc248792c46cf3830eb20ba90053312032bd246af333dc5c7ff92b18"
)
TORCHTITAN = Reference(
    "torchtitan",
    "0.2.2",
    "torchtitan/distributed/parallel_dims.py",
    "452fa8f0a0741b5f68f3ea0710252c6fe4059a797820b7bc8793f160d0dd9cb1",
)
MEGATRON = Reference(
    "megatron-core",
    "0.16.1",
    "megatron/core/parallel_state.py",
    "c94fa8ea456eae4f3c7f710b3d3c78b9e8d1ba485ab9d787333428bdbd51d269",
)
FAULT_TOLERANCE = Reference(
    "pytorch",
    "032af12a437b",
    "test/distributed/test_c10d_fault_tolerance.py",
    url="https://raw.githubusercontent.com/pytorch/pytorch/032af12a437bbb5f52b2f995d78454e8e79ab926/",
)
NVRTC_OF_TORCH = (
    Reference(
        "nvidia-cuda-nvrtc",
        "13.0.88",
        "nvidia/cu13/lib/libnvrtc.so.13",
        "a49e67e8e74590f1e98de55c39c6287efd3f59e3c3797464d7bbe0fe01349b11",
    ),
    Reference(
        "nvidia-cuda-nvrtc",
        "13.0.88",
        "nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
        "91dcd944d01da9c0f08fff5d779db136a47f6d62bdb63bae900d2f481e92c3a2",
    ),
)
NVRTC_OF_CUDA_12 = (
    Reference(
        "nvidia-cuda-nvrtc-cu12",
        "12.9.86",
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "7c67c6b51ea0e0279634cebd676ff7efda1674806444520c84430ad5c35fe625",
    ),
    Reference(
        "nvidia-cuda-nvrtc-cu12",
        "12.9.86",
        "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9",
        "6507cf33450cfb22970c2c1e7aa8e7c0a33e39d864720277b05f61a92791e2e8",
    ),
)
"""The compiler of CUDA 12. NVRTC_OF_TORCH is that of torch 2.11 to 2.14. The environment has a newer compiler."""
ALL = (
    *NVRTC_OF_TORCH, *NVRTC_OF_CUDA_12, MEGATRON, VLLM, VLLM_CONFIG, VLLM_OPS, VLLM_UTILS, VLLM_QUEUE, SGLANG,
    SGLANG_WIDTHS, SGLANG_OPS, SGLANG_UTILS, SGLANG_DP_ATTENTION, FAIRSEQ2, TORCHTITAN, FAULT_TOLERANCE,
)  # fmt: skip
"""All files to fetch. torchtitan 0.2.2 is the last release with expert-tensor parallelism."""


def fetch(references: Iterable[Reference]) -> list[str]:
    wheels: dict[tuple[str, str], list[Reference]] = {}
    problems = []
    for reference in references:
        if reference.url:
            problems += _download(reference)
            continue
        wheels.setdefault((reference.project, reference.version), []).append(reference)
    if not wheels:
        return problems
    try:
        from pip._internal.commands import create_command
        from pip._internal.network.lazy_wheel import LazyZipOverHTTP
    except ImportError as error:
        return [*problems, f"anything: this Python's pip can't read parts of wheels ({error})"]
    command: Any = create_command("download")
    options, _ = command.parse_args(["wheel"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        for (project, version), files in wheels.items():
            try:
                candidates = finder.find_all_candidates(project)
                links = [each.link for each in candidates if each.link.is_wheel and str(each.version) == version]
                if not links:
                    raise LookupError("the index has no wheel of it for this machine")
                url = links[0].url_without_fragment
                with zipfile.ZipFile(LazyZipOverHTTP(url, session, chunk_size=CHUNK_BYTES)) as wheel:
                    for reference in files:
                        reference.keep(wheel.read(reference.path))
            except Exception as error:  # of the network, of pip or of the archive: tests skip, or fail in CI
                problems.append(f"{project} {version}: {type(error).__name__}: {error}")
    return problems


def _download(reference: Reference) -> list[str]:
    """Downloads a file that is in no wheel. Returns a list with the problem, or an empty list."""
    try:
        with urllib.request.urlopen(reference.url + reference.path, timeout=_DOWNLOAD_S) as answer:
            reference.keep(answer.read())
    except (OSError, LookupError) as error:
        return [f"{reference.project} {reference.version}: {type(error).__name__}: {error}"]
    return []


def main() -> None:
    for problem in fetch([reference for reference in ALL if not reference.is_cached()]):
        print(f"could not fetch {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
