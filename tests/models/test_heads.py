"""Critics start as copies, heads start at known values, and a network saves and loads itself strictly."""

import copy
import math
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from builders import SIZES
from burnish.errors import UserError
from burnish.models.adapters import add_adapter
from burnish.models.batching import collate
from burnish.models.forward import backbone, head, head_output, hidden_states, score_head, scores, token_values
from burnish.models.heads import (
    Network,
    SharedCritic,
    StepValueHead,
    disable_dropout,
    head_values,
    init_score,
    load_weights,
    separate_critic,
)
from burnish.models.loading import load_reward_model
from burnish.models.settings import AdapterConfig
from burnish.types import Example, Sequence

BATCH = collate([Example((Sequence(tuple(range(3, 3 + n)), (False,) + (True,) * (n - 1), "x"),)) for n in (6, 4)], 0)


def classifier(tiny_llama, seed: int = 0, labels: int = 1) -> hf.PreTrainedModel:
    config = copy.deepcopy(tiny_llama().config)
    config.num_labels = labels
    torch.manual_seed(seed)
    return disable_dropout(hf.LlamaForSequenceClassification(config))  # type: ignore[return-value]


def lora(model: Any, task: Any = "CAUSAL_LM") -> Any:
    settings: dict[str, Any] = {"r": 4}
    return add_adapter(model, AdapterConfig(**settings), task)


def moved(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with every trainable weight changed, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def storages(model: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}


@torch.no_grad()
def outputs(network: Network) -> list[torch.Tensor]:
    network.eval()
    logits = head(network.policy)(hidden_states(network.policy, BATCH))
    return [logits] if network.critic is None else [logits, network.values(BATCH)]


# --- dropout and fresh heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        hf.LlamaConfig(**SIZES, attention_dropout=0.5),
        hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5),
        hf.GPTNeoXConfig(**SIZES, attention_dropout=0.5, hidden_dropout=0.5),
        hf.OPTConfig(
            vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, dropout=0.5
        ),
        hf.FalconConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_dropout=0.5,
            attention_dropout=0.5,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_dropout_is_off_even_in_training_mode(config):
    model: Any = hf.AutoModelForCausalLM.from_config(config).train()
    tokens = BATCH.tokens
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    disable_dropout(model)
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    torch.testing.assert_close(model(tokens).logits, model.eval()(tokens).logits)


def test_the_dropout_of_an_adapter_is_also_off(tiny_llama):
    settings: dict[str, Any] = {"r": 4, "dropout": 0.5}
    model: Any = moved(add_adapter(tiny_llama(), AdapterConfig(**settings), "CAUSAL_LM")).train()
    assert not torch.equal(model(BATCH.tokens).logits, model(BATCH.tokens).logits)
    disable_dropout(model)
    assert torch.equal(model(BATCH.tokens).logits, model(BATCH.tokens).logits)


def test_a_new_score_head_has_the_documented_standard_deviation():
    sizes: dict[str, Any] = {**SIZES, "hidden_size": 4096, "num_hidden_layers": 0}
    model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**sizes))
    init_score(model)
    assert model.score.weight.std().item() == pytest.approx(1 / math.sqrt(4097), rel=0.1)
    assert model.score.bias is None


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_a_shared_head_starts_at_zero_in_float32_or_wider(dtype, expected, tiny_llama):
    network = Network(tiny_llama(dtype=dtype), SharedCritic(32, dtype))
    values = network.values(BATCH)
    assert values.dtype == expected and values.shape == BATCH.tokens.shape and not values.any()


def test_autocast_does_not_round_what_heads_compute(tiny_llama):
    """Values and scores in bfloat16 would have three digits."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 32)
    critic, step, score = SharedCritic(32), StepValueHead(32), score_head(classifier(tiny_llama))
    for layer in (critic.score, step.value):
        nn.init.normal_(layer.weight)
    exact = head_values(critic, hidden), head_values(step, hidden), head_output(score, hidden)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = head_values(critic, hidden), head_values(step, hidden), head_output(score, hidden)
    assert all(torch.equal(a, b) for a, b in zip(exact, rounded, strict=True))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
def test_heads_are_trained_in_float32_on_a_base_in_bfloat16(tiny_llama, tmp_path):
    classifier(tiny_llama).save_pretrained(tmp_path)
    reward: Any = load_reward_model(str(tmp_path), dtype=torch.bfloat16)
    critic = separate_critic(lora(tiny_llama(dtype=torch.bfloat16)))
    for model in (lora(reward, "SEQ_CLS"), critic):
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert {p.dtype for p in backbone(model).parameters() if not p.requires_grad} == {torch.bfloat16}
        assert token_values(model, BATCH).dtype == torch.float32


def test_a_critic_of_which_all_weights_are_trained_is_in_float32(tiny_llama):
    scorer = classifier(tiny_llama).bfloat16()
    critic = separate_critic(tiny_llama(), scorer)
    assert {p.dtype for p in critic.parameters()} == {torch.float32}


def test_a_head_of_several_layers_is_computed_in_the_dtype_of_its_weights():
    layers = nn.Sequential(nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 1))
    hidden = torch.randn(2, 5, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = head_output(layers, hidden)
    assert torch.equal(found, layers(hidden.float()))
    assert torch.equal(head_output(nn.Identity(), hidden), hidden)


# --- separate critics ----------------------------------------------------------------------------------------------


def test_a_critic_from_the_policy_has_its_weights_and_shares_none(tiny_llama):
    policy = tiny_llama()
    before = copy.deepcopy(policy.state_dict())
    critic = separate_critic(policy)
    for (name, a), (_, b) in zip(
        backbone(policy).state_dict().items(), backbone(critic).state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    assert not token_values(critic, BATCH).any()
    assert storages(policy).isdisjoint(storages(critic))
    moved(critic)
    assert all(torch.equal(policy.state_dict()[name], value) for name, value in before.items())


def test_a_critic_from_a_reward_model_gives_its_scores_and_shares_nothing(tiny_llama):
    policy, reward = tiny_llama(), classifier(tiny_llama, seed=3)
    nn.init.normal_(reward.score.weight)  # type: ignore[arg-type]
    reward.requires_grad_(False)  # as a reward is
    critic = separate_critic(policy, reward)
    with torch.no_grad():
        # the state after the last token is what a value before one more token would see
        values = score_head(critic)(hidden_states(critic, BATCH))[..., 0].flatten()[BATCH.ends]
        torch.testing.assert_close(values, scores(reward, BATCH))
    assert storages(critic).isdisjoint(storages(policy) | storages(reward))
    assert all(p.requires_grad for p in critic.parameters())


def test_a_reward_model_of_several_labels_gives_only_its_body(tiny_llama):
    reward = classifier(tiny_llama, seed=3, labels=3)
    critic = separate_critic(tiny_llama(), reward)
    assert torch.equal(backbone(critic).embed_tokens.weight, reward.model.embed_tokens.weight)  # type: ignore
    assert not token_values(critic, BATCH).any()


@pytest.mark.parametrize("start", ["policy", "reward", "adapted reward"])
def test_a_policy_with_an_adapter_gets_a_critic_with_its_own_adapter(start, tiny_llama):
    policy: Any = moved(lora(tiny_llama()))
    reward: Any = None
    if start != "policy":
        reward = classifier(tiny_llama, seed=3)
        reward = moved(lora(reward, "SEQ_CLS")) if start == "adapted reward" else reward
    body = copy.deepcopy(reward or policy)
    body = body.merge_and_unload() if hasattr(body, "merge_and_unload") else body
    critic = separate_critic(policy, reward)
    trained = [name for name, p in critic.named_parameters() if p.requires_grad]
    assert any("lora_A" in name for name in trained)
    assert all("lora_" in name or "score.modules_to_save" in name for name in trained)
    assert storages(critic).isdisjoint(storages(policy))
    if reward is not None:
        assert storages(critic).isdisjoint(storages(reward))
    with torch.no_grad():
        torch.testing.assert_close(hidden_states(critic, BATCH), hidden_states(body, BATCH), atol=1e-5, rtol=1e-5)


def test_an_architecture_without_a_token_classifier_is_an_error():
    model = hf.CohereForCausalLM(hf.CohereConfig(**SIZES))
    with pytest.raises(UserError, match=r"CohereForCausalLM has no token-classification model.*critic: shared"):
        separate_critic(model)


# --- the network ---------------------------------------------------------------------------------------------------


def test_a_network_has_the_attributes_of_its_policy(tiny_llama):
    network = Network(tiny_llama(), SharedCritic(32))
    assert network.config is network.policy.config
    with pytest.raises(AttributeError, match="no_such"):
        network.no_such  # noqa: B018


NETWORKS = ["policy", "classifier", "shared", "separate", "adapter", "adapter shared", "adapter separate"]


def network_of(kind: str, tiny_llama) -> Network:
    """A network of a kind, always with the same weights."""
    torch.manual_seed(0)
    if kind == "classifier":
        return Network(lora(classifier(tiny_llama), "SEQ_CLS"))
    policy = lora(tiny_llama()) if kind.startswith("adapter") else tiny_llama()
    if kind.endswith("shared"):
        return Network(policy, SharedCritic(32))
    return Network(policy, separate_critic(policy) if kind.endswith("separate") else None)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_is_loaded_as_it_was_saved(kind, tiny_llama, tmp_path):
    network = moved(network_of(kind, tiny_llama))
    assert isinstance(network, Network)
    network.save_pretrained(tmp_path)
    again = network_of(kind, tiny_llama)
    trainable = {name for name, p in again.named_parameters() if p.requires_grad}
    again.load_weights(tmp_path)
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trainable
    expected = network.state_dict()
    assert list(again.state_dict()) == list(expected)
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name
    # and bytes: saved again they are the same
    again.save_pretrained(tmp_path / "again")
    files = [p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*.safetensors")]
    assert files
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / file).read_bytes()


def test_transformers_alone_loads_a_policy_and_its_critic(tiny_llama, tmp_path):
    network = moved(network_of("separate", tiny_llama))
    network.save_pretrained(tmp_path)  # type: ignore[operator]
    logits, values = outputs(network)  # type: ignore[arg-type]
    with torch.no_grad():
        policy = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        critic = hf.AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
        mask = (BATCH.segments > 0).long()
        seen = BATCH.segments > 0
        torch.testing.assert_close(policy(BATCH.tokens, attention_mask=mask).logits[seen], logits[seen])
        plain = critic(BATCH.tokens, attention_mask=mask).logits[:, :-1, 0]
        torch.testing.assert_close(plain[seen[:, 1:]], values[:, 1:][seen[:, 1:]])


def test_transformers_alone_loads_a_reward_model(tiny_llama, tmp_path):
    model: Any = moved(classifier(tiny_llama))
    Network(model).save_pretrained(tmp_path)
    plain = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        logits = plain(BATCH.tokens, attention_mask=(BATCH.segments > 0).long()).logits[:, 0]
        torch.testing.assert_close(scores(model.eval(), BATCH), logits)


@pytest.mark.parametrize("kind", ["policy", "separate", "shared"])
def test_missing_and_unexpected_weights_are_an_error(kind, tiny_llama, tmp_path):
    network = network_of(kind, tiny_llama)
    network.save_pretrained(tmp_path)
    file = {"policy": "model", "separate": "critic/model", "shared": "value_head"}[kind]
    path = tmp_path / f"{file}.safetensors"
    weights = load_file(path)
    lost = weights.pop("score.weight" if kind != "policy" else "model.layers.1.mlp.up_proj.weight")
    save_file(weights, path, {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=r"score\.weight|up_proj\.weight"):
        network.load_weights(tmp_path)
    names = {"policy": "model.layers.1.mlp.up_proj.weight"}
    save_file(weights | {names.get(kind, "score.weight"): lost, "extra": lost.clone()}, path, {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match="extra"):
        network.load_weights(tmp_path)


@pytest.mark.parametrize("layers", [1, 3])
def test_an_adapter_of_another_shape_is_an_error(layers, tiny_llama, tmp_path):
    lora(tiny_llama(num_hidden_layers=layers)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.(1|2)\..*lora"):
        load_weights(lora(tiny_llama()), tmp_path)


def test_activation_checkpointing_reaches_policy_and_critic(tiny_llama):
    network = network_of("separate", tiny_llama)
    network.activation_checkpointing_enable()
    assert network.critic is not None
    for part in (network.policy, network.critic):
        assert all(m.gradient_checkpointing for m in part.modules() if hasattr(m, "gradient_checkpointing"))
        assert any(hasattr(m, "gradient_checkpointing") for m in part.modules())
