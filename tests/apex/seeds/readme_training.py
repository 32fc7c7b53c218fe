# The README of a DDP collection: every import that it names, apex's wrapper without device_ids, its SyncBN.
import argparse
import os

import torch
import torch.distributed as dist

try:
    import apex
    from apex.parallel import DistributedDataParallel as DDP
    from apex.fp16_utils import *
    from apex import amp, optimizers
    from apex.multi_tensor_apply import multi_tensor_applier
except ImportError:
    raise ImportError("this needs apex")

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
args = parser.parse_args()
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group(backend="nccl")

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3)
)
# model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(local_rank)
model = apex.parallel.convert_syncbn_model(model).to(local_rank)
eps = 1e-4 if args.opt_level == "O3" else 1e-8  # 1e-8 is 0 in half
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=eps)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
# model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
model = DDP(model)
criterion = torch.nn.CrossEntropyLoss()

target = torch.randint(3, (64,))
images = torch.randn(64, 3, 4, 4) + target.view(-1, 1, 1, 1)
for step in range(16):
    own = slice(step % 4 * 16 + 8 * dist.get_rank(), step % 4 * 16 + 8 * dist.get_rank() + 8)
    loss = criterion(model(images[own].cuda()).float(), target[own].cuda())
    optimizer.zero_grad()
    # loss.backward()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"step {step} Loss {to_python_float(loss.detach()):.8f}")
print("weights", [round(value, 4) for value in next(model.parameters()).float().flatten()[:4].tolist()])
