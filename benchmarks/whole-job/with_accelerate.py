"""The job with Accelerate, started by torchrun."""

import sys

import job
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
data = job.read("train", int(sys.argv[1]))
model = job.network()
optimizer = job.optimizer_of(model)
loader = DataLoader(data, job.BATCH_SIZE, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(int(sys.argv[2])):
    for images, labels in loader:
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    print(job.accuracy(accelerator.unwrap_model(model)))
accelerator.end_training()
