"""What the benchmarks train: the example's GPT, with a line in a log for each committed step.

everstep run --nnodes 3 benchmarks/train.py --commits FILE
torchrun --nproc-per-node 3 benchmarks/train.py --commits FILE --checkpoint DIR
torchrun --nproc-per-node 3 benchmarks/train.py --commits FILE --plain      (DDP alone, no everstep in it)

With --turns PREFIX each rank waits for a byte from the FIFO PREFIX.RANK before every --turn steps, and writes
one into PREFIX.done after them: so two jobs can train by turns on the same cores (see `turns.py`).
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--commits", required=True)
parser.add_argument("--checkpoint")
parser.add_argument("--plain", action="store_true")
parser.add_argument("--turns")
parser.add_argument("--turn", type=int, default=10)
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--context", type=int, default=64)
args = parser.parse_args()

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "char_gpt.py")


def model_of_the_example() -> tuple[type, torch.Tensor, type]:
    """GPT, the text and the dataset of examples/char_gpt.py, without running its training."""
    source = Path(EXAMPLE).read_text().partition("\nargs = arguments()")[0]
    namespace: dict = {"__name__": "char_gpt"}
    exec(compile(source, EXAMPLE, "exec"), namespace)  # noqa: S102 - our own file
    return namespace["GPT"], namespace["standard_library"](), namespace["Text"]


class Log:
    """A line for each committed step: unix seconds, rank, step, process. One write a line."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def committed(self, rank: int, step: int) -> None:
        os.write(self._fd, f"{time.time():.6f} {rank} {step} {os.getpid()}\n".encode())


class Turns:
    """Steps are done only while it is our turn."""

    def __init__(self, rank: int) -> None:
        self._files: list[int] = []
        if args.turns:
            # Opened for both ways, so that neither side waits for the other.
            self._files = [os.open(f"{args.turns}.{name}", os.O_RDWR) for name in (rank, "done")]

    def wait(self, step: int) -> None:
        """Before a step."""
        if self._files and step % args.turn == 0:
            os.read(self._files[0], 1)

    def over(self, step: int) -> None:
        """After a step."""
        if self._files and step % args.turn == args.turn - 1:
            os.write(self._files[1], b"x")


def with_everstep() -> None:
    import everstep.recovery as recovery

    GPT, text, Text = model_of_the_example()
    run = recovery.init(seed=0)
    model = DistributedDataParallel(GPT(args.width, args.layers, args.context).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    if args.checkpoint:
        run.checkpoint(args.checkpoint, every=10)
    loader = recovery.StepLoader(Text(text, args.context), global_batch=args.batch, seed=0)
    log, turns = Log(args.commits), Turns(run.rank)

    @run.protect
    def train() -> None:
        for step in run.steps(args.steps):
            turns.wait(int(step))
            x, y = loader[step]
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step.commit()
            log.committed(run.rank, int(step))
            turns.over(int(step))

    train()
    print("digest", run.digest(), flush=True)


def plain() -> None:
    """The same with DDP alone and the same batches, computed beforehand as a plain script would read them."""
    GPT, text, Text = model_of_the_example()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(args.width, args.layers, args.context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    sampler = torch.utils.data.DistributedSampler(Text(text, args.context), seed=0)
    loader = torch.utils.data.DataLoader(
        Text(text, args.context), batch_size=args.batch // dist.get_world_size(), sampler=sampler
    )
    log, turns = Log(args.commits), Turns(dist.get_rank())
    batches = iter(loader)
    for step in range(args.steps):
        turns.wait(step)
        x, y = next(batches)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        log.committed(dist.get_rank(), step)
        turns.over(step)
    dist.destroy_process_group()


plain() if args.plain else with_everstep()
