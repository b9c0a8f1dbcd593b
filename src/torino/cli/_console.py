"""A console for text from others: file names, tasks, answers and replies of servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from torino.core.text import printable


class SafeConsole(Console):
    """Console that shows control characters of a text, such as escape sequences, instead of sending them."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string; its control characters are replaced before its width is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything else, such as a Text."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)
