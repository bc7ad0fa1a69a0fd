#!/usr/bin/env python3
"""Compares, on real images, the mean accuracy of `cadre train` over 3 seeds with that of PyTorch, each with its own
initial values and random numbers.

    parity_mnist.py CADRE FOLDER [--epochs 3]

FOLDER has MNIST's files, or only the two t10k files: then the first 8,000 of its images are for training and the
other 2,000 are for evaluation. Prints the accuracy of each seed; exits 1 when the means are more than one
percentage point apart.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch

import reference

SEEDS = (1, 2, 3)
BATCH_SIZE = 64
LEARNING_RATE = 1.0  # the rate of Adadelta in PyTorch's example, with a decay by 0.7 each epoch
GAMMA = 0.7
HELD_OUT = 0.2
MAX_DIFFERENCE = 0.01
TIMEOUT_S = 1800


def has(folder, part):
    return any(os.path.exists(f"{folder}/{part}-images-idx3-ubyte{suffix}") for suffix in ("", ".gz"))


def read_data(folder):
    """Returns (training data, target, held-out data, target), divided as the trainer divides them."""
    if has(folder, "train") and has(folder, "t10k"):
        return *reference.images(folder, "train"), *reference.images(folder, "t10k")
    data, target = reference.images(folder, "train" if has(folder, "train") else "t10k")
    cut = len(data) - int(len(data) * HELD_OUT)
    return data[:cut], target[:cut], data[cut:], target[cut:]


def train_torch(seed, epochs, data, target, held_data, held_target):
    torch.manual_seed(seed)
    model = reference.MnistCnn()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=GAMMA)
    order = reference.batches(len(data), BATCH_SIZE, seed)
    for _ in range(epochs):
        for _ in range(len(data) // BATCH_SIZE):
            indices = next(order)
            optimizer.zero_grad()
            model.loss(model(data[indices]), target[indices]).backward()
            optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(part).argmax(1) == labels).sum().item()
                    for part, labels in zip(held_data.split(500), held_target.split(500)))
    return right / len(held_data)


def train_cadre(command, seed, epochs, folder, runs):
    config = pathlib.Path(__file__).resolve().parents[2] / "examples/mnist.toml"
    done = subprocess.run(
        [command, "train", str(config), f"data.path={folder}", f"run.seed={seed}",
         f"run.epochs={epochs}", f"run.global_batch_size={BATCH_SIZE}", f"data.held_out={HELD_OUT}",
         "optimizer.kind=adadelta", f"optimizer.learning_rate={LEARNING_RATE}", "schedule.kind=step",
         f"schedule.gamma={GAMMA}", f"run.folder={runs}", f"run.name=seed{seed}",
         "--nproc-per-node", "2"], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        sys.exit(f"cadre train ended with {done.returncode}\n{done.stdout}{done.stderr}")
    lines = [json.loads(line) for line in open(f"{runs}/seed{seed}/metrics.jsonl")]
    return lines[-1]["accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", metavar="CADRE")
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    folder = os.path.abspath(options.folder)
    tensors = read_data(folder)
    print(f"{len(tensors[0])} images, {len(tensors[2])} held out, {options.epochs} epochs", flush=True)
    own, theirs = [], []
    with tempfile.TemporaryDirectory(prefix="cadre_parity_") as runs:
        for seed in SEEDS:
            own.append(train_cadre(options.command, seed, options.epochs, folder, runs))
            theirs.append(train_torch(seed, options.epochs, *tensors))
            print(f"seed {seed}: {100 * own[-1]:.2f} % on two processes, PyTorch {100 * theirs[-1]:.2f} %",
                  flush=True)
    means = [sum(values) / len(values) for values in (own, theirs)]
    print(f"mean: {100 * means[0]:.2f} %, PyTorch {100 * means[1]:.2f} %, "
          f"{100 * (means[0] - means[1]):+.2f} points")
    return 0 if abs(means[0] - means[1]) <= MAX_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
