"""No trainer at all: what torch itself computes on this machine, in the layers that the other programs use."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
block = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
nets = nn.ModuleDict(
    {
        "linear": nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.GELU(), nn.Tanh()
        ),
        "convolution": nn.Sequential(
            nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Flatten()
        ),
        "recurrent": nn.LSTM(16, 12, batch_first=True),
        "attention": nn.TransformerEncoder(block, 1, enable_nested_tensor=False),
    }
)
optimizers = [torch.optim.AdamW(nets.parameters(), lr=0.01), torch.optim.SGD(nets.parameters(), lr=0.05, momentum=0.9)]


def losses(x):
    yield F.mse_loss(nets["linear"](x), x)
    yield F.cross_entropy(nets["convolution"](x), x.argmax(dim=1))
    yield F.cosine_similarity(nets["recurrent"](x[:, None])[0][:, -1], x[:, :12], dim=-1).mean()
    yield nets["attention"](x.view(3, 8, 16)).exp().mean()
    with torch.autocast("cpu", torch.bfloat16):
        yield nets["linear"](x).float().square().mean()


for step in range(8):
    total = torch.stack(list(losses(torch.randn(24, 16)))).sum()
    total.backward()
    norm = nn.utils.clip_grad_norm_(nets.parameters(), 1.0)
    optimizers[step % 2].step()
    optimizers[step % 2].zero_grad()
    print(f"{total:.9f} {norm:.9f}")
print(f"{sum(p.double().sum() for p in nets.parameters()):.12f}")
