"""How much of the suite runs: every behaviour once, or with FAILURE_TESTS=long (`make test-long`) in full.

The long part has more seeds, sizes and pairs of what the short part proves. It may not hold anything alone.
"""

from __future__ import annotations

import os

LONG = os.environ.get("FAILURE_TESTS") == "long"
