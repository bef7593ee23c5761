"""Print what rich draws: in colours on a terminal, as plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

_ENDLESS = 10_000


def show(*drawn: RenderableType) -> None:
    """Print these. Into a file or a pipe, lines are neither folded nor filled with spaces."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        for part in drawn:
            console.print(part)
        return
    console = Console(highlight=False, width=_ENDLESS)
    with console.capture() as captured:
        for part in drawn:
            console.print(part)
    for line in captured.get().splitlines():
        print(line.rstrip(), flush=True)
