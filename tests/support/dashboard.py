"""Read the data of a concept dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def read_dashboard_data(path: Path) -> Any:
    """The JSON that is embedded in the page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert match
    return json.loads(match[1])
