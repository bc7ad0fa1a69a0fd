"""The decoder of bench/strategies in PyTorch under one of its strategies over gloo: the same weights, data, steps and
optimizer as `cadre train`. Prints a line for each step, as the trainer does.

    torchrun --nproc-per-node N torch_strategies.py single|ddp|fsdp|pp|tp SETTINGS.json

The options are the fastest ones of PyTorch for this: fused AdamW, gradients of DDP as views of its
buckets, data in memory.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tests/parity"))
import reference
from dtensor_gpt import DividedBlock


class Decoder(nn.Module):
    """Stage `number` of `count` stages of reference.Gpt with an untied head; stage 0 of 1 is the whole model."""

    def __init__(self, settings, number=0, count=1):
        super().__init__()
        width, layers = settings["width"], settings["layers"]
        self.blocks = range(layers * number // count, layers * (number + 1) // count)
        self.has_head = number == count - 1
        if number == 0:
            self.wte = nn.Embedding(reference.VOCABULARY, width)
            self.wpe = nn.Embedding(settings["context"], width)
        for i in self.blocks:
            self.add_module(f"h_{i}", reference.Block(settings["heads"], width))
        if self.has_head:
            self.ln_f = nn.LayerNorm(width)
            self.lm_head = nn.Linear(width, reference.VOCABULARY, bias=False)

    def forward(self, x):
        if hasattr(self, "wte"):
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for i in self.blocks:
            x = getattr(self, f"h_{i}")(x)
        return self.lm_head(self.ln_f(x)) if self.has_head else x


def make_decoder(settings, number=0, count=1):
    """Makes the whole model. Its initial values are those that the trainer reads from a file."""
    torch.manual_seed(settings["seed"])
    whole = Decoder(settings)
    for name, parameter in whole.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    if count == 1:
        return whole
    part, values = Decoder(settings, number, count), dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(values[name])
    return part


def divided(model, mesh):
    for i in model.blocks:
        block = DividedBlock(getattr(model, f"h_{i}"))
        model.add_module(f"h_{i}", block)
        columns = {name: ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v", "mlp_c_fc")}
        rows = {name: RowwiseParallel() for name in ("attn_c_proj", "mlp_c_proj")}
        parallelize_module(block, mesh, columns | rows)
    return model


class Whole:
    """Strategies in which every rank computes a loss."""

    def __init__(self, strategy, settings):
        size = dist.get_world_size()
        self.model = make_decoder(settings)
        self.shares_batch = strategy in ("ddp", "fsdp")
        if strategy == "tp":
            self.model = divided(self.model, init_device_mesh("cpu", (size,)))
        elif strategy == "fsdp":
            for i in self.model.blocks:
                fully_shard(getattr(self.model, f"h_{i}"))
            fully_shard(self.model)
        self.runs = self.model
        if strategy == "ddp":
            self.runs = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def backward(self, data, target):
        loss = reference.Gpt.loss(self.runs(data), target)
        loss.backward()
        return loss.detach().double()


class Pipelined:
    shares_batch = False

    def __init__(self, settings):
        rank, size = dist.get_rank(), dist.get_world_size()
        self.model = make_decoder(settings, rank, size)
        self.is_first, self.is_last = rank == 0, rank == size - 1
        rows = settings["batch_size"] // settings["microbatches"]
        # The shapes are passed, because PyTorch would infer them with messages that need numpy.
        tokens = torch.zeros(rows, settings["context"], dtype=torch.long)
        hidden = torch.zeros(rows, settings["context"], settings["width"], requires_grad=True)
        logits = torch.zeros(rows, settings["context"], reference.VOCABULARY, requires_grad=True)
        stage = pipelining.PipelineStage(self.model, rank, size, torch.device("cpu"),
                                         input_args=tokens if self.is_first else hidden,
                                         output_args=logits if self.is_last else hidden)
        self.schedule = pipelining.Schedule1F1B(stage, settings["microbatches"], loss_fn=reference.Gpt.loss)

    def backward(self, data, target):
        losses = []
        self.schedule.step(*([data.contiguous()] if self.is_first else []),
                           **({"target": target.contiguous(), "losses": losses} if self.is_last else {}))
        return torch.stack(losses).detach().double().mean() if self.is_last else torch.zeros((), dtype=torch.double)


def main():
    strategy, settings = sys.argv[1], json.loads(pathlib.Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    trained = Pipelined(settings) if strategy == "pp" else Whole(strategy, settings)
    data, target, _, _ = reference.text_samples(settings["text"], settings["context"], settings["held_out"],
                                                settings["context"] + 1)
    optimizer = reference.make_optimizer(
        trained.model, "AdamW", {"lr": settings["learning_rate"], "betas": tuple(settings["betas"]),
                                 "eps": settings["epsilon"], "weight_decay": settings["weight_decay"], "fused": True})
    order = reference.batches(len(data), settings["batch_size"], settings["seed"],
                              *((rank, size) if trained.shares_batch else ()))
    for step in range(1, settings["steps"] + 1):
        indices = next(order)
        optimizer.zero_grad()
        loss = trained.backward(data[indices], target[indices])
        optimizer.step()
        if strategy != "tp":  # all ranks of tp have the same loss
            dist.all_reduce(loss)
        if trained.shares_batch:
            loss /= size
        if rank == 0:
            print(f"step {step}/{settings['steps']}  loss {loss.item():.8f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
