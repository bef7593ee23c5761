"""How the launcher speaks to people: a line on stderr. What the script prints stays alone on stdout."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print `everstep: text` on stderr, at once."""
    print(f"everstep: {text}", file=sys.stderr, flush=True)
