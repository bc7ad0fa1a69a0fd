#!/usr/bin/env python3
"""Compares 30 losses of `cadre train` on two processes, and the held-out loss after them, with those of PyTorch on one
process and on two processes with DistributedDataParallel over gloo. Both start from the same initial values and get the
same data in the same order. The cases are each of the six optimizers on a gpt and on the MNIST network, and the default
optimizer on the two perceptrons, for text and for images. The sharded strategies are
compared with ZeroRedundancyOptimizer and fully_shard (FSDP2) over gloo, and tensor parallelism, also with
sequence parallelism and on four processes, with parallelize_module of torch.distributed.tensor.

    parity_test.py CADRE [--only gpt-adam ...] [--one-in N]

CADRE is the command; --one-in 4 runs the quarter of the cases that the number in CADRE_CASES_SEED
(default 1) picks. Prints the largest relative difference of each case; exits 1 when one is above its
bound, or when a defect planted into a sharded case moves the losses by less than ten times that. Runs on
any Python with torch; numpy is not needed.
"""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

import dtensor_gpt
import gloo_job
import idx_file
import reference
import safetensors_file
from case_share import share_of
from gloo_job import difference

NUM_STEPS = 30
# Both libraries run the same kernels on the same values, so their losses differ only by roundings
# to float32, of 2^-24 each: of the losses themselves, in the mean over a rank's samples and over
# ranks, and of parameters, if a norm is summed or an optimizer's update is computed in another
# order. Measured: 2.8e-7 at most. The bound is three times that, and a tenth of the effect of a
# reduction in bfloat16.
TOLERANCE = 8e-7
# Adadelta divides by the root of sums that begin at zero, which enlarges rounding errors. Measured:
# 8.3e-7.
ADADELTA_TOLERANCE = 2.5e-6
# If parameters are rounded to bfloat16, small differences vanish, unless a value is near the border
# between two neighbours; the two values then differ by 2^-8 to 2^-7 of themselves. Under SGD
# without clipping this cannot happen: a sum of two addends does not depend on their order, its half
# is exact, and both libraries compute the update by the same operations. So the losses are equal,
# and TOLERANCE holds. Under AdamW with clipping some values do differ. The largest effect is that
# on the logits, which are about 1 while the loss is 3 to 5.5: at most 2^-7 / 3 for a token. A loss
# is the mean over at least 96 tokens, whose roundings are independent: 2^-7 / 3 / sqrt(96).
# Measured: 1.1e-4.
BF16_ADAMW_TOLERANCE = 2.7e-4
WORLD_SIZE = 2
SEED = 11
TIMEOUT_S = 100
CONTEXT, LAYERS, HEADS, WIDTH, WINDOW = 24, 2, 2, 32, 5
NUM_EVALUATED = 100  # tokens

# Each entry has: the kind in the trainer, the class in torch.optim, the options of the class, the
# keys of the trainer.
OPTIMIZERS = {
    "adamw": ("AdamW", dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
              dict(learning_rate=1e-3, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1)),
    "adam": ("Adam", dict(lr=1e-3, betas=(0.9, 0.999), weight_decay=1e-3),
             dict(learning_rate=1e-3, weight_decay=1e-3)),
    "sgd": ("SGD", dict(lr=1.5e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
            dict(learning_rate=1.5e-2, momentum=0.9, nesterov=True, weight_decay=1e-3)),
    "adagrad": ("Adagrad", dict(lr=5e-3, lr_decay=0.02, weight_decay=1e-3),
                dict(learning_rate=5e-3, rate_decay=0.02, weight_decay=1e-3)),
    "rmsprop": ("RMSprop", dict(lr=2e-4, alpha=0.95, momentum=0.5, weight_decay=1e-3),
                dict(learning_rate=2e-4, alpha=0.95, momentum=0.5, weight_decay=1e-3)),
    "adadelta": ("Adadelta", dict(lr=1.0, rho=0.9, weight_decay=1e-3),
                 dict(learning_rate=1.0, rho=0.9, weight_decay=1e-3)),
}
# The optimizers for which the trainer calls a fused kernel. PyTorch's are made fused, too, so that
# both call the same kernel: the unfused one rounds an update differently. If that moves an
# activation across the border of a ReLU, losses differ by up to 1.3e-5 ten steps later (cnn-adam
# without AVX-512), even between PyTorch's own two kernels.
FUSED = ("adamw", "adam", "sgd", "adagrad")
# Defects that a sharded wrapper could have, planted into the training on two ranks. Each must
# change the losses by at least ten times the bound, except for those that plants_of() leaves out,
# because the same strategy shows them under SGD.
PLANTS = ("no_reduction", "no_division", "no_gather", "dropped_bucket", "bf16_reduction")
# Defects that tensor parallelism could have, with the same requirement. The first one exists only
# under sequence parallelism.
DIVISION_PLANTS = ("lost_norm_gradients", "lost_input_gradients", "added_biases")

CASES = [f"{model}-{kind}" for model in ("gpt", "cnn") for kind in OPTIMIZERS]
CASES += ["mlp_text-adamw", "mlp_images-adamw"]
# Maps a strategy of the trainer to its counterpart in PyTorch. The name of a case ends with the
# strategy; without one it is ddp.
STRATEGIES = {"zero2": "zero", "fsdp": "fsdp", "fsdp_bf16": "fsdp"}
CASES += [f"gpt-adamw-{strategy}" for strategy in STRATEGIES]
CASES += [f"cnn-adamw-{strategy}" for strategy in ("zero2", "fsdp")]
CASES += [f"cnn-sgd-{strategy}" for strategy in STRATEGIES]

# Maps the name of a division of the model to the keys of the trainer. It ends the name of a case,
# too.
DIVISIONS = {"tensor": {"parallel.tensor": 2}, "sequence": {"parallel.tensor": 2, "parallel.sequence": True},
             "sequence4": {"parallel.tensor": 4, "parallel.sequence": True}}
CASES += [f"gpt-{kind}-{division}" for kind in ("adamw", "sgd") for division in ("tensor", "sequence")]
CASES += ["gpt_heads-adamw-sequence4"]

# The settings that differ between the models: batch size; the norm to which gradients are clipped
# (0: no clipping); steps and factor of StepLR (0: constant learning rate).
SETTINGS = {"gpt": dict(batch_size=8, clip=1.0, step_size=0, gamma=1.0),
            "cnn": dict(batch_size=8, clip=0.0, step_size=9, gamma=0.5)}
SETTINGS |= {"gpt_heads": SETTINGS["gpt"], "mlp_text": SETTINGS["gpt"], "mlp_images": SETTINGS["cnn"]}
ON_TEXT = ("gpt", "gpt_heads", "mlp_text")


def heads_of(name):
    return 4 if name == "gpt_heads" else HEADS


def make_model(name):
    torch.manual_seed(SEED)
    if name.startswith("gpt"):
        return reference.Gpt(LAYERS, heads_of(name), WIDTH, CONTEXT)
    if name == "mlp_text":
        return reference.WindowMlp(LAYERS, WIDTH, WINDOW)
    if name == "mlp_images":
        return reference.ImageMlp(LAYERS, WIDTH)
    return reference.MnistCnn(dropout=False)


def make_data(folder):
    """Writes a text and images, so few that the steps of a case use each about twice: the order of a second epoch is
    tested, too."""
    with open(folder / "text", "w", encoding="utf-8") as text:
        for i in range(120):
            text.write(f"line {i * i % 97} of a text to learn by heart\n")
    idx_file.make_images(str(folder / "images"), 150, wrong_labels=0.3)
    for name in SETTINGS:
        safetensors_file.write(folder / f"{name}.safetensors", dict(make_model(name).named_parameters()))


def split_case(case):
    """Returns (model, optimizer, strategy)."""
    return tuple((case + "-ddp").split("-")[:3])


def num_ranks_of(case):
    return DIVISIONS.get(split_case(case)[2], {}).get("parallel.tensor", WORLD_SIZE)


def has_rounding_steps(case):
    """Returns whether roundings to bfloat16 make the two libraries differ; see BF16_ADAMW_TOLERANCE."""
    _, kind, strategy = split_case(case)
    return strategy.endswith("bf16") and kind != "sgd"


def bound_of(case):
    if has_rounding_steps(case):
        return BF16_ADAMW_TOLERANCE
    return ADADELTA_TOLERANCE if split_case(case)[1] == "adadelta" else TOLERANCE


def plants_of(case):
    """Returns the defects that must be noticed in this case. A factor of all gradients has no effect under AdamW, nor
    under clipping; and rounding of gradients to bfloat16 changes AdamW's updates less than the case's bound."""
    strategy = split_case(case)[2]
    if strategy in DIVISIONS:
        return DIVISION_PLANTS[0 if strategy.startswith("sequence") else 1:]
    if strategy not in STRATEGIES:
        return ()
    unseen = {"no_division"} if split_case(case)[1] == "adamw" else set()
    unseen |= {"bf16_reduction"} if has_rounding_steps(case) else set()
    return [plant for plant in PLANTS if plant not in unseen]


def shard_model(model, strategy):
    """Applies FSDP2 to each block, and to the rest of the model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy} if strategy.endswith("bf16") else {}
    for child in model.children():
        if isinstance(child, reference.Block):
            fully_shard(child, **options)
    return fully_shard(model, **options)


def reduce_in_bf16(model, data, target, indices):
    """Replaces the gradients by the mean over the ranks; each gradient and the mean are rounded to bfloat16."""
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank in range(WORLD_SIZE):
        own = indices[rank::WORLD_SIZE]
        model.zero_grad()
        model.loss(model(data[own]), target[own]).backward()
        for total, parameter in zip(sums, model.parameters()):
            total += parameter.grad.bfloat16() / WORLD_SIZE
    for total, parameter in zip(sums, model.parameters()):
        parameter.grad = total.bfloat16().float()


def step_wrongly(plant, parameters, optimizer):
    """Runs optimizer.step() with the result that rank 0 would get if data that rank 1 owns never arrived: its
    parameters, or the gradients of one bucket in three."""
    if plant == "dropped_bucket":
        for parameter in parameters[1::3]:
            parameter.grad = None
        return optimizer.step()
    others = parameters[len(parameters) // 2:]
    before = [parameter.detach().clone() for parameter in others]
    optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(others, before):
            parameter.copy_(value)


def plant_into_layers(gpt, plant, num_ranks):
    """Changes the model to what rank 0 would compute with a defect: without the other ranks' parts of the gradients of
    norms, or of the gradient of an MLP's input; or with a bias that is added on each rank."""

    def of_own_tokens(norm):
        def forward(x):
            own = x.shape[1] // num_ranks
            rest = F.layer_norm(x[:, own:], norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps)
            return torch.cat([type(norm).forward(norm, x[:, :own]), rest], dim=1)
        return forward

    def of_own_features(layer):
        def forward(x):
            own = layer.out_features // num_ranks
            return torch.cat([F.linear(x, layer.weight[:own], layer.bias[:own]),
                              F.linear(x.detach(), layer.weight[own:], layer.bias[own:])], dim=-1)
        return forward

    def with_all_biases(layer):
        return lambda x: F.linear(x, layer.weight, num_ranks * layer.bias)

    suffixes, planted = {"lost_norm_gradients": (("ln_1", "ln_2", "ln_f"), of_own_tokens),
                         "lost_input_gradients": (("mlp_c_fc",), of_own_features),
                         "added_biases": (("c_proj",), with_all_biases)}[plant]
    for name, layer in gpt.named_modules():
        if name.endswith(suffixes):
            layer.forward = planted(layer)


def samples_of(folder, name):
    """Returns (data, target, held_data, held_target)."""
    if name in ON_TEXT:
        return reference.text_samples(folder / "text", CONTEXT, held_out=0.05, num_evaluated=NUM_EVALUATED)
    data, target = reference.images(folder / "images", "train")
    cut = len(data) - int(len(data) * 0.2)
    return data[:cut], target[:cut], data[cut:], target[cut:]


def train_divided(folder, case):
    """Trains as train_reference() does, on ranks that divide the model and have the same rows."""
    name, kind, division = split_case(case)
    settings = SETTINGS[name]
    mesh = init_device_mesh("cpu", (num_ranks_of(case),))
    model = dtensor_gpt.DividedGpt(make_model(name), mesh, is_sequence_parallel=division.startswith("sequence"))
    # DTensor has no rule for the fused SGD.
    options = OPTIMIZERS[kind][1] | ({"fused": True} if kind in FUSED and kind != "sgd" else {})
    optimizer = reference.make_optimizer(model, OPTIMIZERS[kind][0], options)
    data, target, held_data, held_target = samples_of(folder, name)
    order = reference.batches(len(data), settings["batch_size"], SEED)
    losses = []
    for _ in range(NUM_STEPS):
        indices = next(order)
        optimizer.zero_grad()
        with loss_parallel():
            loss = model.loss(model(data[indices]), target[indices])
            loss.backward()
        dtensor_gpt.reduce_gradients(model)
        dtensor_gpt.clip_grad_norm_(model, settings["clip"])
        optimizer.step()
        losses.append(dtensor_gpt.whole(loss).item())
    with torch.no_grad(), loss_parallel():
        return losses + [dtensor_gpt.whole(model.loss(model(held_data), held_target)).item()]


def train_reference(folder, case, rank, world_size, plant=None):
    """Returns the losses of all steps, which are means over the whole batch for any number of ranks, and then the
    held-out loss. `plant` is a defect for a run in one process: see PLANTS and DIVISION_PLANTS."""
    name, kind, strategy = split_case(case)
    settings = SETTINGS[name]
    model = make_model(name)
    if plant in DIVISION_PLANTS:
        plant_into_layers(model, plant, num_ranks_of(case))
    data, target, held_data, held_target = samples_of(folder, name)
    replica = model
    if world_size > 1 and STRATEGIES.get(strategy) == "fsdp":
        replica = shard_model(model, strategy)
    elif world_size > 1:
        replica = torch.nn.parallel.DistributedDataParallel(model)
    is_zero = world_size > 1 and STRATEGIES.get(strategy) == "zero"
    options = dict(OPTIMIZERS[kind][1])
    is_dtensor = world_size > 1 and STRATEGIES.get(strategy) == "fsdp"
    if kind in FUSED and not (kind == "sgd" and is_dtensor):  # DTensor has no rule for the fused SGD
        options["fused"] = True
    optimizer = reference.make_optimizer(model, OPTIMIZERS[kind][0], options,
                                         ZeroRedundancyOptimizer if is_zero else None)
    schedule = None
    if settings["step_size"]:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, settings["step_size"], settings["gamma"])
    order = reference.batches(len(data), settings["batch_size"], SEED, rank, world_size)
    losses = []
    for _ in range(NUM_STEPS):
        indices = next(order)
        optimizer.zero_grad()
        loss = model.loss(replica(data[indices]).float(), target[indices])
        if plant == "no_reduction":  # uses the gradients of rank 0's rows alone
            own = indices[0::WORLD_SIZE]
            model.loss(model(data[own]), target[own]).backward()
        elif plant == "bf16_reduction":
            reduce_in_bf16(model, data, target, indices)
        else:
            loss.backward()
        if plant == "no_division":
            for parameter in model.parameters():
                parameter.grad.mul_(WORLD_SIZE)
        if settings["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        if plant in ("no_gather", "dropped_bucket"):
            step_wrongly(plant, list(model.parameters()), optimizer)
        else:
            optimizer.step()
        if schedule:
            schedule.step()
        mean = loss.detach().double() / world_size
        if world_size > 1:
            torch.distributed.all_reduce(mean)
        losses.append(mean.item())
    with torch.no_grad():
        return losses + [model.loss(model(held_data).float(), held_target).item()]


def run_gloo_rank(folder, cases):
    """Runs one process of the gloo job."""

    def train(case):
        if split_case(case)[2] in DIVISIONS:
            return train_divided(folder, case)
        return train_reference(folder, case, torch.distributed.get_rank(), WORLD_SIZE)

    gloo_job.print_losses(train, cases)


def train_cadre(command, folder, case):
    name, kind, strategy = split_case(case)
    settings = SETTINGS[name]
    keys = {"run.name": case, "run.folder": folder / "runs", "run.steps": NUM_STEPS,
            "run.global_batch_size": settings["batch_size"], "run.seed": SEED, "run.evaluate_tokens": NUM_EVALUATED,
            "model.kind": name.partition("_")[0], "model.weights": folder / f"{name}.safetensors",
            "parallel.strategy": "single" if strategy in DIVISIONS else strategy.partition("_")[0],
            "optimizer.kind": kind, "optimizer.clip_norm": settings["clip"],
            "schedule.kind": "step" if settings["step_size"] else "constant",
            "schedule.step_size": settings["step_size"], "schedule.gamma": settings["gamma"],
            "schedule.warmup_steps": 0, "sample.tokens": 0,
            "model.layers": LAYERS, "model.heads": heads_of(name), "model.width": WIDTH, "model.window": WINDOW}
    if name in ON_TEXT:
        keys |= {"model.context": CONTEXT, "data.path": folder / "text", "data.held_out": 0.05}
    else:
        keys |= {"model.dropout": False, "data.kind": "mnist", "data.path": folder / "images",
                 "data.held_out": 0.2}
    keys |= {f"optimizer.{key}": value for key, value in OPTIMIZERS[kind][2].items()}
    if strategy.endswith("bf16"):
        keys |= {"parallel.parameter_dtype": "bfloat16", "parallel.reduce_dtype": "float32"}
    keys |= DIVISIONS.get(strategy, {})
    config = folder / "empty.toml"
    config.touch()
    words = [f"{key}={str(value).lower() if isinstance(value, bool) else value}"
             for key, value in keys.items()]
    done = subprocess.run([command, "train", str(config), *words, "--nproc-per-node", str(num_ranks_of(case))],
                          capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        sys.exit(f"{case}: cadre train ended with {done.returncode}\n{done.stdout}{done.stderr}")
    lines = [json.loads(line) for line in open(folder / "runs" / case / "metrics.jsonl")]
    return [line["loss"] for line in lines if "loss" in line] + [lines[-1]["held_out_loss"]]


@contextlib.contextmanager
def running_gloo(folder, cases):
    """Starts one gloo job for each number of processes. Yields a function that returns the losses of each case."""
    with contextlib.ExitStack() as jobs:
        losses_of_jobs = []
        for num_ranks in sorted({num_ranks_of(case) for case in cases}):
            own = folder / f"gloo{num_ranks}"
            own.mkdir()
            of_job = [case for case in cases if num_ranks_of(case) == num_ranks]
            losses_of_jobs.append(jobs.enter_context(
                gloo_job.running(__file__, num_ranks, own, [str(folder), *of_job], TIMEOUT_S)))
        yield lambda: {case: losses for of_job in losses_of_jobs for case, losses in of_job().items()}


def compare(command, cases):
    torch.set_num_threads(1)
    failed = []
    with tempfile.TemporaryDirectory(prefix="cadre_parity_") as name:
        folder = pathlib.Path(name)
        make_data(folder)
        with running_gloo(folder, cases) as losses_of_gloo:
            own = {case: train_cadre(command, folder, case) for case in cases}
            single = {case: train_reference(folder, case, 0, 1) for case in cases}
            distributed = losses_of_gloo()
        for case in cases:
            assert len(own[case]) == NUM_STEPS + 1
            to_single, to_gloo = difference(own[case], single[case]), difference(own[case], distributed[case])
            strategy, plants = split_case(case)[2], plants_of(case)
            learned = own[case][-2] < (0.8 if plants else 0.97) * own[case][0]
            bound = bound_of(case)
            good = learned and to_gloo <= bound
            if not strategy.endswith("bf16"):
                # A kernel of some processors sums half of a batch in another order than the whole
                # batch.
                good = good and to_single <= bound + difference(distributed[case], single[case])
            planted = ""
            if plants:
                # The smallest change of the losses by any of the defects that must be noticed.
                mildest = min(difference(train_reference(folder, case, 0, 1, plant), single[case])
                              for plant in plants)
                good = good and mildest >= 10 * bound
                planted = f"; planted defects {mildest:.1e}"
            failed += [] if good else [case]
            print(f"{case:25} loss {own[case][0]:.4f} to {own[case][-2]:.4f}, held out "
                  f"{own[case][-1]:.4f}; largest relative difference "
                  f"{to_single:.1e} to one process, {to_gloo:.1e} to gloo{planted}{'' if good else '  FAILED'}")
    print(f"parity: {len(cases) - len(failed)} of {len(cases)} cases within their bounds")
    return 1 if failed else 0


def main():
    if sys.argv[1:2] == [gloo_job.FLAG]:
        run_gloo_rank(pathlib.Path(sys.argv[2]), sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", metavar="CADRE")
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--one-in", type=int, default=1)
    options = parser.parse_args()
    return compare(options.command, share_of(options.only, options.one_in))


if __name__ == "__main__":
    sys.exit(main())
