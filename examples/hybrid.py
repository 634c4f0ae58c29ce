"""Train with several processes that have several devices each: all accelerators, or CPU replicas.

torchrun --nproc-per-node 2 examples/hybrid.py    # of 8 GPUs, each process takes 4
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dataparallel as dp

dp.init_process_group()
number = len(dp.accelerators()) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
first = number * int(os.environ.get("LOCAL_RANK", 0))
devices = dp.accelerators()[first : first + number] or ["cpu", "cpu"]
print(f"rank {dist.get_rank()} trains on: {', '.join(map(str, devices))}", flush=True)

torch.manual_seed(0)  # the same data in every process
x = torch.randn(4000, 64)
y = (x @ torch.randn(64, 4)).argmax(1)
train = TensorDataset(x, y)
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=200 // dist.get_world_size(), sampler=sampler)

net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 4))
model = dp.DistributedDataParallel(net, devices, average="samples")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = model.loss(nn.functional.cross_entropy, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}/5: loss {loss.item():.3f}")
dist.destroy_process_group()
