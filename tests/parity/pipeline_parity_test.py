#!/usr/bin/env python3
"""Compares 30 losses of a GPT in a cadre::Pipeline on three processes with torch.distributed.pipelining on three
processes over gloo, and with plain PyTorch on one process, from the same initial values on the same tokens.

    pipeline_parity_test.py CADRE PROGRAM [--only 1f1b-tied ...] [--one-in N]

CADRE is the command, PROGRAM is cadre_pipeline_parity; --one-in 4 runs the quarter of the cases that the
number in CADRE_CASES_SEED (default 1) picks. Prints the largest relative difference of each case; exits 1
when one is above the bound, when a loss falls by less than a fifth, or when a defect planted into the
training on one process moves the losses by less than ten times the bound.
"""

import argparse
import pathlib
import sys
import tempfile
import typing

import torch
from torch import distributed
from torch.distributed import pipelining
from torch.nn import functional as F

import gloo_job
import reference
import safetensors_file
from case_share import share_of
from gloo_job import difference

NUM_STEPS = 30
WORLD_SIZE = 3
SEED = 11
TIMEOUT_S = 100
# pipeline_parity_main.cpp has the same numbers.
LAYERS, HEADS, WIDTH, CONTEXT = 6, 2, 32, 24
OPTIMIZERS = {"sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
              "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.99),
                                                            weight_decay=0.1)}
NUM_ROWS = 12
# Both libraries run the same kernels on the same values, so only roundings to float32 differ: of
# the loss, of sums of gradients over microbatches, and of the optimizer's updates. Measured: 1.9e-7
# at most.
TOLERANCE = 1e-6


class Case(typing.NamedTuple):
    schedule: str  # the name of the schedule in Cadre
    pytorch_name: str
    stages_per_rank: int
    microbatches: int
    optimizer: str
    tied: bool = False  # the head has the weight of the token embedding

    @property
    def num_stages(self):
        return WORLD_SIZE * self.stages_per_rank


CASES = {
    "gpipe": Case("gpipe", "GPipe", 1, 4, "adamw"),
    "1f1b": Case("1f1b", "1F1B", 1, 6, "adamw"),
    "1f1b-tied": Case("1f1b", "1F1B", 1, 6, "sgd", tied=True),
    "interleaved-1f1b": Case("interleaved-1f1b", "Interleaved1F1B", 2, 6, "adamw"),
    "interleaved-1f1b-tied": Case("interleaved-1f1b", "Interleaved1F1B", 2, 6, "sgd", tied=True),
    "interleaved-zero-bubble": Case("interleaved-zero-bubble", "InterleavedZeroBubble", 2, 6, "sgd"),
    "zb-v": Case("zb-v", "ZBVZeroBubble", 2, 6, "adamw"),
    "zb-v-tied": Case("zb-v", "ZBVZeroBubble", 2, 4, "sgd", tied=True),
}

# Defects that a pipeline could have. Each must change the losses by at least ten times the bound,
# with two exceptions: a missing division under AdamW, where a factor of all gradients has no
# effect, and a missing sum of tied gradients if no weight is tied.
PLANTS = ("swapped_microbatches", "lost_microbatch", "no_division", "lost_weight_gradient", "untied_gradients")


def plants_of(case):
    unseen = {"no_division"} if case.optimizer == "adamw" else set()
    return [plant for plant in PLANTS if plant not in unseen | (set() if case.tied else {"untied_gradients"})]


class GptStage(torch.nn.Module):
    """A stage of reference.Gpt with an untied head. Stage 0 of 1 is the whole model."""

    def __init__(self, number, num_stages):
        super().__init__()
        if number == 0:
            self.wte = torch.nn.Embedding(reference.VOCABULARY, WIDTH)
            self.wpe = torch.nn.Embedding(CONTEXT, WIDTH)
        for i in range(LAYERS * number // num_stages, LAYERS * (number + 1) // num_stages):
            self.add_module(f"h_{i}", reference.Block(HEADS, WIDTH))
        if number == num_stages - 1:
            self.ln_f = torch.nn.LayerNorm(WIDTH)
            self.lm_head = torch.nn.Linear(WIDTH, reference.VOCABULARY, bias=False)

    def forward(self, x):
        if hasattr(self, "wte"):
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for child in self.children():
            if isinstance(child, reference.Block):
                x = child(x)
        return self.lm_head(self.ln_f(x)) if hasattr(self, "lm_head") else x


def make_model(case):
    torch.manual_seed(SEED)
    model = GptStage(0, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.02)
            elif name.endswith("bias"):
                parameter.zero_()
        if case.tied:
            model.lm_head.weight.copy_(model.wte.weight)
    return model


def make_stage(case, number):
    stage = GptStage(number, case.num_stages)
    values = dict(make_model(case).named_parameters())
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(values[name])
    return stage


def make_tokens():
    """Returns tokens of shape (steps, rows, context + 1)."""
    text = "".join(f"line {i * i % 97} of a text to learn by heart\n" for i in range(400))
    count = NUM_STEPS * NUM_ROWS * (CONTEXT + 1)
    return torch.tensor(list(text.encode())[:count]).view(NUM_STEPS, NUM_ROWS, CONTEXT + 1)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def backward(model, inputs, targets, microbatches, plant):
    """Computes the gradients of the mean loss over the batch, and returns that loss. With `plant`, the gradients are
    those of a pipeline with this defect."""
    rows = len(inputs) // microbatches
    if plant == "swapped_microbatches":
        targets = torch.cat((targets[rows:2 * rows], targets[:rows], targets[2 * rows:]))
    loss = loss_of(model(inputs), targets)
    if plant == "lost_microbatch":
        (loss_of(model(inputs[rows:]), targets[rows:]) * (microbatches - 1) / microbatches).backward()
    else:
        loss.backward()
    if plant == "no_division":
        for parameter in model.parameters():
            parameter.grad.mul_(microbatches)
    if plant == "lost_weight_gradient":
        model.h_2.mlp_c_fc.weight.grad = None
    return loss.item()


def train_alone(case, plant=None):
    model = make_model(case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    losses = []
    for step in make_tokens():
        optimizer.zero_grad()
        losses.append(backward(model, step[:, :-1], step[:, 1:], case.microbatches, plant))
        if case.tied and plant != "untied_gradients":
            total = model.wte.weight.grad + model.lm_head.weight.grad
            model.wte.weight.grad, model.lm_head.weight.grad = total, total.clone()
        optimizer.step()
    return losses


def stages_of_rank(case, rank):
    if case.schedule == "zb-v":
        return [rank, case.num_stages - 1 - rank]
    return list(range(rank, case.num_stages, WORLD_SIZE))


def sum_tied_gradients(modules, ends):
    """Sums the gradients of the tied weights. `ends` is the group of the ranks of the first and the
    last stage."""
    tied = [weight for module in modules for weight in
            ([module.wte.weight] if hasattr(module, "wte") else []) +
            ([module.lm_head.weight] if hasattr(module, "lm_head") else [])]
    if not tied:
        return
    total = sum(weight.grad for weight in tied)
    if len(tied) == 1:
        distributed.all_reduce(total, group=ends)
    for weight in tied:
        weight.grad = total.clone()


def pytorch_stage(case, module, number):
    """Makes a stage of PyTorch. The shapes are passed, because PyTorch would infer them with messages that need
    numpy."""
    rows = NUM_ROWS // case.microbatches
    tokens = torch.zeros(rows, CONTEXT, dtype=torch.long)
    hidden = torch.zeros(rows, CONTEXT, WIDTH, requires_grad=True)
    logits = torch.zeros(rows, CONTEXT, reference.VOCABULARY, requires_grad=True)
    return pipelining.PipelineStage(module, number, case.num_stages, torch.device("cpu"),
                                    input_args=hidden if number > 0 else tokens,
                                    output_args=hidden if number < case.num_stages - 1 else logits)


def train_pipelined(case, rank, ends):
    """Returns the losses of all steps, on every rank."""
    numbers = stages_of_rank(case, rank)
    modules = [make_stage(case, number) for number in numbers]
    stages = [pytorch_stage(case, module, number) for module, number in zip(modules, numbers)]
    made_of = pipelining.schedules.get_schedule_class(case.pytorch_name)
    schedule = made_of(stages if case.stages_per_rank > 1 else stages[0], case.microbatches, loss_fn=loss_of)
    optimizer = OPTIMIZERS[case.optimizer]([p for module in modules for p in module.parameters()])
    last_rank = 0 if case.schedule == "zb-v" else WORLD_SIZE - 1
    losses = []
    for step in make_tokens():
        optimizer.zero_grad()
        of_microbatches = []
        inputs = (step[:, :-1].contiguous(),) if rank == 0 else ()
        at_the_end = {"target": step[:, 1:].contiguous(), "losses": of_microbatches} if rank == last_rank else {}
        schedule.step(*inputs, **at_the_end)
        if case.tied:
            sum_tied_gradients(modules, ends)
        optimizer.step()
        loss = torch.zeros(1, dtype=torch.double)
        if rank == last_rank:
            loss += torch.stack(of_microbatches).double().mean().item()
        distributed.broadcast(loss, src=last_rank)
        losses.append(loss.item())
    return losses


def run_gloo_rank(cases):
    """Runs one process of the gloo job."""
    ends = None

    def train(name):
        nonlocal ends
        ends = ends or distributed.new_group([0, WORLD_SIZE - 1])
        return train_pipelined(CASES[name], distributed.get_rank(), ends)

    gloo_job.print_losses(train, cases)


def train_cadre(command, program, folder, name):
    case = CASES[name]
    data, losses = folder / f"{name}.safetensors", folder / f"{name}.losses"
    safetensors_file.write(data, {**dict(make_model(case).named_parameters()), "tokens": make_tokens()})
    return gloo_job.losses_of_cadre(
        command, WORLD_SIZE, program, data, case.schedule, case.stages_per_rank, case.microbatches, case.optimizer,
        losses, *(["tied"] * case.tied), losses=losses, timeout_s=TIMEOUT_S)


def compare(command, program, cases):
    torch.set_num_threads(1)
    failed = []
    with tempfile.TemporaryDirectory(prefix="cadre_pipeline_parity_") as name:
        folder = pathlib.Path(name)
        with gloo_job.running(__file__, WORLD_SIZE, folder, cases, TIMEOUT_S) as losses_of_gloo:
            own = {case: train_cadre(command, program, folder, case) for case in cases}
            single = {case: train_alone(CASES[case]) for case in cases}
            pipelined = losses_of_gloo()
    for case in cases:
        assert len(own[case]) == NUM_STEPS
        to_single, to_gloo = difference(own[case], single[case]), difference(own[case], pipelined[case])
        # The smallest change of the losses by any of the defects that must be noticed.
        mildest = min(difference(train_alone(CASES[case], plant), single[case]) for plant in plants_of(CASES[case]))
        learned = own[case][-1] < 0.8 * own[case][0]
        good = learned and max(to_single, to_gloo) <= TOLERANCE and mildest >= 10 * TOLERANCE
        failed += [] if good else [case]
        print(f"{case:24} loss {own[case][0]:.4f} to {own[case][-1]:.4f}; largest relative difference "
              f"{to_gloo:.1e} to torch.distributed.pipelining, {to_single:.1e} to one process; planted defects "
              f"{mildest:.1e}{'' if good else '  FAILED'}")
    print(f"pipeline parity: {len(cases) - len(failed)} of {len(cases)} cases within their bounds")
    return 1 if failed else 0


def main():
    if sys.argv[1:2] == [gloo_job.FLAG]:
        run_gloo_rank(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", metavar="CADRE")
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--one-in", type=int, default=1)
    options = parser.parse_args()
    return compare(options.command, options.program, share_of(options.only, options.one_in))


if __name__ == "__main__":
    sys.exit(main())
