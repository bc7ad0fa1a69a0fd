"""A script as Lightning's guide has it: trains with the strategy ddp on two hosts of one process each, and writes the
loss of each step to FOLDER/losses.

    with_lightning.py FOLDER
"""

import pathlib
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

folder = pathlib.Path(sys.argv[1])


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


lightning.seed_everything(1)
inputs = torch.randn(96, 8)
model = Regression()
trainer = lightning.Trainer(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=2, logger=False,
                            default_root_dir=folder, enable_progress_bar=False, sync_batchnorm=False)
trainer.fit(model, DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True))
assert trainer.world_size == 2
if trainer.is_global_zero:
    (folder / "losses").write_text("".join(f"{n} {loss!r}\n" for n, loss in enumerate(model.losses)))
