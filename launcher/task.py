"""`everstep agent --task`: the node agent in the place of a step's task, put there by the SPANK plugin.

It differs from the agent that `everstep srun` starts only in how its orders come: srun carries them under
names that begin with SLURM_ (see native.py), and the run's exit code goes back to srun itself.
"""

from __future__ import annotations

import os

from everstep.launcher import options as own
from everstep.launcher.native import CARRIED, PATH_VARIABLE
from everstep.recovery.errors import UsageError

_VARIABLES = (own.ORDERS_VARIABLE, own.SECRET_VARIABLE, own.SPEC_VARIABLE, own.REPORT_VARIABLE)


def agent_main() -> int:
    """Be the agent of this task's node; the run's exit code."""
    if CARRIED + own.ORDERS_VARIABLE not in os.environ:
        raise UsageError(
            "`everstep agent --task` is started by Slurm's SPANK plugin, not by hand: "
            "type srun --auto-resume=1 torchrun …, or everstep srun torchrun …"
        )
    for name in _VARIABLES:
        value = os.environ.pop(CARRIED + name, None)
        if value is not None:
            os.environ[name] = value
    os.environ.pop(PATH_VARIABLE, None)
    from everstep.launcher.step import agent_main as agent

    return agent()
