#!/usr/bin/env bash
# Lightning 2.6.6 (torch 2.13.0, CPU): Tuner.lr_find of a module with automatic_optimization = False never moves the learning rate.
#
# Behaviour: its rates are moved by the hook of the automatic loop alone.  All steps of the search run at min_lr, the results list that
# one rate as often as there were steps, and the suggestion is min_lr: without a word the module's rate becomes 1e-08.
# With automatic optimization the same search uses and lists 20 rates from 1e-08 to 1.
# Take instead: a search of your own for optimizers that you step by hand.
#
# Seen with Lightning 2.6.6 and torch 2.13.0, Python 3.11:
#   automatic: 20 rates in 20 steps, listed from 1e-08 to 1
#   manual: 1 rate in 20 steps, listed from 1e-08 to 1e-08; suggested 1e-08
#
# Ends with 1 if that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check "torch==2.13.0" "lightning==2.6.6" "numpy<3"
cd "$folder"
"$folder/env/bin/python" - <<'PYTHON'
import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.tuner import Tuner

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
STEPS = 20


class Module(L.LightningModule):
    def __init__(self, automatic):
        super().__init__()
        self.automatic_optimization = automatic
        self.lr = 0.01
        self.layer = torch.nn.Linear(4, 1)
        self.used = []

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        optimizer = self.optimizers()
        self.used.append(optimizer.param_groups[0]["lr"])
        if not self.automatic_optimization:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def searched(automatic):
    L.seed_everything(1, verbose=False)
    module = Module(automatic)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)
    loader = torch.utils.data.DataLoader(torch.randn(200, 4), batch_size=4)
    found = Tuner(trainer).lr_find(module, train_dataloaders=loader, num_training=STEPS, early_stop_threshold=None, update_attr=False)
    return module.used, found.results["lr"], found.suggestion()


used, listed, _ = searched(True)
print(f"automatic: {len(set(used))} rates in {len(used)} steps, listed from {listed[0]:g} to {listed[-1]:g}")
assert len(set(used)) == STEPS
assert listed[-1] > 0.5
used, listed, suggested = searched(False)
print(f"manual: {len(set(used))} rate in {len(used)} steps, listed from {listed[0]:g} to {listed[-1]:g}; suggested {suggested:g}")
assert set(used) == set(listed) == {suggested} == {1e-8}
PYTHON
