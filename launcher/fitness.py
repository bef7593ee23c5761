"""An agent's own health checks, before and during the run. A fault of the checks changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from everstep.healthcheck import api
from everstep.launcher import messages as m


async def examine(level: str, say: Callable[[str], None]) -> str:
    """Why this node is not fit for work; empty where it is."""
    try:
        verdict = await api.examine(level)
    except OSError as error:  # no process could be started
        say(f"health checks: {error}")
        return ""
    for fault in verdict.faults:
        say(f"health checks: {fault}")
    return "" if verdict.fit else verdict.reason


async def watch(unfit: str, every: float, tell: Callable[[m.Health], Awaitable[None]]) -> None:
    """Look every so many seconds, and tell whenever that changes, until cancelled."""
    # Closed here and now, wherever we are cancelled: its process is not to be left to whoever ends the rest.
    async with contextlib.aclosing(api.watch(every)) as verdicts:
        async for verdict in verdicts:
            now = "" if verdict.fit else verdict.reason
            if now != unfit and not verdict.faults:
                unfit = now
                await tell(m.Health(unfit))
