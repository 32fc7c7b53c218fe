# main.py of a multi-GPU sample: SyncBN, initialize, wrapper with torch's arguments, and only then the optimizer that steps.
import torch
import torch.optim as optim
import argparse
import torch.distributed as dist

from apex import amp
from apex.parallel import convert_syncbn_model
from apex.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument('--local_rank', default=-1, type=int,
                    help='node rank for distributed training')
parser.add_argument('--opt_level', default='O1')
args = parser.parse_args()

dist.init_process_group(backend='nccl')
torch.cuda.set_device(args.local_rank)

torch.manual_seed(0)
labels = torch.randint(3, (64,))
train_dataset = torch.utils.data.TensorDataset(torch.randn(64, 3, 4, 4) + labels.view(-1, 1, 1, 1), labels)
train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)

train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=8, sampler=train_sampler)

model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
                            torch.nn.Flatten(), torch.nn.Linear(64, 3)).cuda()
optimizer = optim.SGD(model.parameters(), lr=0.05)
criterion = torch.nn.CrossEntropyLoss()
#
model = convert_syncbn_model(model)
#
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
#
model = DistributedDataParallel(model, device_ids=[args.local_rank])

optimizer = optim.SGD(model.parameters(), lr=0.05)

for epoch in range(3):
   for batch_idx, (images, target) in enumerate(train_loader):
      images = images.cuda(non_blocking=True)
      target = target.cuda(non_blocking=True)
      output = model(images)
      loss = criterion(output.float(), target)
      optimizer.zero_grad()
      with amp.scale_loss(loss, optimizer) as scaled_loss:
         scaled_loss.backward()
      optimizer.step()
      print(f"step {batch_idx} Loss {loss.item():.8f}")
print("weights", [round(value, 4) for value in next(model.parameters()).float().flatten()[:4].tolist()])
