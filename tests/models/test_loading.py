"""Models are loaded whole and as requested; anything else is an error with one message."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import builders
from burnish.errors import UserError
from burnish.models import loading
from burnish.models.adapters import add_adapter
from burnish.models.batching import collate
from burnish.models.forward import head, scores
from burnish.models.loading import (
    convert_gguf,
    load_policy,
    load_reward_model,
    load_tokenizer,
    package_folder,
    resolve,
    summary,
)
from burnish.models.settings import AdapterConfig
from burnish.types import Example, Sequence

BATCH = collate([Example((Sequence(tuple(range(3, 3 + n)), (False,) + (True,) * (n - 1), "x"),)) for n in (6, 4)], 0)
SIZES: dict[str, Any] = {
    **builders.SIZES,
    "vocab_size": 105,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def llama(tiny_llama, tiny_tokenizer, tmp_path) -> Path:
    """A folder with a policy and its tokenizer."""
    tiny_llama().save_pretrained(tmp_path / "llama")
    tiny_tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def classifier(cls: Any, config: Any, labels: int = 1) -> Any:
    config.num_labels = labels
    torch.manual_seed(0)
    return cls(config)


def lora(model: Any, task: Any) -> Any:
    settings: dict[str, Any] = {"r": 4}
    model = add_adapter(model, AdapterConfig(**settings), task)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


# --- references ----------------------------------------------------------------------------------------------------


def test_a_folder_refers_to_itself_or_to_the_model_in_it(tmp_path):
    inner = tmp_path / "stage" / "model"
    inner.mkdir(parents=True)
    (inner / "config.json").write_text("{}")
    assert resolve(str(inner)) == resolve(str(tmp_path / "stage")) == str(inner)


def test_an_adapter_folder_is_also_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert resolve(str(tmp_path)) == str(tmp_path)


def test_a_hub_id_is_returned_unchanged():
    assert resolve("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("reference", ["./nowhere", "/nowhere", "~/nowhere", "runs/a/model"])
def test_a_missing_path_is_an_error(reference, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{reference}: not a model: expected a folder with config.json"):
        resolve(reference)


def test_a_file_that_is_not_a_model_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="not a model"):
        resolve(str(tmp_path / "notes.txt"))


def test_a_folder_without_a_model_is_an_error_that_names_its_content(tmp_path):
    with pytest.raises(UserError, match=r"it has no config\.json"):
        resolve(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"2 GGUF files: name one of a\.gguf, b\.gguf"):
        resolve(str(tmp_path))


def test_a_gguf_file_is_converted_once_for_its_bytes(tmp_path, monkeypatch, tiny_llama, tiny_tokenizer):
    calls = []

    def read(kind, made):
        def from_pretrained(folder, gguf_file, **options):
            calls.append((kind, Path(folder) / gguf_file, options.get("dtype")))
            return made

        return from_pretrained

    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", read("model", tiny_llama()))
    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", read("tokenizer", tiny_tokenizer))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF one")
    first = resolve(str(tmp_path))
    assert calls == [("model", file, torch.float32), ("tokenizer", file, None)]
    assert Path(first).parent == tmp_path / "cache" / "models"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in Path(first).iterdir()}
    assert resolve(str(file)) == first and len(calls) == 2
    with monkeypatch.context() as unread:  # neither the file nor the folder is read again while they are the same
        unread.setattr("burnish.files.sha256", lambda path: pytest.fail(f"reads {path}"))
        assert resolve(str(file)) == first
    weights = Path(first) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.warns(UserWarning, match=r"model\.safetensors has changed since it was saved: it will be rebuilt"):
        assert resolve(str(file)) == first
    assert len(calls) == 4
    file.write_bytes(b"GGUF two")
    assert resolve(str(file)) != first and len(calls) == 6


def test_two_processes_that_convert_one_file_do_not_collide(tmp_path, monkeypatch, tiny_llama, tiny_tokenizer):
    def read(made, before=lambda: None):
        def from_pretrained(folder, gguf_file, **options):
            before()
            return made

        return from_pretrained

    def first():
        """Another process, that began later and is done sooner."""
        monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", read(tiny_tokenizer))
        with monkeypatch.context() as other:
            other.setattr("os.getpid", lambda: 1)
            done.append(convert_gguf(file))

    done: list[Path] = []
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", read(tiny_llama()))
    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", read(tiny_tokenizer, first))
    assert convert_gguf(file) == done[0]
    assert [p.name for p in done[0].parent.iterdir()] == [done[0].name]  # the second process left nothing behind
    assert (done[0] / "model.safetensors").is_file() and (done[0] / "tokenizer.json").is_file()


def test_a_broken_gguf_file_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"nonsense" * 10)
    with pytest.raises(UserError, match=r"m\.gguf: cannot be read as a GGUF model"):
        convert_gguf(tmp_path / "m.gguf")
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_a_package_is_found_without_being_imported(tmp_path, monkeypatch):
    (tmp_path / "some_weights").mkdir()
    (tmp_path / "some_weights" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert package_folder("some_weights") == tmp_path / "some_weights"
    assert package_folder("no_such_weights") is None


# --- tokenizers ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_keeps_its_pad_token(llama):
    assert load_tokenizer(str(llama)).pad_token == "<|pad|>"


def test_a_tokenizer_without_a_pad_token_pads_with_a_spare_token_or_eos(tiny_tokenizer, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tiny_tokenizer.pad_token = None
    tiny_tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == "<|pad|>"
    text = (tmp_path / "tokenizer.json").read_text().replace("<|pad|>", "<|else|>")
    (tmp_path / "tokenizer.json").write_text(text)
    assert load_tokenizer(str(tmp_path)).pad_token == "<|unk|>"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": None}))
    assert load_tokenizer(str(tmp_path)).pad_token == "<|im_end|>"


def test_a_model_without_a_tokenizer_is_an_error(tiny_llama, tmp_path):
    with pytest.raises(UserError, match="cannot be loaded as AutoTokenizer"):
        load_tokenizer(saved(tiny_llama(), tmp_path))


# --- policies ------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_policy_is_loaded_in_the_requested_dtype(dtype, llama, tiny_llama):
    model: Any = load_policy(str(llama), dtype=dtype)
    assert model.dtype == dtype
    for name, value in tiny_llama().to(dtype).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@torch.no_grad()
def test_a_policy_with_an_adapter_keeps_training_it(llama, tmp_path):
    model = lora(hf.AutoModelForCausalLM.from_pretrained(llama), "CAUSAL_LM")
    again: Any = load_policy(saved(model, tmp_path / "adapter")).eval()
    torch.testing.assert_close(again(BATCH.tokens).logits, model(BATCH.tokens).logits)
    assert all(p.requires_grad == ("lora_" in name) for name, p in again.named_parameters())


def test_an_adapter_without_a_base_is_an_error(tiny_llama, tmp_path):
    with pytest.raises(UserError, match="does not name its base model"):
        load_policy(saved(lora(tiny_llama(), "CAUSAL_LM"), tmp_path))


def edit(settings: Path, **values: Any) -> None:
    settings.write_text(json.dumps(json.loads(settings.read_text()) | values))


DAMAGE: dict[str, Any] = {
    "no adapter_model.safetensors beside": lambda config, weights: weights.unlink(),
    "damaged, or not an adapter of": lambda config, weights: weights.write_bytes(weights.read_bytes()[:500]),
    "adapter_config.json: not valid JSON": lambda config, weights: config.write_text("{"),
    "size mismatch": lambda config, weights: edit(config, r=8),
    "Found missing adapter keys": lambda config, weights: edit(config, target_modules=["q_proj", "lm_head"]),
    "Target modules .*nope.* not found": lambda config, weights: edit(config, target_modules=["nope"]),
    "the adapter of a reward model": lambda config, weights: edit(config, task_type="SEQ_CLS"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_an_adapter_that_is_damaged_or_of_another_model_is_an_error(message, llama, tmp_path):
    folder = Path(saved(lora(hf.AutoModelForCausalLM.from_pretrained(llama), "CAUSAL_LM"), tmp_path / "adapter"))
    DAMAGE[message](folder / "adapter_config.json", folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=message):
        load_policy(str(folder))


def test_missing_weights_are_never_made_up(llama):
    weights = load_file(llama / "model.safetensors")
    for name in ("up_proj", "down_proj", "gate_proj"):
        del weights[f"model.layers.1.mlp.{name}.weight"]
    del weights["model.norm.weight"]
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"no weights for model\.layers\.1\.mlp\.down_proj\.weight, .* and 1 more"):
        load_policy(str(llama))


def test_tied_weights_are_not_missing(tiny_llama, tmp_path):
    model: Any = load_policy(saved(tiny_llama(tie_word_embeddings=True), tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("damage", ["weights", "config", "shapes"])
def test_a_damaged_model_is_an_error(damage, llama, tiny_llama):
    weights = llama / "model.safetensors"
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "config":
        (llama / "config.json").write_text("{")
    else:
        tiny_llama(intermediate_size=48).config.save_pretrained(llama)
    wrong = "/config.json: not valid JSON" if damage == "config" else ": cannot be loaded as AutoModelForCausalLM: "
    with pytest.raises(UserError, match=f"{llama}{wrong}") as error:
        load_policy(str(llama))
    assert "\n" not in str(error.value)


def test_an_encoder_is_not_a_policy(tmp_path):
    model = classifier(hf.BertForSequenceClassification, hf.BertConfig(**SIZES))
    with pytest.raises(UserError, match="it has no weights for"):
        load_policy(saved(model, tmp_path))


def test_a_head_that_burnish_cannot_reproduce_is_refused(llama, monkeypatch):
    monkeypatch.setattr(loading, "head", lambda model: lambda hidden: 2 * head(model)(hidden))
    with pytest.raises(UserError, match="LlamaForCausalLM changes its logits after the head"):
        load_policy(str(llama))


# --- reward models -------------------------------------------------------------------------------------------------


def test_a_policy_becomes_a_reward_model_with_a_new_head(tmp_path):
    sizes: dict[str, Any] = {**SIZES, "hidden_size": 2048, "intermediate_size": 8}
    policy = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    torch.manual_seed(0)
    model: Any = load_reward_model(saved(policy, tmp_path))
    assert torch.equal(model.model.embed_tokens.weight, policy.model.embed_tokens.weight)
    assert model.score.weight.shape == (1, 2048)
    assert model.score.weight.std().item() == pytest.approx(1 / math.sqrt(2049), rel=0.1)


@torch.no_grad()
@pytest.mark.parametrize("labels", [1, None])
def test_a_trained_reward_model_is_loaded_unchanged(labels, tiny_llama, tmp_path):
    model = classifier(hf.LlamaForSequenceClassification, copy.deepcopy(tiny_llama().config)).eval()
    again = load_reward_model(saved(model, tmp_path), labels=labels).eval()
    torch.testing.assert_close(scores(again, BATCH), scores(model, BATCH))


def test_dropout_of_reward_models_is_off(tmp_path):
    model = classifier(hf.BertForSequenceClassification, hf.BertConfig(**SIZES))
    again = load_reward_model(saved(model, tmp_path)).train()
    assert torch.equal(scores(again, BATCH), scores(again, BATCH))
    assert not hasattr(again, "score")


def test_a_model_without_a_score_head_is_not_a_reward_model(llama):
    with pytest.raises(UserError, match=r"it has no weights for score\.weight"):
        load_reward_model(str(llama), labels=None)


def test_a_wrong_number_of_labels_is_an_error(tmp_path):
    folder = saved(classifier(hf.BertForSequenceClassification, hf.BertConfig(**SIZES), labels=3), tmp_path)
    with pytest.raises(UserError, match="requested number of labels"):
        load_reward_model(folder, labels=1)
    model: Any = load_reward_model(folder, labels=None)
    assert model.classifier.out_features == 3


@torch.no_grad()
@pytest.mark.parametrize("labels", [1, None])
def test_a_reward_model_with_an_adapter_keeps_training_it(labels, llama, tmp_path):
    base = hf.AutoModelForSequenceClassification.from_pretrained(llama, num_labels=1)
    model = lora(base, "SEQ_CLS")
    again = load_reward_model(saved(model, tmp_path / "adapter"), labels=labels).eval()
    torch.testing.assert_close(scores(again, BATCH), scores(model, BATCH))
    assert any("lora_" in name and p.requires_grad for name, p in again.named_parameters())


@torch.no_grad()
def test_an_adapter_of_a_policy_is_merged_before_the_new_head(llama, tmp_path):
    policy = lora(hf.AutoModelForCausalLM.from_pretrained(llama), "CAUSAL_LM")
    folder = saved(policy, tmp_path / "adapter")
    model: Any = load_reward_model(folder)
    assert type(model) is hf.LlamaForSequenceClassification
    assert all(p.requires_grad for p in model.parameters())
    merged = policy.merge_and_unload().model(BATCH.tokens).last_hidden_state
    torch.testing.assert_close(model.model(BATCH.tokens).last_hidden_state, merged, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="no weights for score"):
        load_reward_model(folder, labels=None)


# --- what was loaded -----------------------------------------------------------------------------------------------


def test_summary_of_a_policy(llama):
    model: Any = load_policy(str(llama))
    body = 105 * 32 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32) + 32
    assert summary(model, load_tokenizer(str(llama))) == {
        "class": "LlamaForCausalLM",
        "defined in": "modeling_llama.py",
        "parameters": body + 105 * 32,
        "trainable": body + 105 * 32,
        "trainable share": 1.0,
        "dtype": "float32",
        "pad/eos/bos": [0, 2, 1],
        "head": [105, 32],
    }
    adapted = lora(model, "CAUSAL_LM")
    facts = summary(adapted, load_tokenizer(str(llama)))
    # rank 4 times the two sides of every matrix
    factors = 4 * 2 * ((32 + 32) * 2 + (32 + 16) * 2 + 3 * (32 + 64))
    assert facts["trainable"] == factors and facts["parameters"] == body + 105 * 32 + factors


def test_summary_names_the_head_of_every_classifier(llama, tiny_tokenizer, tmp_path):
    encoder = classifier(hf.BertForSequenceClassification, hf.BertConfig(**SIZES))
    causal = load_reward_model(str(llama))
    assert summary(encoder, tiny_tokenizer)["head"] == [1, 32]
    assert summary(causal, tiny_tokenizer)["head"] == [1, 32]
    assert summary(lora(causal, "SEQ_CLS"), tiny_tokenizer)["head"] == [1, 32]
