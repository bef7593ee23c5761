"""A small GPT learns to write Python, one character at a time, and survives its workers.

    python examples/char_gpt.py
    torchrun --nproc-per-node 3 examples/char_gpt.py
    everstep run --nnodes 3 --nproc-per-node 1 --standby 1 examples/char_gpt.py

It is an ordinary DDP script; the lines that everstep asks for are marked (1) to (6).
"""

import argparse
import math
import sysconfig
from pathlib import Path

import everstep.recovery as recovery
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset


def standard_library(size: int = 4_000_000) -> Tensor:
    """The source of Python's own standard library, as bytes: text that every machine has."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:size]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Text(Dataset):
    """Pieces of a text with their next characters, each cut at a random place near its own."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return len(self.text) // self.context - 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context + int(torch.randint(self.context, ()))  # the same when done again
        piece = self.text[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention and a feed-forward layer, with dropout after each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + F.dropout(self.out(mixed.reshape(batch, length, width)), self.dropout, self.training)
        return x + F.dropout(self.feed(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Predicts each next character of a text."""

    def __init__(self, width: int, layers: int, context: int, heads: int = 6, dropout: float = 0.1) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.characters(text) + self.places(places))))


def warmup_and_cosine(steps: int, warmup: int = 10):
    """Factor of the learning rate at each step."""
    return lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0)))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--batch", type=int, default=6, help="pieces of text a step, over all workers")
    parser.add_argument("--context", type=int, default=64, help="characters in a piece")
    parser.add_argument("--width", type=int, default=192, help="width of the model, a multiple of 6")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--data-workers", type=int, default=0, help="processes that prepare data, per worker")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="write checkpoints there, and go on from the newest"
    )
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints to keep")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    return parser.parse_args()


args = arguments()
text = standard_library()  # heavy reading comes before init(): a standby has then done it already

run = recovery.init(seed=args.seed)  # (1) joins the run; a standby waits here until it is given a rank
model = DistributedDataParallel(GPT(args.width, args.layers, args.context).to(run.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_and_cosine(args.steps))
run.track(model=model, optimizer=optimizer, scheduler=scheduler)  # (2) what a lost worker's successor needs
if args.checkpoint:
    run.checkpoint(args.checkpoint, every=args.every, keep=args.keep)  # for the day that all workers die
loader = recovery.StepLoader(  # (3) the batch of any step, the same whenever and by whomever it is asked for
    Text(text, args.context), global_batch=args.batch, seed=args.seed, num_workers=args.data_workers
)


@run.protect  # (4) a worker's death ends train(); it is repaired, and train() is called again
def train() -> None:
    for step in run.steps(args.steps):  # (5) from the first step that is not committed yet
        x, y = (part.to(run.device) for part in loader[step])
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if run.rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(
                f"step {int(step):4d}  loss {loss.item():.3f}  lr {scheduler.get_last_lr()[0]:.1e}",
                flush=True,
            )


train()
print("digest", run.digest(), flush=True)  # (6) of model, optimizer and scheduler: equal on every rank
