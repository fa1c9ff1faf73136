"""Writes the lock file of `make test-engines` from an environment in which its tests pass: python -m
tests.engines.lock PYTHON. Digests are from pip's index: of all wheels that fit Linux and `PYTHONS`, or else
of the source."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LOCK = Path(__file__).with_name("requirements.txt")
BUILT = Path(__file__).with_name("requirements-built.txt")
PYTHONS = ("311", "312", "313")
LEFT_OUT = {"torch", "pip", "parallel-state"}
"""torch depends on the machine, and pip is part of the environment."""
FITS = re.compile(rf"-(py3|py2\.py3|cp({'|'.join(PYTHONS)})|cp3\d+-abi3)-.*(-any|manylinux\S*_(x86_64|aarch64))\.whl$")

READ = """
import json
from importlib.metadata import distributions

def licence(of):
    said = of.get("License-Expression") or (of.get("License") or "").strip()
    classes = [each.rpartition(" :: ")[2] for each in of.get_all("Classifier", []) if each.startswith("License ::")]
    return said if said and len(said) < 60 else ", ".join(classes) or said.split("\\n")[0] or "not said"

found = [(each.metadata["Name"], each.version, licence(each.metadata)) for each in distributions()]
print(json.dumps(sorted({name.lower(): (name, *rest) for name, *rest in found}.values())))
"""


def pins(python: str) -> Iterator[tuple[str, str, str]]:
    done = subprocess.run([python, "-c", READ], capture_output=True, text=True, check=True)
    for project, version, licence in json.loads(done.stdout):
        if re.sub(r"[-_.]+", "-", project).lower() not in LEFT_OUT:
            yield project, version, licence


def files(projects: Iterable[str]) -> Iterator[list[Any]]:
    from pip._internal.commands import create_command
    from pip._internal.index.collector import parse_links

    command: Any = create_command("download")
    options, _ = command.parse_args(["wheel"])
    with command.main_context():
        session = command.get_default_session(options)
        collector = command._build_package_finder(options, session)._link_collector

        def links(page: Any) -> Iterable[Any]:
            content = collector.fetch_response(page)
            return [] if content is None else parse_links(content)

        for project in projects:
            found = collector.collect_sources(project, candidates_from_page=links).index_urls
            yield [link for source in found if source for link in source.page_candidates()]


def of_version(links: Iterable[Any], project: str, version: str) -> tuple[bool, list[str]]:
    name = re.sub(r"[-_.]+", "[-_.]+", re.escape(project.lower()).replace(r"\-", "-").replace(r"\.", "."))
    start = re.compile(rf"{name}-{re.escape(version)}(?=-|\.tar|\.zip)", re.IGNORECASE)
    named = {link.filename: link.hash for link in links if start.match(link.filename) and link.hash_name == "sha256"}
    wheels = sorted({digest for file, digest in named.items() if FITS.search(file)})
    sources = sorted({digest for file, digest in named.items() if file.endswith((".tar.gz", ".zip"))})
    if not wheels + sources:
        raise LookupError(f"the index has no file of {project} {version} with a digest")
    return bool(wheels), wheels or sources


def main(python: str) -> None:
    wanted = sorted(pins(python), key=lambda pin: pin[0].lower())
    texts: dict[bool, list[str]] = {True: [], False: []}
    for (project, version, licence), links in zip(wanted, files(name for name, *_ in wanted), strict=True):
        is_wheel, digests = of_version(links, project, version)
        lines = [f"{project}=={version}", *(f"    --hash=sha256:{each}" for each in digests)]
        texts[is_wheel].append(f"# {licence}\n" + " \\\n".join(lines))
    for path, is_wheel in ((LOCK, True), (BUILT, False)):
        path.write_text("".join(f"{text}\n" for text in texts[is_wheel]))


if __name__ == "__main__":
    main(*sys.argv[1:])
