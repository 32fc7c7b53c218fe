"""First values of other packages' networks on the meta device, with no adapter; the packages are optional."""

from __future__ import annotations

import pytest
import torch

from tests.strategies.first_values import by_units, tensors, whole

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
