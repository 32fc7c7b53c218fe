# main.py of a page on parallel computing: apex's wrapper with device_ids, started by torch.distributed.launch.
import torch
import torch.optim as optim
import argparse
import torch.distributed as dist

from apex import amp
from apex.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument('--local_rank', default=-1, type=int,
                    help='node rank for distributed training')
args = parser.parse_args()

dist.init_process_group(backend='nccl')
torch.cuda.set_device(args.local_rank)

torch.manual_seed(0)
labels = torch.randint(3, (32,))
train_dataset = torch.utils.data.TensorDataset(torch.randn(32, 8) + labels[:, None], labels)
#
train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
#
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=8, sampler=train_sampler)

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).cuda()
optimizer = optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()

####
model, optimizer = amp.initialize(model, optimizer)
model = DistributedDataParallel(model, device_ids=[args.local_rank])

optimizer = optim.SGD(model.parameters(), lr=0.1)

for epoch in range(4):
    train_sampler.set_epoch(epoch)
    for batch_idx, (images, target) in enumerate(train_loader):
        images = images.cuda(non_blocking=True)
        target = target.cuda(non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print(f"step {batch_idx} Loss {loss.item():.8f}")
print("weights", [round(value, 4) for value in next(model.parameters()).float().flatten()[:4].tolist()])

# run torch.distributed.launch to start
# CUDA_VISIBLE_DEVICES=0,1,2,3 python -m torch.distributed.launch --nproc_per_node=4 main.py
