"""Every kind of DDP model and helper in one training step, each with an optimizer of its own.

A kill at the n-th collective of a step lands in one of their backward passes.
"""

import copy

import drill
import everstep.recovery as recovery
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = 24


class Partly(nn.Module):
    """Uses one of its two branches in each step, and has parameters that are frozen or never used."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.branches = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
        self.never = nn.Linear(8, 1)

    def forward(self, x, which):
        return self.branches[which](self.frozen(x))


class Mixed(nn.Module):
    """Parameters of several dtypes, declared in another order than they are used, one of them shared."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(WIDTH, 1).to(torch.float64)
        self.first = nn.Linear(8, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
        self.again = self.middle
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.first(x)
        if self.training:
            self.seen += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # another tensor at each step
        x = self.again(self.middle(x.bfloat16())).double()
        return self.last(x).float()


def mlp():
    return nn.Sequential(
        nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    )


run = recovery.init(seed=5)
drill.log_commits(run)
# Collectives of set-up: real at the start, answered locally in whoever comes later.
torch.distributed.barrier()
names = [None] * run.world_size
torch.distributed.all_gather_object(names, {"rank": run.rank})

one = DDP(mlp())  # one bucket
many = DDP(mlp(), bucket_cap_mb=0.0005)
views = DDP(mlp(), gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
partly = DDP(Partly(), find_unused_parameters=True)
mixed = DDP(Mixed(), bucket_cap_mb=0.001)
scaled = DDP(mlp())
models = {"one": one, "many": many, "views": views, "partly": partly, "mixed": mixed, "scaled": scaled}
optimizers = {
    "one": torch.optim.AdamW(one.parameters(), lr=1e-2),
    "many": torch.optim.SGD(many.parameters(), lr=1e-2, momentum=0.9),  # its momentum comes with step 1
    "views": torch.optim.Adam(views.parameters(), lr=1e-2),
    "partly": torch.optim.AdamW(partly.parameters(), lr=1e-2),
    "mixed": torch.optim.SGD(mixed.parameters(), lr=1e-3),
    "scaled": torch.optim.AdamW(scaled.parameters(), lr=1e-2),
}
cycle = torch.optim.lr_scheduler.OneCycleLR(optimizers["one"], max_lr=0.05, total_steps=200)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers["views"], patience=1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(one.module), use_buffers=True)
run.track(
    **{f"model_{name}": model for name, model in models.items()},
    **{f"optimizer_{name}": optimizer for name, optimizer in optimizers.items()},
    cycle=cycle,
    plateau=plateau,
    scaler=scaler,
    average=average,
)
sampler = recovery.StepSampler(400, global_batch=6 * run.world_size, seed=1)
data = torch.randn(400, 8, generator=torch.Generator().manual_seed(9))


@run.protect
def train():
    for step in run.steps(24):
        x = data[sampler.indices(step)]
        y = x.sum(1, keepdim=True)
        losses = {}
        for name in ("one", "mixed"):
            losses[name] = (models[name](x) - y).square().mean()
        (losses["one"] + losses["mixed"]).backward()
        with many.no_sync():  # accumulation, inside of the step
            (many(x[:3]) - y[:3]).square().mean().backward()
        (many(x[3:]) - y[3:]).square().mean().backward()
        losses["views"] = (views(x) - y).square().mean()
        losses["views"].backward()
        (partly(x, int(step) % 2) - y).square().mean().backward()
        loss = (scaled(x) - y).square().mean()
        if step % 5 == 2:
            loss = loss * float("inf")  # skipped by the scaler, on all ranks alike
        scaler.scale(loss).backward()
        scaler.unscale_(optimizers["scaled"])
        mean = losses["views"].detach().clone()
        torch.distributed.all_reduce(mean)

        for name in ("one", "many", "views", "partly", "mixed"):
            optimizers[name].step()
        scaler.step(optimizers["scaled"])
        scaler.update()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        cycle.step()
        plateau.step(float(mean))
        average.update_parameters(one.module)


train()
print(f"digest {run.digest()}", flush=True)
