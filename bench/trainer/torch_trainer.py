"""The counterpart of `cadre train` in PyTorch: the same model, weights, data and steps, with
DistributedDataParallel over gloo. Prints a line for each step, as the trainer does.

    torchrun --nproc-per-node 2 torch_trainer.py SETTINGS.json

The options are the fastest ones of PyTorch for this: fused AdamW, gradients as views of the
buckets, data in memory.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tests/parity"))
import reference


def make_model(settings):
    """Makes the model, equal on every rank. Its initial values are those that the trainer reads from a file."""
    torch.manual_seed(settings["seed"])
    return reference.Gpt(settings["layers"], settings["heads"], settings["width"], settings["context"])


def main():
    settings = json.loads(pathlib.Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(settings)
    replica = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    data, target, _, _ = reference.text_samples(settings["text"], settings["context"], settings["held_out"],
                                                settings["evaluated"])
    optimizer = reference.make_optimizer(model, "AdamW", {
        "lr": settings["learning_rate"], "betas": tuple(settings["betas"]), "eps": settings["epsilon"],
        "weight_decay": settings["weight_decay"], "fused": True})
    order = reference.batches(len(data), settings["batch_size"], settings["seed"], rank, world_size)
    for step in range(1, settings["steps"] + 1):
        indices = next(order)
        optimizer.zero_grad()
        loss = model.loss(replica(data[indices]), target[indices])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
        optimizer.step()
        mean = loss.detach().double() / world_size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}/{settings['steps']}  loss {mean.item():.8f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
