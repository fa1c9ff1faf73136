"""The last import of the fork server that `launch` starts; of no use to anybody else.

Its heap is frozen: a collector that ran in a rank would else write into each of its objects, and copy all their pages.

The server can't detect exits of ranks while SIGCHLD is blocked. A program that waits for SIGCHLD by sigwait blocks it.

That server starts with SIGINT blocked, so that Ctrl-C while it imports torch prints no traceback of its. From here
on it ignores SIGINT by itself, and its children must find the signal unblocked, those of other code as well.
"""

import gc
import signal

gc.collect()
gc.freeze()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    _handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops one that is pending
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, _handler)
