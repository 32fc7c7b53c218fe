# The walkthrough: a linear model, apex's wrapper, a launcher.
import argparse
import os

import torch
from apex import amp
from apex.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--opt_level", default="O1")
args = parser.parse_args()

args.distributed = False
if "WORLD_SIZE" in os.environ:
    args.distributed = int(os.environ["WORLD_SIZE"]) > 1
if args.distributed:
    torch.cuda.set_device(args.local_rank)
    torch.distributed.init_process_group(backend="nccl", init_method="env://")
torch.backends.cudnn.benchmark = True

N, D_in, D_out = 64, 64, 4
torch.manual_seed(args.local_rank)
x = torch.randn(N, D_in, device="cuda")
y = torch.randn(N, D_out, device="cuda")
model = torch.nn.Linear(D_in, D_out).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)

model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
if args.distributed:
    model = DistributedDataParallel(model)

loss_fn = torch.nn.MSELoss()
for t in range(20):
    optimizer.zero_grad()
    y_pred = model(x)
    loss = loss_fn(y_pred, y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"step {t} Loss {loss.item():.8f}")
print("weights", [round(value, 4) for value in next(model.parameters()).float().flatten()[:4].tolist()])
