"""A script as Accelerate's guide has it: trains on the processes of the job and appends to FOLDER/losses the mean loss
of each step.

    with_accelerate.py FOLDER
"""

import pathlib
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(1)
inputs = torch.randn(96, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
model, optimizer, loader, scheduler = accelerator.prepare(
    model, optimizer, DataLoader(dataset, batch_size=8, shuffle=True), scheduler)
losses = []
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    assert accelerator.num_processes == 2, accelerator.state
    accelerator.save(accelerator.unwrap_model(model).state_dict(), pathlib.Path(sys.argv[1]) / "model.pt")
    (pathlib.Path(sys.argv[1]) / "losses").write_text("".join(f"{n} {loss!r}\n" for n, loss in enumerate(losses)))
accelerator.end_training()
