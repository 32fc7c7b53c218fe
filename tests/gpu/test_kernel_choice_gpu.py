"""A small norm runs by torch in eager steps and by a kernel in captured steps; a resumed run keeps the run's first choice."""

from __future__ import annotations

import pytest
import torch

from fabricamp.callbacks import ModelCheckpoint
from fabricamp.nn import FusedLayerNorm
from fabricamp.ops import dispatch
from tests.gpu.test_cuda_graph import Net, equal, fit, trainer_of
from tests.gpu.test_cuda_graph import images as batches

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


NOTED = set()  # not in the module, whose attributes a captured step must not change


def note(module, given, made):
    """Records whether the norm was a kernel, in steps that Python runs."""
    if torch.is_grad_enabled():
        NOTED.add(type(made.grad_fn).__name__)


def normed():
    NOTED.clear()
    module = Net()
    module.net.insert(4, FusedLayerNorm(8 * 36))
    module.net[4].register_forward_hook(note)
    return module


@pytest.mark.parametrize(("begins", "made"), [(False, "NativeLayerNormBackward0"), (True, "_NormaliseBackward")])
def test_a_run_that_goes_on_keeps_its_choice_and_its_bits(begins, made, tmp_path):
    if not dispatch.chosen("layer_norm", torch.float16, 8 * 36, torch.device("cuda", 0)):
        pytest.skip("norms are torch's on this GPU")
    keeper = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=25, save_top_k=-1)
    fit(begins, "O2", module=normed(), max_steps=25, callbacks=[keeper], enable_checkpointing=True)
    (file,) = tmp_path.glob("*step=25*")
    whole = fit(begins, "O2", module=normed(), max_steps=60)[1]
    assert {made} == NOTED
    trainer, module = trainer_of(not begins, "O2", max_steps=60), normed()
    trainer.fit(module, batches(30, last=3), batches(2), ckpt_path=file)
    assert {made} == NOTED
    for (name, left), right in zip(whole.state_dict().items(), module.state_dict().values(), strict=True):
        assert equal(left, right), name
