"""Count the files and functions of torino that one ``torino ask`` call runs through, imports excluded.

Usage: ``python scripts/profile_ask.py``
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

ROOTS = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1] / "lab" / "src")]


class CallCounter:
    """Record the functions called after the command starts."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str, int]] = set()
        self.started = False
        self.importing = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Handle one event of ``sys.setprofile``."""
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib"):
            if code.co_name == "_find_and_load" and event in ("call", "return"):
                self.importing += 1 if event == "call" else -1
            return
        if event != "call":
            return
        if code.co_name == "ask" and code.co_filename.endswith("cli/ask.py"):
            self.started = True
        ours = any(code.co_filename.startswith(root) for root in ROOTS)
        if self.started and not self.importing and ours and not code.co_name.startswith("<"):
            self.functions.add((code.co_filename, code.co_name, code.co_firstlineno))


def main() -> None:
    """Run the command and print the counts."""
    sys.argv = ["torino", "ask", "astronaut", "Is there a person in the photo?"]
    from torino.cli.main import main as command

    counter = CallCounter()
    sys.setprofile(counter)
    try:
        command()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
    files = Counter(Path(name).name for name, _, _ in counter.functions)
    print(f"{len({name for name, _, _ in counter.functions})} files, {len(counter.functions)} functions")
    for name, count in files.most_common():
        print(f"{count:4d}  {name}")


if __name__ == "__main__":
    main()
