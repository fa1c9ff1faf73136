"""How much of the suite runs: every behavior once, or everything with FAILURE_TESTS=long (`make test-long`).

The long part adds seeds, sizes and pairs to what the short part proves, and no behavior of its own.
"""

from __future__ import annotations

import os

LONG = os.environ.get("FAILURE_TESTS") == "long"
