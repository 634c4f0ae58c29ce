"""Train with one process per GPU, as with torch's own DistributedDataParallel.

torchrun --nproc-per-node 2 examples/one_process_per_gpu.py    # 2 GPUs; without any, the CPU twice
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dataparallel as dp

dp.init_process_group()  # gloo, and NCCL where there are GPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
device = dp.accelerators()[dist.get_node_local_rank(0)] if dp.accelerators() else "cpu"

torch.manual_seed(0)  # the same data in every process
x = torch.randn(5000, 64)
y = (x @ torch.randn(64, 4)).argmax(1)
train = TensorDataset(x[:4000], y[:4000])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=200 // world_size, sampler=sampler)

net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 4))
model = dp.DistributedDataParallel(net, [device], average="samples")
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = model.loss(criterion, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        accuracy = (model(x[4000:]).argmax(1).cpu() == y[4000:]).float().mean()
    if rank == 0:
        print(f"epoch {epoch + 1}/5: loss {loss.item():.3f}, test accuracy {accuracy:.1%}")
dist.destroy_process_group()
