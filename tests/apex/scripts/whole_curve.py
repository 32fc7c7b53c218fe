# amp, DistributedDataParallel, SyncBatchNorm and FusedAdam in one script: its curve is that of plain torch.
import argparse

import apex
import torch
import torch.distributed as dist
from apex import amp
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--opt_level", default="O0")
parser.add_argument("--loss-scale", default=None)
parser.add_argument("--steps", default=50, type=int)
args = parser.parse_args()
torch.cuda.set_device(args.local_rank)
dist.init_process_group(backend="nccl")
torch.backends.cudnn.allow_tf32 = False

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
    torch.nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(128, 4),
)
images, labels = torch.randn(400, 3, 8, 8), torch.randint(4, (400,))
images += labels.view(-1, 1, 1, 1) * 0.5
model = apex.parallel.convert_syncbn_model(model).cuda()
optimizer = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale)
model = DDP(model)
criterion = torch.nn.CrossEntropyLoss()

for step in range(args.steps):
    batch = torch.arange(16 * step, 16 * step + 16) % 400
    own = batch.chunk(dist.get_world_size())[dist.get_rank()]
    output = model(images[own].cuda())
    loss = criterion(output.float(), labels[own].cuda())
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"step {step} Loss {loss.item():.9f}")
