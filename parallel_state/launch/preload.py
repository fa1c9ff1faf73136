"""Prepares the fork server of `launch`; the server imports this module last.

Freezes the heap, because garbage collection in a child would copy pages shared with the server. Unblocks SIGCHLD, by
which the server detects exits, and SIGINT, which the launcher blocked so that Ctrl-C during `import torch` prints no
traceback.
"""

import gc
import signal

gc.collect()
gc.freeze()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    _handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops a pending one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, _handler)
