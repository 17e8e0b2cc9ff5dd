"""What `burnish inspect MODEL` says about models that the tests build, without loading more than it must."""

import io
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from rich.console import Console
from typer.testing import CliRunner

from builders import CHATML, SIZES, character_tokenizer, llama
from burnish import cli
from burnish.commands.inspect_model import Description, describe, show
from burnish.errors import UserError
from burnish.models import loading
from burnish.models.adapters import add_adapter
from burnish.models.heads import Network, StepValueHead
from burnish.models.settings import AdapterConfig
from burnish.render.templates import PLAIN_TEMPLATES

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
POSITION = "position of the score"
NO_PAD = {**SIZES, "vocab_size": 105, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}


def saved(folder: Path, model: Any, **settings: Any) -> str:
    """Save a model and a tokenizer, whose attributes ``settings`` are."""
    tokenizer = character_tokenizer()
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def classifier(cls: Any, config: Any, labels: int = 1, **more: Any) -> Any:
    config.num_labels = labels
    for name, value in more.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return cls(config).eval()


def reward_model(**config: Any) -> Any:
    return classifier(hf.LlamaForSequenceClassification, llama().config, **config)


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def scores(described: Description) -> dict[str, float]:
    """The score that is shown for each way to pad, and for Burnish."""
    found = {name: re.search(r"score (-?[\d.]+)", fact) for name, fact in described.facts[POSITION].items()}
    return {name: float(match[1]) for name, match in found.items() if match}


# --- what a model is -----------------------------------------------------------------------------------------------


def test_a_language_model(tmp_path):
    described = describe(saved(tmp_path, llama(tie_word_embeddings=True)))
    model, parameters = described.facts["model"], described.facts["parameters"]
    assert model["what"] == "a language model" and model["class"] == "LlamaForCausalLM"
    assert model["file"] == "transformers/models/llama/modeling_llama.py" and model["remote code"] == "none"
    assert model["context window"] == "256 tokens" and model["attention"] == "causal, full in all 2 layers"
    assert model["tied embeddings"].startswith("yes")
    total = sum(p.numel() for p in llama(tie_word_embeddings=True).parameters())
    assert parameters["total"] == f"{total:,}" and parameters["stored as"] == "float32"
    parts = [int(count.replace(",", "")) for name, count in parameters.items() if name.startswith("  ")]
    assert sum(parts) == total and parameters["  model.embed_tokens"] == "3,360"
    assert described.facts["head"] == {"layer": "105 x 32, without bias"}
    assert POSITION not in described.facts and not described.warnings


def test_a_reward_model(tmp_path):
    described = describe(saved(tmp_path, reward_model(score_mean=0.25, score_std=1.5)))
    head = described.facts["head"]
    assert described.facts["model"]["what"].startswith("a reward model: a causal model")
    assert head["layer score"] == "1 x 32, without bias" and "0.2500 and 1.500" in head["stored mean and spread"]
    assert described.facts["special tokens"]["pad equals eos"] == "no"
    assert len(scores(described)) == 5 and len(set(scores(described).values())) == 1
    assert not described.warnings


def test_a_classifier_with_three_labels_is_an_encoder_that_pools_its_first_token(tmp_path):
    names = {"id2label": {0: "bad", 1: "[/bold]", 2: "good"}}
    model = classifier(hf.BertForSequenceClassification, hf.BertConfig(**NO_PAD, pad_token_id=0), 3, **names)
    described = describe(saved(tmp_path, model))
    assert described.facts["model"]["what"].startswith("a classifier with 3 labels: an encoder")
    assert described.facts["model"]["attention"].startswith("in both directions")
    assert described.facts["head"]["labels"] == "0 'bad', 1 '[/bold]', 2 'good'"
    assert described.facts[POSITION]["transformers"].startswith("pools 0 '<|bos|>'")
    shown = CliRunner().invoke(cli.app, ["inspect", str(tmp_path)])
    assert shown.exit_code == 0 and "'[/bold]'" in shown.output


def test_attention_windows(tmp_path):
    sizes: dict[str, Any] = {**NO_PAD, "num_hidden_layers": 3, "sliding_window": 16, "head_dim": 8}
    config = hf.Gemma2Config(**sizes, num_key_value_heads=2, pad_token_id=0)
    described = describe(saved(tmp_path, hf.Gemma2ForCausalLM(config)))
    attention = described.facts["model"]["attention"]
    assert attention == "causal, 2 layers sliding with a window of 16 tokens, 1 layers full"


def test_remote_code_is_named_and_does_not_run(tmp_path):
    folder = saved(tmp_path, llama())
    (tmp_path / "modeling_mine.py").write_text("raise SystemExit('it ran')")
    edit(tmp_path / "config.json", model_type="mine", auto_map={"AutoConfig": "modeling_mine.MineConfig"})
    described = describe(folder)
    assert "(modeling_mine.py), which would run" in described.facts["model"]["remote code"]
    assert described.facts["parameters"]["total"] == f"{sum(p.numel() for p in llama().parameters()):,}"
    assert "trust_remote_code" in described.warnings[0]


def test_a_step_value_model(tmp_path):
    saved(tmp_path, llama())
    Network(llama(), StepValueHead(32, delimiter=";")).save_pretrained(tmp_path)
    described = describe(str(tmp_path))
    assert described.facts["model"]["what"] == "a language model with a value head"
    head, position = described.facts["head"], described.facts[POSITION]
    assert head["value head"] == "1 x 32, with bias, in value_head.safetensors" and "tanh" in head["value"]
    assert head["delimiter"] == "';' ends a reasoning step"
    assert position["sample"].startswith("'2 + 3 = 5;The answer is 5;'")
    assert position["Burnish"].endswith("9 ';', 25 ';'")


def test_escape_codes_of_a_model_are_shown_as_text(tmp_path):
    """Its config, its tokenizer and its adapter are files of a stranger: none may act on the terminal."""
    control = "\x1b[2J\x9b1m\u202e"
    template = f"{{{{ raise_exception('{control}') }}}}"
    folder = saved(tmp_path / "model", reward_model(score_mean=control, score_std=1.0), chat_template=template)
    edit(tmp_path / "model" / "config.json", auto_map={"AutoModel": f"{control}.Model"})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": control, "target_modules": [control]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    for named in (folder, str(adapter)):
        shown = CliRunner().invoke(cli.app, ["inspect", named])
        assert shown.exit_code == 0, shown.stderr
        assert r"\x1b[2J" in shown.output and not {*control} - {*"[2J1m"} & {*shown.output}


# --- weights -------------------------------------------------------------------------------------------------------


def test_missing_shards_are_named(tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size="60KB")
    lost = "model-00002-of-00002.safetensors"
    (tmp_path / lost).unlink()
    described = describe(str(tmp_path))
    assert described.facts["parameters"]["files"].startswith(f"1 of 2; missing: {lost}")
    assert any(
        f"1 of 2 weight files are missing, so the model cannot be loaded: {lost}" in w for w in described.warnings
    )


def test_damaged_and_pickled_weights_are_reported(tmp_path):
    saved(tmp_path, reward_model())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert any("model.safetensors cannot be read" in warning for warning in describe(str(tmp_path)).warnings)
    weights.rename(tmp_path / "pytorch_model.bin")
    assert any("pickle files" in warning for warning in describe(str(tmp_path)).warnings)


def test_a_classifier_whose_head_is_not_stored_is_reported(tmp_path):
    saved(tmp_path, llama())
    edit(tmp_path / "config.json", architectures=["LlamaForSequenceClassification"], num_labels=1)
    assert any("hold no head" in warning for warning in describe(str(tmp_path)).warnings)


def test_a_gguf_file_is_described_without_being_converted(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_name("tiny")
    for name, value in {"context_length": 64, "embedding_length": 32, "block_count": 1, "head_count": 4}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_feed_forward_length(48)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab"])
    writer.add_token_types([3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHATML)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), np.float16))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    for reference in (tmp_path / "tiny.gguf", tmp_path):
        described = describe(str(reference))
        assert described.facts["model"]["what"] == "a language model in a GGUF file"
        assert described.facts["model"]["context window"] == "64 tokens"
        assert described.facts["parameters"]["stored as"] == "float16"
    assert not (tmp_path / "cache").exists()


# --- adapters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path) -> Path:
    """An adapter beside its base."""
    base = saved(tmp_path / "base", llama())
    policy: Any = loading.load_policy(base)
    adapted = add_adapter(policy, AdapterConfig.model_validate({"r": 4}), "CAUSAL_LM", loading.describe(base))
    Network(adapted).save_policy(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_names_its_base_and_its_hash(adapter):
    described = describe(str(adapter))
    facts = described.facts["adapter"]
    assert facts["kind"] == "LORA on a language model" and facts["settings"].startswith("r 4, alpha")
    assert facts["base"] == str(adapter.parent / "base") and facts["base is here"].startswith("yes")
    assert facts["hash of the base"].endswith("recorded; the base here has the same")
    model: Any = loading.load_policy(str(adapter))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert facts["trained"] == f"{trained:,} parameters; the base is frozen"
    assert described.facts["model"]["what"] == "a language model with its adapter"


def test_an_adapter_with_another_base_or_without_one_is_reported(adapter):
    llama(seed=1).save_pretrained(adapter.parent / "base")
    described = describe(str(adapter))
    assert any("not the base that the adapter was trained on" in warning for warning in described.warnings)
    (adapter.parent / "base").rename(adapter.parent / "moved")
    described = describe(str(adapter))
    assert described.facts["adapter"]["base is here"] == "no" and "model" not in described.facts
    assert "the base is not here" in described.warnings[0]


def test_the_adapter_of_a_reward_model_has_its_head(tmp_path):
    base = saved(tmp_path / "base", llama())
    model: Any = loading.load_reward_model(base)
    adapted = add_adapter(model, AdapterConfig.model_validate({"r": 2}), "SEQ_CLS", loading.describe(base))
    Network(adapted).save_policy(tmp_path / "adapter")
    described = describe(str(tmp_path / "adapter"))
    assert described.facts["model"]["what"].startswith("a reward model")
    assert described.facts["head"]["layer score"] == "1 x 32, without bias"
    assert "score among them" in described.facts["adapter"]["trained"]


# --- which position is read ----------------------------------------------------------------------------------------


def test_gpt_neox_without_a_pad_id(tmp_path):
    config = hf.GPTNeoXConfig(**NO_PAD)
    config.pad_token_id = None
    model = classifier(hf.GPTNeoXForSequenceClassification, config)
    described = describe(saved(tmp_path, model, pad_token=None))
    position, length = described.facts[POSITION], int(described.facts[POSITION]["Burnish"].split()[0]) + 1
    assert position["transformers, alone"].startswith(f"{length - 1} ")
    assert position["transformers, alone, padded"].startswith(f"{2 * length - 1} padding")
    assert position["transformers, batch, padded right"].startswith("refused: Cannot handle batch sizes > 1")
    assert "none in the tokenizer; in the config" not in described.facts["special tokens"]["pad"]
    assert described.facts["special tokens"]["pad"].endswith("Burnish pads with '<|pad|>' (0)")
    assert any("alone, padded" in w for w in described.warnings) and any(
        "no pad_token_id" in w for w in described.warnings
    )


def test_a_text_that_ends_with_eos_where_pad_is_eos(tmp_path):
    template = PLAIN_TEMPLATES["text"]  # it ends with the eos token
    settings = {"pad_token": "<|im_end|>", "chat_template": template}
    described = describe(saved(tmp_path, reward_model(pad_token_id=2), **settings))
    position = described.facts[POSITION]
    last = int(position["Burnish"].split()[0])
    assert position["Burnish"].startswith(f"{last} '<|im_end|>'")
    for padding in ("alone", "batch, padded right", "batch, padded left"):
        assert position[f"transformers, {padding}"].startswith(f"{last - 1} '.'")
    assert described.facts["special tokens"]["pad equals eos"] == "yes"
    assert sum("reads another token than Burnish" in warning for warning in described.warnings) == 4


def test_left_padding_of_a_model_with_absolute_positions(tmp_path):
    config = hf.GPT2Config(
        vocab_size=105, n_positions=128, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=2
    )
    described = describe(saved(tmp_path, classifier(hf.GPT2ForSequenceClassification, config)))
    shown = scores(described)
    assert shown["transformers, batch, padded left"] != shown["Burnish"] == shown["transformers, batch, padded right"]
    assert [w for w in described.warnings if "depends on padding (batch, padded left)" in w] == described.warnings


# --- templates -----------------------------------------------------------------------------------------------------

NO_END = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
FORGETS = (  # a template that shortens earlier turns
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% else %}{{ 'x' }}{% endif %}"
    "{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, {"family": "ChatML", "marks the assistant": "yes", "keeps prefixes": "yes"}),
        (PLAIN_TEMPLATES["question_answer"], {"family": "question_answer", "marks the assistant": "yes"}),
        (NO_END, {"family": "ChatML", "marks the assistant": "no", "ends turns": "no: "}),
        (FORGETS, {"keeps prefixes": "no: earlier turns", "keeps reasoning of earlier turns": "no"}),
        ("{{ raise_exception('never') }}", {"family": "unknown"}),
        (None, {"family": "none: "}),
    ],
)
def test_chat_templates(template, expected, tmp_path):
    facts = describe(saved(tmp_path, llama(), chat_template=template)).facts["chat template"]
    for name, fact in expected.items():
        assert facts[name].startswith(fact), name


# --- what is no model ----------------------------------------------------------------------------------------------


def wrong(tmp_path: Path) -> dict[str, str]:
    """What somebody may name by mistake, with the reason that the message must give."""
    for name in ("empty", "list", "heads", "run/sft/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "list" / "config.json").write_text("[1]")
    (tmp_path / "heads" / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    both = r"neither a recipe nor a model: .*\n  a recipe is a \.yaml file or one of .*tiny\n  a model is a folder"
    return {
        "empty": both,
        "notes.txt": both,
        "./nowhere": both,
        "org/nothing": both,
        "tniy": "did you mean 'tiny'",
        "run": "folder of a run: name one of its stages: sft",
        "list": r"config\.json: expected a JSON object, got \[1\]",
        "heads": "cannot be read: ZeroDivisionError|no model can be built",
    }


def test_what_is_no_model_is_one_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, reason in wrong(tmp_path).items():
        with pytest.raises(UserError, match=reason):
            describe(name)


def test_settings_of_recipes_do_not_apply_to_models(tmp_path):
    shown = CliRunner().invoke(cli.app, ["inspect", str(tmp_path), "--row", "1"])
    assert shown.exit_code == 2 and "apply only to recipes" in shown.stderr


def test_a_long_fact_is_wrapped_in_a_terminal_and_whole_in_a_file(tmp_path):
    folder = saved(tmp_path, reward_model(score_mean=0.07278002053499222, score_std=1.5))
    shown = {}
    for terminal in (True, False):
        output = io.StringIO()
        show(folder, Console(file=output, width=40, force_terminal=terminal, color_system=None))
        shown[terminal] = output.getvalue().splitlines()
    assert max(map(len, shown[True])) <= 40 < max(map(len, shown[False]))
    assert "  stored mean and spread  0.0728 and 1.500, used with normalize: true" in shown[False]
