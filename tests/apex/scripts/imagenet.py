# Image classification as the ImageNet example had it: SyncBN, flags as strings, delayed all-reduce, resume after initialize.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex.fp16_utils import *
    from apex import amp, optimizers
    from apex.multi_tensor_apply import multi_tensor_applier
except ImportError:
    raise ImportError("this example needs apex")


def parse():
    parser = argparse.ArgumentParser(description="image classification")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=8, type=int)
    parser.add_argument("--lr", "--learning-rate", default=0.1, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", "--wd", default=1e-4, type=float)
    parser.add_argument("--resume", default="", type=str)
    parser.add_argument("--save", default="", type=str)
    parser.add_argument("--local_rank", default=os.getenv("LOCAL_RANK", 0), type=int)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--channels-last", type=lambda value: value == "True", default=False)
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        )
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


def reduce_tensor(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= args.world_size
    return rt


def main():
    global args
    args = parse()
    args.distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    args.gpu, args.world_size = 0, 1
    if args.distributed:
        args.gpu = args.local_rank
        torch.cuda.set_device(args.gpu)
        torch.distributed.init_process_group(backend="nccl", init_method="env://")
        args.world_size = torch.distributed.get_world_size()
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format

    torch.manual_seed(0)
    model = Net()
    if args.sync_bn:
        import apex

        model = apex.parallel.convert_syncbn_model(model)
    model = model.cuda().to(memory_format=memory_format)
    args.lr = args.lr * float(args.batch_size * args.world_size) / 256.0
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)

    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss().cuda()

    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=lambda storage, loc: storage.cuda(args.gpu))
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    labels = torch.randint(4, (64,))
    dataset = TensorDataset(torch.randn(64, 3, 8, 8) + labels.view(-1, 1, 1, 1), labels)
    sampler = DistributedSampler(dataset) if args.distributed else None
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=False, sampler=sampler)
    for epoch in range(start_epoch, args.epochs):
        if args.distributed:
            sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer, epoch)
        if args.save and args.local_rank == 0:
            torch.save(
                {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save
            )


def train(loader, model, criterion, optimizer, epoch):
    model.train()
    for i, (input, target) in enumerate(loader):
        input, target = input.cuda(non_blocking=True), target.cuda(non_blocking=True)
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        reduced_loss = reduce_tensor(loss.data) if args.distributed else loss.data
        torch.cuda.synchronize()
        print(f"Epoch {epoch} step {i} Loss {to_python_float(reduced_loss):.8f}")


if __name__ == "__main__":
    main()
