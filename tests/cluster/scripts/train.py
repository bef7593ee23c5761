"""A small model with BatchNorm and dropout, at a pace that leaves time to break things."""

import argparse
import time

import everstep.recovery as recovery
import torch
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--pace", type=float, default=0.1)
parser.add_argument("--checkpoint")
args = parser.parse_args()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 600

    def __getitem__(self, index):
        x = torch.linspace(index, index + 1, 16).sin()
        return x, x.sum().view(1)


run = recovery.init(seed=1)
net = torch.nn.Sequential(
    torch.nn.Linear(16, 64),
    torch.nn.BatchNorm1d(64),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(64, 1),
)
model = DistributedDataParallel(net.to(run.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
if args.checkpoint:
    run.checkpoint(args.checkpoint, every=10)
loader = recovery.StepLoader(Numbers(), global_batch=24, seed=0)


@run.protect
def train():
    for step in run.steps(args.steps):
        x, y = loader[step]
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        time.sleep(args.pace)


train()
print("digest", run.digest(), flush=True)
