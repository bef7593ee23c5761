"""A small MLP under DDP: the script that most tests run. No option but --steps changes the result."""

import argparse
import atexit
import inspect
import threading
import time

import drill
import everstep.recovery as recovery
import torch
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--workers", type=int, default=0, help="processes of the StepLoader")
parser.add_argument("--plain-loader", action="store_true", help="have a DataLoader's children besides")
parser.add_argument("--checkpoint")
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes besides")
parser.add_argument("--swallow", choices=["body", "loop"], help="have a broad except there")
parser.add_argument("--bare", action="store_true", help="track the model inside DDP")
parser.add_argument(
    "--untidy", action="store_true", help="things at exit, an excepthook and a thread of its own"
)
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
        drill.reach("forward", run.rank, now)
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
                drill.reach("optimizer", run.rank, now)


now = 0
run = recovery.init(seed=3)
drill.log_commits(run)
drill.reach("setup", run.rank, 0)
if args.untidy:
    import sys

    sys.excepthook = lambda kind, error, trace: print("my own hook:", error, flush=True)
    atexit.register(lambda: print("my own end", flush=True))
    threading.Thread(target=lambda: threading.main_thread().join(), name="waits for the end").start()
net = torch.nn.Sequential(
    torch.nn.Linear(16, 32),
    torch.nn.BatchNorm1d(32),
    torch.nn.Dropout(0.1),
    Dying(),
    torch.nn.ReLU(),
    torch.nn.Linear(32, 1),
).to(run.device)
model = DistributedDataParallel(net, bucket_cap_mb=0.001)  # several buckets
optimizer = Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
run.track(model=net if args.bare else model, optimizer=optimizer, scheduler=scheduler)
if args.checkpoint:
    run.checkpoint(args.checkpoint, every=args.every, keep=2)
loader = recovery.StepLoader(Numbers(), global_batch=24, seed=0, num_workers=args.workers)
if args.plain_loader:
    children = torch.utils.data.DataLoader(
        Numbers(), batch_size=4, num_workers=1, persistent_workers=True, generator=torch.Generator()
    )


def one_step(step):
    x, y = loader[step]
    loss = (model(x) - y).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


@run.protect
def train():
    global now
    others = iter(children) if args.plain_loader else None
    try:
        for step in run.steps(args.steps):
            now = int(step)
            drill.reach("body", run.rank, now)
            if others is not None:
                next(others)
            try:
                one_step(step)
            except Exception:
                if args.swallow != "body":
                    raise
            time.sleep(args.pause)
    except Exception:
        if args.swallow != "loop":
            raise


train()
print(f"digest {run.digest()}", flush=True)
drill.reach("end", run.rank, now)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
