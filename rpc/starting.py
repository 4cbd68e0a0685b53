"""What a service does before and after its imports, which take seconds. Imports next to nothing itself."""

from __future__ import annotations

import gc
import os
import signal


def before_imports(name: str) -> None:
    """`name`: the caller's `__name__`."""
    gc.disable()  # of the objects that imports make, none is garbage: to look through them is up to a third of a start
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # at INFO gRPC's core tells of connections; read at its import
    if name == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python's exception, raised in whichever module is being imported, is a traceback of nobody's making, and some
        # swallow it: that service would go on. `run_until_signal` has handlers of its own.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def after_imports() -> None:
    """Nor will it be garbage: whatever looks for some later need not go through them, a quarter of a second."""
    gc.freeze()
    gc.enable()
