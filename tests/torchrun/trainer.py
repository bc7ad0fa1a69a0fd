"""A trainer as PyTorch's texts about torchrun show it: DistributedDataParallel over gloo, a snapshot after each epoch,
and the loss of each epoch in a file.

    trainer.py FOLDER NUM_EPOCHS
"""

import json
import os
import pathlib
import sys
import time

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, folder):
        self.rank = int(os.environ["RANK"])
        self.folder = folder
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        inputs = torch.randn(64, 8)
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
        self.loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
        self.epochs_run = 0
        self.snapshot = folder / "snapshot.pt"
        if self.snapshot.exists():
            saved = torch.load(self.snapshot)
            self.model.load_state_dict(saved["MODEL_STATE"])
            self.epochs_run = saved["EPOCHS_RUN"]
            print(f"rank {self.rank} continues at epoch {self.epochs_run}", flush=True)
        self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train(self, num_epochs):
        for epoch in range(self.epochs_run, num_epochs):
            self.loader.sampler.set_epoch(epoch)
            total = torch.zeros(())
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
                loss.backward()
                self.optimizer.step()
                total += loss.detach()
            distributed.all_reduce(total)
            if self.rank == 0:
                self.save(epoch, total.item())
            time.sleep(0.1)

    def save(self, epoch, loss):
        with open(self.folder / "losses", "a") as file:
            file.write(json.dumps([epoch, loss]) + "\n")
        # A worker may be killed here, so the snapshot is replaced as a whole.
        torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}, f"{self.snapshot}.new")
        os.replace(f"{self.snapshot}.new", self.snapshot)


def main():
    folder = pathlib.Path(sys.argv[1])
    with open(folder / "started", "a") as file:
        file.write(json.dumps([int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.getpid()]) + "\n")
    distributed.init_process_group("gloo")
    Trainer(folder).train(int(sys.argv[2]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
