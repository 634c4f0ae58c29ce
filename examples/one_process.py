"""Train on all devices of this machine from one process: all accelerators, or else the CPU twice.

python examples/one_process.py
DATAPARALLEL_VIRTUAL_DEVICES=4 python examples/one_process.py    # 4 accelerators in host memory
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dataparallel as dp
from dataparallel.monitor import StepMonitor

torch.manual_seed(0)
x = torch.randn(5000, 64)
y = (x @ torch.randn(64, 4)).argmax(1)
loader = DataLoader(TensorDataset(x[:4000], y[:4000]), batch_size=200, shuffle=True)

net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 4))
model = dp.DistributedDataParallel(net, dp.accelerators() or ["cpu", "cpu"])
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

with StepMonitor(model) as monitor:
    for epoch in range(5):
        model.train()
        for inputs, targets in loader:
            loss = model.loss(criterion, inputs, targets)  # moves both to the devices
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            accuracy = (model(x[4000:]).argmax(1).cpu() == y[4000:]).float().mean()
        print(f"epoch {epoch + 1}/5: loss {loss.item():.3f}, test accuracy {accuracy:.1%}")

print(monitor.summary())
torch.save(model.state_dict(), "net.pt")  # the bare module loads them
