"""Where the command line begins: a Ctrl-C gets its sentence even while the first modules are being imported."""

import sys

from perturbdiff.runtime.errors import EXIT_INTERRUPTED, INTERRUPTED


def main() -> None:
    """Import the command line and run it."""
    try:
        from perturbdiff.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
