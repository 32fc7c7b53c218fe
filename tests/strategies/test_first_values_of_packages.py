"""First values of other packages' networks on the meta device, with no adapter; the packages are optional."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fabricamp import Callback, TrainingModule, seed_everything
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer
from tests.strategies.first_values import by_units, on_meta, tensors, whole

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}


def llama(*, tied):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config)


def gpt2():
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=96, **tokens)
    return transformers.AutoModelForCausalLM.from_config(config)


def bert():
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    return transformers.AutoModel.from_config(transformers.BertConfig(**SIZES, intermediate_size=64))


def torchtitan():
    llama3 = pytest.importorskip("torchtitan.models.llama3", reason="needs the package torchtitan")
    shape = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 96, "max_seq_len": 32}
    return llama3.Transformer(llama3.TransformerModelArgs(**shape))


def litgpt():
    package = pytest.importorskip("litgpt", reason="needs the package litgpt")
    shape = {"n_layer": 3, "n_embd": 32, "n_head": 4, "padded_vocab_size": 96, "block_size": 32}
    return package.GPT(package.Config.from_name("pythia-14m", **shape))


def nanochat():
    gpt = pytest.importorskip("nanochat.gpt", reason="needs the package nanochat")
    return gpt.GPT(gpt.GPTConfig(sequence_len=32, vocab_size=96, n_layer=3, n_head=4, n_kv_head=4, n_embd=32))


BUILT = {
    "transformers' Llama": lambda: llama(tied=False),
    "transformers' Llama, tied": lambda: llama(tied=True),
    "transformers' GPT-2": gpt2,
    "transformers' BERT": bert,
    "torchtitan's Llama 3": torchtitan,
    "litgpt's GPT": litgpt,
    "nanochat's GPT": nanochat,
}


@pytest.mark.parametrize("name", BUILT)
def test_it_has_the_statistics_of_its_own_initialisation(name):
    """Each tensor has the mean and deviation of a network built on the CPU; tables are equal, and ties kept."""
    torch.manual_seed(2)
    built = BUILT[name]()
    if name in ("torchtitan's Llama 3", "nanochat's GPT"):
        with torch.no_grad():
            built.init_weights()
    (apart, left), (together, _) = by_units(BUILT[name]), whole(BUILT[name])
    assert not left
    expected, found, others = tensors(built), tensors(apart), tensors(together)
    assert expected.keys() == found.keys()
    assert len(set(map(id, expected.values()))) == len(set(map(id, found.values())))
    buffers = dict(built.named_buffers(remove_duplicate=False))
    for tensor, value in found.items():
        assert torch.equal(value, others[tensor]), tensor
        reference = expected[tensor].detach()
        if tensor in buffers or reference.unique().numel() < 3:
            assert torch.equal(value, reference), tensor
            continue
        (spread, middle), (other_spread, other_middle) = map(statistics, (reference, value.detach()))
        assert other_spread == pytest.approx(spread, rel=0.3), tensor
        assert abs(other_middle - middle) < spread, tensor


def statistics(tensor):
    return float(tensor.float().std()), float(tensor.float().mean())


class Fitted(TrainingModule):
    """The network, on the meta device."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = on_meta(BUILT[self.name])

    def training_step(self, batch, batch_idx):
        scores = self.net(batch)
        scores = getattr(scores, "logits", getattr(scores, "last_hidden_state", scores))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten() % scores.shape[-1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Begun(Callback):
    def on_fit_start(self, trainer, pl_module):
        self.values = {
            name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
            for name, tensor in tensors(pl_module).items()
        }


def trained(name, strategy, **options):
    """Returns the values that a fit of two steps begins with."""
    seed_everything(3, verbose=False)
    begun = Begun()
    tokens = torch.randint(96, (8, 16), generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(strategy=strategy, max_steps=2, callbacks=[begun], **options)
    trainer.fit(Fitted(name), torch.utils.data.DataLoader(tokens, batch_size=2))
    return begun.values


@pytest.mark.parametrize(
    "name", ["transformers' Llama, tied", "torchtitan's Llama 3", "litgpt's GPT", "nanochat's GPT"]
)
def test_two_ranks_train_from_the_numbers_of_one_process(name):
    expected = trained(name, "single")
    for found in run_ranks(lambda: trained(name, "fsdp", devices="auto"), 2, backend=None):
        assert found.keys() == expected.keys()
        assert not [tensor for tensor, value in expected.items() if not torch.equal(value, found[tensor])]
