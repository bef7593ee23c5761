"""A small MLP under DDP: the script that most tests run."""

import argparse
import inspect
import os
import sys
import time

import drill
import everstep.recovery as recovery
import torch
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--checkpoint")
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes besides")
args = parser.parse_args()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 500

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, x.sum().view(1)


class Dying(torch.nn.Module):
    """Passes its input on; may die in forward."""

    def forward(self, x):
        drill.die_here("forward", run.rank, now)
        return x


class Adam(torch.optim.AdamW):
    """May die in the middle of step(), with half of the parameters changed."""

    @torch.no_grad()
    def step(self, closure=None):
        inner = inspect.unwrap(torch.optim.AdamW.step)
        for group in self.param_groups:
            params = group["params"]
            half = len(params) // 2
            for part in (params[:half], params[half:]):
                group["params"] = part
                inner(self)
                group["params"] = params
                drill.die_here("optimizer", run.rank, now)


now = 0
run = recovery.init(seed=3)
drill.log_commits(run)
drill.die_here("setup", run.rank, 0)
net = torch.nn.Sequential(
    torch.nn.Linear(16, args.width),
    torch.nn.BatchNorm1d(args.width),
    torch.nn.Dropout(0.1),
    Dying(),
    torch.nn.ReLU(),
    torch.nn.Linear(args.width, 1),
).to(run.device)
model = DistributedDataParallel(net, bucket_cap_mb=0.001)  # several buckets
optimizer = Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
if args.checkpoint:
    run.checkpoint(args.checkpoint, every=args.every, keep=2)
loader = recovery.StepLoader(Numbers(), global_batch=24, seed=0, num_workers=args.workers)


@run.protect
def train():
    global now
    for step in run.steps(args.steps):
        now = int(step)
        x, y = loader[step]
        loss = (model(x) - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        time.sleep(args.pause)


train()
print("digest", run.digest(), flush=True)
if os.environ.get("EXIT_WITH"):
    sys.exit(int(os.environ["EXIT_WITH"]))
