"""The command ``torino``, and ``python -m torino``."""

from torino.cli._stop import stop_on_signals


def main() -> None:
    """Run the command; Ctrl-C and SIGTERM end it with one line, also while it starts."""
    with stop_on_signals():
        from torino.cli.main import main as run  # takes a moment

        run()


if __name__ == "__main__":
    main()
