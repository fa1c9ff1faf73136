"""Disables a torch measurement of guards that flushes the processor's caches: 30 ms, a quarter of a small compile."""

import torch._dynamo.guards

torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
