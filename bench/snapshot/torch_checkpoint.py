"""The counterpart of snapshot_stall.cpp: measures the same figures with PyTorch's FSDP2 over gloo,
fused AdamW and torch.distributed.checkpoint.

    torchrun --nproc-per-node 2 torch_checkpoint.py FOLDER default|kept [steps [layers [width [batch [saves]]]]]

default: async_save without options. kept: async_save with a stager that keeps its memory for the
next save.
"""

import ctypes
import datetime
import importlib.util
import json
import pathlib
import pickle
import shutil
import statistics
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard

WARM_UP = 4
TIMEOUT = datetime.timedelta(seconds=60)


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))


def without_numpy():
    """Replaces the only function of a checkpoint over gloo that needs numpy, if numpy is not installed."""
    def object_of(tensor, size, group=None):
        return pickle.loads(ctypes.string_at(tensor.data_ptr(), int(size)))

    if importlib.util.find_spec("numpy") is None:
        dist.distributed_c10d._tensor_to_object = object_of


def milliseconds_since(start):
    return (time.perf_counter() - start) * 1000


class Bench:
    def __init__(self, folder, way, steps, layers, width, batch, saves):
        self.folder, self.steps, self.saves = pathlib.Path(folder), steps, saves
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Layer(width) for _ in range(layers)))
        torch.manual_seed(1 + dist.get_rank())
        for unit in model:
            fully_shard(unit)
        self.model = fully_shard(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.x = torch.randn(batch, width)
        # The checkpoint uses a separate group, so that the collectives of a save cannot mix with
        # those of training.
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.options = {}
        if way == "kept":
            self.options["async_stager"] = DefaultStager(StagingOptions(False, False, False, False))
        self.last_step = 0

    def train_step(self):
        self.optimizer.zero_grad()
        loss = (self.model(self.x) - 1).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def timed_step(self):
        start = time.perf_counter()
        self.train_step()
        return milliseconds_since(start)

    def state(self):
        """Returns the state with the model's and the optimizer's own tensors, so that a load fills them in place."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def next_path(self):
        self.last_step += 1
        return self.folder / f"step-{self.last_step}"

    def remove(self, path):
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        dist.barrier()

    def background_save(self):
        step = statistics.median([self.timed_step() for _ in range(self.steps)])
        path = self.next_path()
        committed_ms = []
        committed = threading.Event()
        dist.barrier()
        start = time.perf_counter()
        future = dcp.async_save(self.state(), checkpoint_id=path, process_group=self.group,
                                **self.options)
        call = milliseconds_since(start)

        def note(_):
            committed_ms.append(milliseconds_since(start))
            committed.set()

        future.add_done_callback(note)
        self.train_step()
        stall = milliseconds_since(start) - step
        extra = stall
        while not self.agree(committed.is_set()):
            extra += self.timed_step() - step
        future.result(TIMEOUT.total_seconds())
        self.remove(path)
        return {"step_ms": step, "stall_ms": stall, "call_ms": call, "commit_ms": committed_ms[0], "extra_ms": extra}

    @staticmethod
    def agree(of_rank_0):
        flag = torch.tensor([float(of_rank_0)])
        dist.broadcast(flag, 0)
        return flag.item() > 0

    def save_and_load(self):
        path = self.next_path()
        dist.barrier()
        start = time.perf_counter()
        dcp.save(self.state(), checkpoint_id=path)
        save = milliseconds_since(start)
        expected = self.train_step()
        dist.barrier()
        start = time.perf_counter()
        dcp.load(self.state(), checkpoint_id=path)
        load = milliseconds_since(start)
        if self.train_step() != expected:
            sys.exit("torch_checkpoint: a loaded checkpoint has another loss")
        self.remove(path)
        return {"save_ms": save, "load_ms": load}

    def run(self):
        for _ in range(WARM_UP):
            self.train_step()
        medians = {}
        for measure in (self.background_save, self.save_and_load):
            seen = [measure() for _ in range(1 + self.saves)][1:]
            medians |= {key: statistics.median_high([each[key] for each in seen]) for key in seen[0]}
        if "async_stager" in self.options:
            self.options["async_stager"].close()
        return medians


def main():
    folder, way, given = sys.argv[1], sys.argv[2], [int(argument) for argument in sys.argv[3:]]
    torch.set_num_threads(1)
    without_numpy()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    figures = Bench(folder, way, *(given + [5, 6, 1024, 64, 3][len(given):])).run()
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
