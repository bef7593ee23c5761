"""What a standby does ahead, so that taking a rank is quick.

Imports that torch makes lazily, and one step of a tiny model, so that the code of
autograd, DDP and the optimizers has been run once in this process. Nothing of it
is left behind: random state is seeded when a rank is given.
"""

from __future__ import annotations

import torch
import torch._dynamo
from everstep.recovery.group import Group
from torch.nn.parallel import DistributedDataParallel


def warm_up() -> None:
    """Run a small transformer block through DDP and AdamW, alone. Takes about 0.1 s."""
    group = Group(0, 1)  # answers everything locally
    model = torch.nn.Sequential(
        torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True),
        torch.nn.Linear(64, 64),
    )
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(ddp.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(2):
        out = ddp(torch.randn(4, 16, 64))
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), torch.zeros(64, dtype=torch.long))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
