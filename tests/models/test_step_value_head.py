"""A step-level value head: it is saved with its model, and search and training read the same values."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from burnish import StepValue
from burnish.errors import UserError
from burnish.models.adapters import add_adapter
from burnish.models.heads import VALUE_HEAD, Network, SharedCritic, StepValueHead
from burnish.models.loading import load_value_model
from burnish.models.settings import AdapterConfig

IDS = torch.tensor([[1, 9, 30, 31, 2]])


def made(tiny_llama, delimiter: str = "\n") -> Network:
    network = StepValue(delimiter=delimiter).prepare(tiny_llama(), None)  # type: ignore[arg-type]
    head: Any = network.critic
    torch.nn.init.normal_(head.value.weight)
    return network


def values(network: Network) -> torch.Tensor:
    body: Any = network.policy
    assert network.critic is not None
    return network.critic(body(IDS, output_hidden_states=True).hidden_states[-1])


def test_the_head_is_a_linear_layer_and_one_tanh():
    head = StepValueHead(4)
    torch.nn.init.normal_(head.value.weight)
    torch.nn.init.normal_(head.value.bias)
    hidden = torch.randn(2, 3, 4)
    expected = torch.tanh(hidden @ head.value.weight[0] + head.value.bias[0])
    torch.testing.assert_close(head(hidden), expected)
    assert StepValueHead(4, torch.bfloat16).value.weight.dtype == torch.float32
    assert head(hidden.bfloat16()).dtype == torch.float32


def test_it_starts_at_zero_and_without_dropout(tiny_llama):
    network = StepValue().prepare(tiny_llama(attention_dropout=0.3), None)  # type: ignore
    network.train()
    assert torch.equal(values(network), torch.zeros(1, 5))
    head: Any = network.critic
    torch.nn.init.normal_(head.value.weight)
    assert torch.equal(values(network), values(network))


def test_a_saved_head_is_loaded_unchanged(tiny_llama, tiny_tokenizer, tmp_path):
    network = made(tiny_llama, delimiter=" ; ")
    network.save_pretrained(tmp_path)
    loaded = load_value_model(str(tmp_path))
    assert torch.equal(values(loaded), values(network))
    head: Any = loaded.critic
    assert head.delimiter == " ; "


def test_another_process_gives_the_same_values(tiny_llama, tmp_path):
    network = made(tiny_llama)
    network.save_pretrained(tmp_path)
    torch.save(values(network).detach(), tmp_path / "values.pt")
    code = (
        "import sys, torch; from burnish.models.loading import load_value_model; torch.set_num_threads(1)\n"
        f"n = load_value_model(sys.argv[1]); ids = torch.tensor({IDS.tolist()})\n"
        "h = n.policy(ids, output_hidden_states=True).hidden_states[-1]\n"
        "assert torch.equal(n.critic(h), torch.load(sys.argv[1] + '/values.pt'))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


def test_an_adapter_and_its_head_resume_together(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    base: Any = type(tiny_llama()).from_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    settings: Any = {"r": 4, "dropout": 0.0}
    adapted = add_adapter(base, AdapterConfig(**settings), "CAUSAL_LM")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    network = StepValue().prepare(adapted, None)  # type: ignore[arg-type]
    network.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(values(load_value_model(str(tmp_path / "adapter"))), values(network))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": torch.zeros(1)}, "it holds .*'extra': \\(1,\\)"),
        ({"value.bias": None}, "not the weights of a StepValueHead"),
        ({"value.weight": torch.zeros(1, 7)}, "it holds .*\\(1, 7\\).*expected .*\\(1, 32\\)"),
    ],
)
def test_other_weights_are_refused(change, message, tiny_llama, tmp_path):
    network = made(tiny_llama)
    network.save_pretrained(tmp_path)
    head = load_file(tmp_path / VALUE_HEAD) | change
    save_file({name: x for name, x in head.items() if x is not None}, tmp_path / VALUE_HEAD)
    with pytest.raises(UserError, match=message):
        load_value_model(str(tmp_path))
    with pytest.raises(UserError, match=message):
        network.load_weights(tmp_path)


def test_the_critic_of_ppo_is_not_a_step_value_head(tiny_llama, tmp_path):
    Network(tiny_llama(), SharedCritic(32)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not the weights of a StepValueHead"):
        load_value_model(str(tmp_path))


def test_a_model_without_a_head_is_an_error(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no value_head.safetensors: expected a model trained by .* step_value"):
        load_value_model(str(tmp_path))


def test_a_damaged_file_is_an_error(tiny_llama, tmp_path):
    made(tiny_llama).save_pretrained(tmp_path)
    (tmp_path / VALUE_HEAD).write_bytes(b"no")
    with pytest.raises(UserError, match="cannot be read"):
        load_value_model(str(tmp_path))
