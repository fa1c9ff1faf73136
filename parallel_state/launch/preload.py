"""Prepares the fork server of `launch`; the server imports this module last.

The heap is frozen, because garbage collection in a child would copy pages shared with the server. SIGCHLD is unblocked,
because the server can't detect exits without that signal. The launcher starts the server with SIGINT blocked, so that
Ctrl-C during `import torch` prints no traceback; this module unblocks it.
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
