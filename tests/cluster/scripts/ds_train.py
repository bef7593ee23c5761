"""A DeepSpeed script as people have it: it knows nothing of who starts it."""

import argparse
import hashlib
import time

import deepspeed
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pace", type=float, default=0.1)
parser.add_argument("--checkpoint", required=True)
args = deepspeed.add_config_arguments(parser).parse_args()

torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
_, told = engine.load_checkpoint(args.checkpoint)
first = told["step"] if told else 0
rank, world = dist.get_rank(), dist.get_world_size()
if rank == 0:
    print(f"begins at step {first}", flush=True)
for step in range(first, args.steps):
    generator = torch.Generator().manual_seed(step * world + rank)
    x = torch.randn(8, 16, generator=generator)
    loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    if (step + 1) % 10 == 0:
        engine.save_checkpoint(args.checkpoint, tag=f"step{step + 1}", client_state={"step": step + 1})
    time.sleep(args.pace)
if rank == 0:
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("digest", hashlib.sha256(weights).hexdigest(), flush=True)
dist.destroy_process_group()
