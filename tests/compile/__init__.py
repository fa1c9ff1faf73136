"""Tests of compiled code; and here torch's compiler without a measurement that it writes to a log.

To see how long the guards of each frame take it flushes the processor's caches: 30 ms, a quarter of a small compile.
"""

import torch._dynamo.guards

torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
