"""Griffe extension: turn the reStructuredText roles of docstrings into Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`(~?)([^`]+)`")


def to_markdown(text: str) -> str:
    """Replace roles by links (full names in torino) or code, and literal-block markers by plain colons.

    Examples
    --------
    >>> to_markdown("See :meth:`ClipText.query`::")
    'See `ClipText.query`:'
    """

    def role(match: re.Match[str]) -> str:
        short, name = match.groups()
        label = name.rsplit(".", 1)[-1] if short else name
        if not name.startswith("torino."):
            return f"`{label}`"
        return f'<autoref identifier="{name}" optional><code>{label}</code></autoref>'

    text = ROLE.sub(role, text)
    text = re.sub(r"^\s*::$\n", "", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


class SphinxRoles(griffe.Extension):
    """Rewrite every docstring when it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
