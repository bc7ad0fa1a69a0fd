#!/usr/bin/env python3
"""Tests on real data that a GPT on text and the MNIST network on images end at the same loss under every strategy of
the trainer, on 1, 2 and 4 processes.

    same_loss.py CADRE DATA [--steps 60]

DATA has tinyshakespeare/input.txt and mnist/ (idx files, plain or .gz); a missing one is skipped. Prints one table of
the last training loss and the held-out loss after it. Exits with 1 if one of them differs from that of `single` by more
than 0.01, or did not fall.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

OFFLOAD = "parallel.offload"  # an empty folder for each run
# Maps the title of a row to the strategy and to further keys of its configuration.
STRATEGIES = {
    "single": ("single", {}), "ddp": ("ddp", {}), "zero1": ("zero1", {}), "zero2": ("zero2", {}),
    "fsdp": ("fsdp", {}), "fsdp mapped": ("fsdp", {"parallel.form": "mapped"}),
    "fsdp offload": ("fsdp", {OFFLOAD: "files"}),
    "fsdp kept": ("fsdp", {"parallel.reshard": "after_backward"}),
    "hsdp": ("hsdp", {}), "hsdp mapped": ("hsdp", {"parallel.form": "mapped"}),
    "hsdp offload": ("hsdp", {OFFLOAD: "files"})}
RANKS = (1, 2, 4)
MAX_DIFFERENCE = 0.01
TIMEOUT_S = 600

COMMON = {"run.seed": 5, "run.evaluate_tokens": 4096, "schedule.warmup_steps": 0, "sample.tokens": 0}
MODELS = {
    "gpt on text": ("tinyshakespeare/input.txt", {
        "model.kind": "gpt", "model.layers": 2, "model.heads": 2, "model.width": 48, "model.context": 32,
        "run.global_batch_size": 12, "optimizer.kind": "adamw", "optimizer.learning_rate": 3e-3}),
    "cnn on images": ("mnist", {
        "model.kind": "cnn", "model.dropout": "false", "data.kind": "mnist", "data.held_out": 0.2,
        "run.global_batch_size": 12, "optimizer.kind": "sgd", "optimizer.learning_rate": 0.01}),
}


def train(command, folder, name, keys, num_ranks):
    """Returns (first loss, last loss, held-out loss)."""
    config = folder / "empty.toml"
    config.touch()
    keys = COMMON | keys
    if OFFLOAD in keys:
        keys[OFFLOAD] = folder / f"{name}_{keys[OFFLOAD]}"
        keys[OFFLOAD].mkdir()
    words = [f"{key}={value}" for key, value in keys.items()]
    words += [f"run.name={name}", f"run.folder={folder / 'runs'}"]
    done = subprocess.run([command, "train", str(config), *words, "--nproc-per-node", str(num_ranks)],
                          capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        sys.exit(f"{name}: cadre train ended with {done.returncode}\n{done.stdout}{done.stderr}")
    with open(folder / "runs" / name / "metrics.jsonl", encoding="utf-8") as metrics:
        lines = [json.loads(line) for line in metrics]
    losses = [line["loss"] for line in lines if "loss" in line]
    return losses[0], losses[-1], lines[-1]["held_out_loss"]


def ranks_of(strategy):
    return (1,) if strategy == "single" else RANKS


def compare(command, data, num_steps):
    failed = 0
    with tempfile.TemporaryDirectory(prefix="cadre_same_loss_") as name:
        folder = pathlib.Path(name)
        for model, (path, keys) in MODELS.items():
            if not (data / path).exists():
                print(f"{model}: left out, there is no {data / path}")
                continue
            keys = keys | {"data.path": data / path, "run.steps": num_steps}
            expected = None
            for title, (strategy, variant) in STRATEGIES.items():
                for num_ranks in ranks_of(strategy):
                    # With fewer than four ranks, each rank is a separate replica.
                    replicas = {"parallel.replicas": min(num_ranks, 2)} if strategy == "hsdp" else {}
                    first, last, held_out = train(
                        command, folder, f"{model}_{title}_{num_ranks}".replace(" ", "_"),
                        keys | {"parallel.strategy": strategy} | variant | replicas, num_ranks)
                    expected = expected or (last, held_out)
                    off = max(abs(last - expected[0]), abs(held_out - expected[1]))
                    good = off <= MAX_DIFFERENCE and last < first
                    failed += not good
                    print(f"{model:14} {title:12} {num_ranks} ranks  loss {first:.4f} to {last:.6f}, "
                          f"held out {held_out:.6f}, differs by {off:.1e}{'' if good else '  FAILED'}",
                          flush=True)
    print("same_loss: " + (f"{failed} runs failed" if failed else "every run ends at the same loss"))
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", metavar="CADRE")
    parser.add_argument("data", metavar="DATA", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    return compare(options.command, options.data, options.steps)


if __name__ == "__main__":
    sys.exit(main())
