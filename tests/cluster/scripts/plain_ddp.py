"""A DDP script as people have it: it knows nothing of who starts it, and has checkpoints of its own."""

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pace", type=float, default=0.1)
parser.add_argument("--checkpoint", required=True)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = 0
if os.path.exists(args.checkpoint):
    saved = torch.load(args.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
if rank == 0:
    print(f"begins at step {first}", flush=True)
for step in range(first, args.steps):
    generator = torch.Generator().manual_seed(step * world + rank)
    x = torch.randn(8, 16, generator=generator)
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and (step + 1) % 10 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, f"{args.checkpoint}.new")
        os.replace(f"{args.checkpoint}.new", args.checkpoint)
    time.sleep(args.pace)
if rank == 0:
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("digest", hashlib.sha256(weights).hexdigest(), flush=True)
dist.destroy_process_group()
