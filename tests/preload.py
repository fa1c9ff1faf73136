"""Imported last by the fork server: what test modules import, so that no rank does, and a heap that forks share.

With it what a rank's first group imports, a third of the CPU time of ranks that make one and are killed.

A collector that runs in a rank would write into each object that the fork server has made, and copy all of their pages.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - for the first address that a rank looks up
import gc

import pytest  # noqa: F401

from device_communicators.c10d import creation, world  # noqa: F401
from device_communicators.cpu import plain_tree, shared_memory  # noqa: F401
from device_communicators.hierarchical import communicator, hosts, leaders  # noqa: F401
from device_communicators.process_group import checked, plain, started_calls  # noqa: F401
from tests.contract import attempts  # noqa: F401
from tests.failure import worlds  # noqa: F401

gc.collect()
gc.freeze()
