"""A small script that does one thing wrong: `bad.py CASE`."""

import sys

import everstep.recovery as recovery
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

case = sys.argv[1]
run = recovery.init()
width = 5 if case.startswith("other shapes") and run.rank == 1 else 4
net = torch.nn.Linear(width, 1)
model = net if case == "other shapes, no DDP" else DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if case == "no steps":
    sys.exit(0)
if case == "no state_dict":
    run.track(model=model, optimizer=optimizer, meter=[1, 2, 3])
if case == "objects in set-up":
    dist.broadcast_object_list([1], src=0)
if case == "untracked model":
    DistributedDataParallel(torch.nn.Linear(4, 1))
    other = DistributedDataParallel(torch.nn.Linear(4, 1))
run.track(model=model)
if case != "untracked optimizer":
    run.track(optimizer=optimizer)


def train():
    for step in run.steps(4):
        x = torch.ones(2, width) * (step + 1)
        model(x).sum().backward()
        if case == "gradients live on" and step % 2 == 0:
            continue
        optimizer.step()
        if case == "collective after the optimizer":
            dist.all_reduce(torch.ones(1))
        if case == "left in mid-step":
            break
        optimizer.zero_grad()
    if case == "left in mid-step":
        next(iter(run.steps(4)))


if case != "not protected":
    train = run.protect(train)
train()
print("digest", run.digest(), flush=True)
