"""States of other packages' optimizers on a GPU: saved, and resumed bit for bit; the file needs no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fabricamp.callbacks import AsyncCheckpoint, ModelCheckpoint
from tests.small import quiet_trainer
from tests.trainer.quantised import Quantised
from tests.trainer.test_optimizer_states import Net, batches, flat
from tests.trainer.test_optimizers_of_others import PACKAGED, from_package

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MAKE = {
    "a class of its own": Quantised,
    **PACKAGED,
    "4 bits": from_package("torchao.optim", "AdamW4bit", lr=0.01, block_size=64),
    "FP8": from_package("torchao.optim", "AdamWFp8", lr=0.01, block_size=64),
}


def parts_of(tensor):
    """Returns what has the tensor's memory: itself, or the tensors that it is made of; torch pickles its own device as it was."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


@pytest.mark.parametrize("callback", [ModelCheckpoint, AsyncCheckpoint])
@pytest.mark.parametrize("precision", ["O0", "O2", "O5"])
@pytest.mark.parametrize("kind", MAKE)
@torch.compiler.set_stance("force_eager")  # torchao's step compiles itself, for longer than it trains here
def test_a_run_goes_on_bit_for_bit(kind, precision, callback, tmp_path):
    options = {"accelerator": "gpu", "devices": 1, "precision": precision}
    straight = Net(MAKE[kind])
    quiet_trainer(max_steps=10, **options).fit(straight, batches())
    saves = callback(tmp_path, filename="{step}", every_n_train_steps=5)
    quiet_trainer(max_steps=5, callbacks=[saves], enable_checkpointing=True, **options).fit(Net(MAKE[kind]), batches())
    resumed = Net(MAKE[kind])
    quiet_trainer(max_steps=10, **options).fit(resumed, batches(), ckpt_path=tmp_path / "step=5.ckpt")
    assert torch.equal(flat(straight), flat(resumed))
    content = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    held = [one for state in content["optimizer_states"][0]["state"].values() for one in state.values()]
    assert {part.device.type for one in held if isinstance(one, torch.Tensor) for part in parts_of(one)} == {"cpu"}
