"""FAILURE_TESTS=long (`make test-long`) adds seeds, sizes and pairs to what a short run proves, and no
behavior of its own."""

from __future__ import annotations

import os

LONG = os.environ.get("FAILURE_TESTS") == "long"
