# Training, the checkpoint of three keys, and training on from it.
import argparse
import os

import torch
from apex import amp, optimizers

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
parser.add_argument("--optimizer", default="Adam")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--checkpoint", default="amp_checkpoint.pt")
args = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).cuda()
eps = 1e-4 if args.opt_level == "O3" else 1e-8  # 1e-8 is 0 in half
build = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, eps=eps),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "FusedAdam": lambda parameters: optimizers.FusedAdam(parameters, lr=1e-2),
    "FusedLAMB": lambda parameters: optimizers.FusedLAMB(parameters, lr=1e-2),
}
optimizer = build[args.optimizer](model.parameters())
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
first = 0
if os.path.exists(args.checkpoint):
    checkpoint = torch.load(args.checkpoint)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    first = checkpoint["step"]

generator = torch.Generator()
for step in range(first, first + args.steps):
    generator.manual_seed(step)
    x = torch.randn(16, 8, generator=generator).cuda()
    loss = (model(x).float() - x[:, :2]).pow(2).mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"step {step} Loss {loss.item():.10f}")

torch.save(
    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict(), "step": first + args.steps},
    args.checkpoint,
)
