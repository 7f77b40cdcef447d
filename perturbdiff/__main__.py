"""Where the command line begins: a Ctrl-C gets its sentence whenever it comes, and is never lost."""

import atexit
import os
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import NoReturn

from perturbdiff.runtime.errors import EXIT_INTERRUPTED, INTERRUPTED

_AGAIN = 0.01  # seconds


class _Interrupts:
    """Knows of Ctrl-C, which Python drops with a traceback if it comes while a library's callback runs."""

    def __init__(self) -> None:
        self.came = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Interrupt the main thread; that this leaves a library's tasks unfinished needs no warning."""
        self.came = True
        warnings.simplefilter("ignore")
        raise KeyboardInterrupt

    def unraisable(self, found: "sys.UnraisableHookArgs") -> None:
        """Interrupt once more where the first time was dropped; what breaks in passing is not told."""
        if not self.came:
            sys.__unraisablehook__(found)
        elif isinstance(found.exc_value, KeyboardInterrupt):
            again = threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()


def _end() -> NoReturn:
    """End without taking libraries down, because threads of theirs that were interrupted may still compute."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and said
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED)


def main() -> None:
    """Import the command line and run it."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as nohup asks
    try:
        if ours:
            interrupts = _Interrupts()
            sys.unraisablehook = interrupts.unraisable
            signal.signal(signal.SIGINT, interrupts.handle)
        from perturbdiff.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        _end()
    except SystemExit as stop:
        if stop.code == EXIT_INTERRUPTED:
            _end()
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done and said


if __name__ == "__main__":
    main()
