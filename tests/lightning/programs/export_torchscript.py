"""TorchScript of a module by Lightning's method."""

import lightning as L
import torch
from torch import nn


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.example_input_array = torch.ones(1, 4)

    def forward(self, x):
        return self.layer(x).relu()


torch.manual_seed(6)
model = Model()
x = torch.randn(3, 4)
script = model.to_torchscript("model.pt")
print("script", [f"{value:.8f}" for value in script(x).flatten().tolist()])
trace = model.to_torchscript(method="trace")
print("trace", torch.equal(trace(x), model(x)), torch.equal(torch.jit.load("model.pt")(x), model(x)))
