# A note on DDP and apex: torch's wrapper on top, a string as default of --local_rank, set_epoch, one FusedAdam for two encoders.
import argparse

import apex
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
    torch.cuda.set_device(f'cuda:{local_rank}')
    dist.init_process_group(backend='nccl')
    dist.get_rank()
    dist.get_world_size()


init_ddp()
torch.manual_seed(0)
img_encoder = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).cuda()
text_encoder = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).cuda()
optimizer = apex.optimizers.FusedAdam([
        {'params':img_encoder.parameters()},
        {'params':text_encoder.parameters()}
    ], lr=1e-2, betas=(0.9, 0.99))
(img_encoder, text_encoder), optimizer = amp.initialize(
        [img_encoder, text_encoder], optimizer,
        opt_level=FLAGS.opt_level #, loss_scale=128
    )
img_encoder = DDP(img_encoder, device_ids=[local_rank], output_device=local_rank, find_unused_parameters=True)
text_encoder = DDP(text_encoder, device_ids=[local_rank], output_device=local_rank, find_unused_parameters=True)

images = torch.randn(32, 6)
dataset = TensorDataset(images, images[:, :5] + 0.1 * torch.randn(32, 5))
is_distributed = dist.get_world_size() > 1
sampler = DistributedSampler(dataset) if is_distributed else None
loader = DataLoader(dataset, shuffle=(sampler is None), sampler=sampler, batch_size=8)
start_epoch, n_epochs = 0, 6


def train(loader):
    for image, text in loader:
        similarity = img_encoder(image.cuda()) @ text_encoder(text.cuda()).t()
        loss = torch.nn.functional.cross_entropy(similarity.float(), torch.arange(8).cuda())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print(f"Loss {loss.item():.8f}")


for epoch in range(start_epoch, n_epochs):
    if is_distributed:
        sampler.set_epoch(epoch)
    train(loader)
print("weights", [round(value, 4) for value in next(img_encoder.parameters()).float().flatten()[:4].tolist()])
