"""Prepares the fork server of `launch`, as its last import.

Freezes the heap, so that the garbage collectors of ranks don't copy all shared pages. Unblocks SIGCHLD, without which
the server can't detect exits of ranks, and SIGINT, which it blocks at its start so that Ctrl-C during `import torch`
prints no traceback.
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
