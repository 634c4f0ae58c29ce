"""Train so that `kill -9` at any time changes nothing: started again, it goes on where it was.

python examples/resume.py
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dataparallel as dp
from dataparallel import checkpoint

dp.init_process_group()  # also finds the processes that torchrun has started again
number = len(dp.accelerators()) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
first = number * int(os.environ.get("LOCAL_RANK", 0))
devices = dp.accelerators()[first : first + number] or ["cpu", "cpu"]

torch.manual_seed(0)  # the same data in every process
x = torch.randn(4000, 64)
data = TensorDataset(x, (x @ torch.randn(64, 4)).argmax(1))
sampler = checkpoint.ResumableSampler(data, batch_size=100)  # of all processes together
loader = DataLoader(data, batch_sampler=sampler)

net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 4))
model = dp.DistributedDataParallel(net, devices, average="samples")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
torch.manual_seed(dist.get_rank())  # other dropout masks in every process

state = ("out/resume", model, optimizer)
step = checkpoint.load(*state, sampler=sampler, missing_ok=True).step
print(f"rank {dist.get_rank()} begins at step {step}", flush=True)
while sampler.epoch < 10:
    for inputs, targets in sampler.over(loader):
        loss = model.loss(nn.functional.cross_entropy, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
            checkpoint.save(*state, sampler=sampler, step=step, asynchronous=True)
checkpoint.save(*state, sampler=sampler, step=step)
checkpoint.close()
dist.destroy_process_group()
