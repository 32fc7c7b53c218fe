# Two encoders, one FusedAdam over both.
import argparse

import apex
import torch
import torch.nn.functional as F
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
args = parser.parse_args()

torch.manual_seed(0)
img_encoder = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).cuda()
text_encoder = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Flatten(), torch.nn.Linear(48, 8)).cuda()
optimizer = apex.optimizers.FusedAdam(
    [{"params": img_encoder.parameters()}, {"params": text_encoder.parameters()}], lr=1e-2, betas=(0.9, 0.99)
)
(img_encoder, text_encoder), optimizer = amp.initialize(
    [img_encoder, text_encoder], optimizer, opt_level=args.opt_level
)

images, words = torch.randn(16, 12).cuda(), torch.randint(20, (16, 3)).cuda()
for step in range(20):
    optimizer.zero_grad()
    left, right = img_encoder(images), text_encoder(words)
    logits = left @ right.t()
    loss = F.cross_entropy(logits.float(), torch.arange(16).cuda())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    print(f"step {step} Loss {loss.item():.8f}")
