"""Imported last by the fork server: what test modules import, so that no rank does, and a heap that forks share.

A collector that runs in a rank would write into each object that the fork server has made, and copy all of their pages.
"""

from __future__ import annotations

import gc

import pytest  # noqa: F401

from tests.contract import attempts  # noqa: F401

gc.collect()
gc.freeze()
