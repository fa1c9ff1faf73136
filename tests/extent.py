"""Tells whether FAILURE_TESTS=long is set (`make test-long`). Long runs test more seeds, sizes and pairs than short
runs, but no other behavior.
"""

from __future__ import annotations

import os

LONG = os.environ.get("FAILURE_TESTS") == "long"
