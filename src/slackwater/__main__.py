"""The `slackwater` program, also as `python -m slackwater`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C prints no traceback, not even during its import."""
    try:
        from slackwater.cli.main import main as run_command
    except KeyboardInterrupt:
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    main()
