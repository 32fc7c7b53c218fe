# apex's README: initialize, save the checkpoint of three keys, restore into new objects, continue.
import argparse

import torch
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
opt_level = parser.parse_args().opt_level


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).cuda()
    eps = 1e-4 if opt_level == "O3" else 1e-8  # 1e-8 is 0 in half
    return model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=eps)


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).cuda()
        loss = (model(x).float() - x[:, :2]).pow(2).mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print(f"step {step} Loss {loss.item():.8f}")


# Initialization
model, optimizer = build()
model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)

# Train your model
train(model, optimizer, range(10))

# Save checkpoint
checkpoint = {
    'model': model.state_dict(),
    'optimizer': optimizer.state_dict(),
    'amp': amp.state_dict()
}
torch.save(checkpoint, 'amp_checkpoint.pt')
train(model, optimizer, range(10, 15))

# Restore
model, optimizer = build()
checkpoint = torch.load('amp_checkpoint.pt')

model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
model.load_state_dict(checkpoint['model'])
optimizer.load_state_dict(checkpoint['optimizer'])
amp.load_state_dict(checkpoint['amp'])

# Continue training
train(model, optimizer, range(10, 15))
