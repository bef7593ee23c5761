"""Everstep's recovery library: what a training script imports.

See `everstep.recovery.run` for `init` and `Run`, and `everstep.recovery.data` for
`StepSampler` and `StepLoader`. torch is imported when one of these is first used,
so that the launcher can use the pure parts of this package without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.recovery.data import StepLoader, StepSampler
    from everstep.recovery.run import Run, Step, init

__all__ = ["Run", "Step", "StepLoader", "StepSampler", "init"]

_ROOMS = {"init": "run", "Run": "run", "Step": "run", "StepLoader": "data", "StepSampler": "data"}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
