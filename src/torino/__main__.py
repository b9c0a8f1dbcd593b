"""``python -m torino`` is the command ``torino``."""

from torino.cli import main

main()
