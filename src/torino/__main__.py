"""``python -m torino`` is the command ``torino``."""

from torino.cli.main import main

if __name__ == "__main__":
    main()
