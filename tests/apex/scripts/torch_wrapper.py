# amp below, torch's own wrapper above it, with parameters that a step does not use.
import argparse

import torch
import torch.distributed as dist
from apex import amp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0)
parser.add_argument("--opt_level", default="O1")
FLAGS = parser.parse_args()
local_rank = int(FLAGS.local_rank)


def init_ddp():
    torch.cuda.set_device(f"cuda:{local_rank}")
    dist.init_process_group(backend="nccl")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(8, 3)
        self.unused = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.used(x)


init_ddp()
torch.manual_seed(0)
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer = amp.initialize(net, optimizer, opt_level=FLAGS.opt_level)
net = DDP(net, device_ids=[local_rank], output_device=local_rank, find_unused_parameters=True)

targets = torch.randint(3, (32,))
dataset = TensorDataset(torch.randn(32, 8) + targets[:, None], targets)
is_distributed = dist.get_world_size() > 1
sampler = DistributedSampler(dataset) if is_distributed else None
loader = DataLoader(dataset, batch_size=8, shuffle=(sampler is None), sampler=sampler)
for epoch in range(4):
    if is_distributed:
        sampler.set_epoch(epoch)
    for data, target in loader:
        loss = torch.nn.functional.cross_entropy(net(data.cuda()).float(), target.cuda())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print(f"epoch {epoch} Loss {loss.item():.8f}")
print("weights", [round(value, 4) for value in next(net.parameters()).float().flatten()[:4].tolist()])
