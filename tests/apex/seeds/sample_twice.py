# The fourth part of that sample: initialize written twice, then the wrapper with delay_allreduce.
import argparse
import torch

from apex import amp
from apex.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument('--local_rank', type=int, default=0, help='node rank for distributed training')
args = parser.parse_args()
torch.cuda.set_device(args.local_rank)
torch.distributed.init_process_group('nccl', init_method='env://')
device = torch.device(f'cuda:{args.local_rank}')

torch.manual_seed(0)
model = torch.nn.Linear(8, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model, optimizer = amp.initialize(model, optimizer, opt_level='O1')

model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
model = DistributedDataParallel(model, delay_allreduce=True)

x = torch.randn(32, 8).to(device)
for step in range(10):
    loss = (model(x).float() - x[:, :2]).pow(2).mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"step {step} Loss {loss.item():.8f}")
print("weights", [round(value, 4) for value in next(model.parameters()).float().flatten()[:4].tolist()])
