"""A stand-in for DeepSpeed, which is not here: the few calls of it that a training script makes, over DDP.

It has DeepSpeed's names, its `latest` file and nothing of its inside.
"""

import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def add_config_arguments(parser):
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config")
    return parser


def initialize(args, model, model_parameters):
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print("deepspeed is a stand-in here: ZeRO and its kernels are not tried", flush=True)
    with open(args.deepspeed_config) as file:
        config = json.load(file)
    optimizer = torch.optim.AdamW(model_parameters, lr=config["optimizer"]["params"]["lr"])
    return Engine(model, optimizer), optimizer, None, None


class Engine:
    def __init__(self, model, optimizer):
        self.module, self.optimizer = DistributedDataParallel(model), optimizer

    def __call__(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save_checkpoint(self, folder, tag, client_state):
        if dist.get_rank() == 0:
            os.makedirs(os.path.join(folder, tag), exist_ok=True)
            state = [self.module.state_dict(), self.optimizer.state_dict(), client_state]
            torch.save(state, os.path.join(folder, tag, "state.pt"))
            with open(os.path.join(folder, "latest.new"), "w") as file:
                file.write(tag)
            os.replace(os.path.join(folder, "latest.new"), os.path.join(folder, "latest"))
        dist.barrier()

    def load_checkpoint(self, folder):
        try:
            with open(os.path.join(folder, "latest")) as file:
                tag = file.read()
        except FileNotFoundError:
            return None, None
        model, optimizer, client_state = torch.load(os.path.join(folder, tag, "state.pt"))
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        return tag, client_state
