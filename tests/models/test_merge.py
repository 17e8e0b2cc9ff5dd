"""An adapter is merged only into the base that it was trained on."""

import copy
import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from burnish import cli
from burnish.errors import UserError
from burnish.models import bases, loading
from burnish.models.adapters import add_adapter, wrap
from burnish.models.heads import Network, SharedCritic
from burnish.models.loading import describe, load_policy, load_reward_model, load_tokenizer
from burnish.models.merge import merge, policy_of
from burnish.models.settings import AdapterConfig

TOKENS = torch.tensor([[5, 9, 2, 30, 7, 11], [4, 4, 8, 50, 60, 70]])


@pytest.fixture
def sft(tiny_llama, tiny_tokenizer, tmp_path) -> Path:
    """The base that adapters of these tests are trained on, in two files."""
    model = tiny_llama(seed=1)
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, True
    model.save_pretrained(tmp_path / "sft", max_shard_size="40KB")
    tiny_tokenizer.save_pretrained(tmp_path / "sft")
    assert len(list((tmp_path / "sft").glob("*.safetensors"))) > 1
    return tmp_path / "sft"


@pytest.fixture
def raw(tiny_llama, tiny_tokenizer, tmp_path) -> Path:
    """What the base was made of: the same architecture and tokenizer, other weights."""
    tiny_llama(seed=0).save_pretrained(tmp_path / "raw")
    tiny_tokenizer.save_pretrained(tmp_path / "raw")
    return tmp_path / "raw"


def trained(
    base: Path,
    folder: Path,
    *,
    task: Any = "CAUSAL_LM",
    critic: Any = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Any:
    """An adapter on a base, changed as training would and saved as a stage saves it."""
    config: dict[str, Any] = {"r": 4} | settings
    load = load_policy if task == "CAUSAL_LM" else load_reward_model
    torch.manual_seed(0)
    model: Any = load(str(base), dtype=dtype)
    model = add_adapter(model, AdapterConfig(**config), task, describe(str(base))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    Network(model, critic).save_policy(folder)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return torch.stack([model(input_ids=row[None]).logits[0] for row in TOKENS])


# --- the hash of a base --------------------------------------------------------------------------------------------


def test_the_hash_covers_names_dtypes_shapes_and_bytes(tmp_path):
    save_file({"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    a = hashlib.sha256(b"a torch.int8 []\n" + bytes([3])).hexdigest()
    b = hashlib.sha256(b"b torch.float32 [1, 2]\n" + bytes.fromhex("0000803f00000040")).hexdigest()
    assert bases.weights_hash(str(tmp_path)) == hashlib.sha256(f"a {a}\nb {b}\n".encode()).hexdigest()


def test_the_hash_depends_on_every_weight_but_not_on_the_files(sft, tmp_path):
    whole = tmp_path / "whole"
    hf.AutoModelForCausalLM.from_pretrained(sft).save_pretrained(whole)
    assert bases.weights_hash(str(whole)) == bases.weights_hash(str(sft))
    weights = load_file(whole / "model.safetensors")
    weights["model.norm.weight"][7] += 1e-6
    save_file(weights, whole / "model.safetensors")
    assert bases.weights_hash(str(whole)) != bases.weights_hash(str(sft))


def test_a_folder_without_safetensors_cannot_be_hashed(tmp_path):
    with pytest.raises(UserError, match="no weights in safetensors files"):
        bases.weights_hash(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        bases.weights_hash(str(tmp_path))


# --- merging -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_a_merged_model_gives_the_logits_of_the_adapter(settings, sft, tmp_path):
    adapted = trained(sft, tmp_path / "adapter", **settings)
    before = {path.name: path.read_bytes() for path in sft.iterdir()}
    lines: list[str] = []
    out = merge(str(tmp_path / "adapter"), say=lines.append)
    assert out == tmp_path / "adapter-merged"
    merged: Any = hf.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():  # in float64, so that only the merged weights are rounded
        difference = logits(copy.deepcopy(merged).double()) - logits(adapted.double())
    assert difference.abs().max() < 1e-5
    base: Any = hf.AutoModelForCausalLM.from_pretrained(sft).eval()
    assert (logits(base) - logits(merged)).abs().max() > 0.05
    assert {path.name: path.read_bytes() for path in sft.iterdir()} == before
    assert merged.generation_config.temperature == 0.7
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == load_tokenizer(str(sft)).chat_template
    text = "\n".join(lines)
    assert str(sft) in text and str(out) in text and "MiB" in text and "note" not in text


def test_merging_into_the_pretrained_model_instead_of_the_fine_tuned_one_is_refused(sft, raw, tmp_path):
    trained(sft, tmp_path / "adapter")
    with pytest.raises(UserError) as error:
        merge(str(tmp_path / "adapter"), base=str(raw))
    hashes = [bases.weights_hash(str(folder))[:12] for folder in (sft, raw)]
    assert all(part in str(error.value) for part in (str(sft), str(raw), *hashes))
    assert not (tmp_path / "adapter-merged").exists()


def test_the_command_refuses_in_one_message_with_exit_code_2(sft, raw, tmp_path):
    trained(sft, tmp_path / "adapter")
    done = CliRunner().invoke(cli.app, ["merge", str(tmp_path / "adapter"), "--base", str(raw)])
    assert done.exit_code == 2 and "was trained on" in done.stderr and "Traceback" not in done.stderr
    done = CliRunner().invoke(cli.app, ["merge", str(tmp_path / "adapter"), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0 and f"merged {tmp_path / 'out'}" in done.stdout
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_base_that_has_changed_since_is_refused_wherever_the_adapter_is_used(sft, raw, tmp_path):
    trained(sft, tmp_path / "adapter")
    shutil.rmtree(sft)
    shutil.copytree(raw, sft)
    for use in (merge, load_policy, load_reward_model):
        with pytest.raises(UserError, match="which has changed since: its weights are now"):
            use(str(tmp_path / "adapter"))


def test_a_run_with_relative_paths_can_be_moved_and_used_from_anywhere(sft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sft, Path("work/runs/x/sft"))
    monkeypatch.chdir("work")
    trained(Path("runs/x/sft"), Path("runs/x/more/adapter"))
    monkeypatch.chdir("..")
    assert loading.base_of("work/runs/x/more/adapter") == str(tmp_path / "work" / "runs" / "x" / "sft")
    Path("work").rename("elsewhere")
    assert loading.base_of("elsewhere/runs/x/more/adapter") == str(tmp_path / "elsewhere" / "runs" / "x" / "sft")
    loading.load_policy("elsewhere/runs/x/more/adapter")
    shutil.rmtree("elsewhere/runs/x/sft")
    with pytest.raises(UserError, match="its base runs/x/sft is not there"):
        loading.base_of("elsewhere/runs/x/more/adapter")


def test_a_base_that_was_moved_is_the_same_base(sft, tmp_path):
    adapted = trained(sft, tmp_path / "adapter")
    sft.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"its base .*sft \(weights [0-9a-f]{12}\) is not there: .* --base"):
        merge(str(tmp_path / "adapter"))
    with pytest.raises(UserError, match=r"its base .*sft is not there"):
        load_policy(str(tmp_path / "adapter"))
    out = merge(str(tmp_path / "adapter"), base=str(tmp_path / "moved"))
    merged: Any = hf.AutoModelForCausalLM.from_pretrained(out).eval()
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("named", [True, False])
def test_an_adapter_of_another_tool_is_merged_with_a_note(named, sft, tmp_path):
    base = hf.AutoModelForCausalLM.from_pretrained(sft)
    model: Any = wrap(base, LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapter")
    lines: list[str] = []
    if not named:
        path = tmp_path / "adapter" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
        with pytest.raises(UserError, match=r"its base that it does not name is not there: say where .* --base"):
            merge(str(tmp_path / "adapter"))
    out = merge(str(tmp_path / "adapter"), base=None if named else str(sft), say=lines.append)
    assert lines[0].startswith("note: ") and "does not record" in lines[0]
    merged: Any = hf.AutoModelForCausalLM.from_pretrained(out).eval()
    torch.testing.assert_close(logits(merged), logits(model.eval()), atol=1e-5, rtol=1e-5)


def test_the_score_head_of_a_reward_model_is_kept(sft, tmp_path):
    adapted = trained(sft, tmp_path / "adapter", task="SEQ_CLS")
    merged: Any = hf.AutoModelForSequenceClassification.from_pretrained(merge(str(tmp_path / "adapter"))).eval()
    head = adapted.base_model.model.score.modules_to_save["default"].weight
    assert torch.equal(merged.score.weight, head) and merged.config.pad_token_id == 0
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=1e-5)


def test_a_value_head_is_kept(sft, tmp_path):
    critic = SharedCritic(32)
    torch.nn.init.normal_(critic.score.weight)
    trained(sft, tmp_path / "adapter", critic=critic)
    stored = load_file(merge(str(tmp_path / "adapter")) / "value_head.safetensors")
    assert torch.equal(stored["score.weight"], critic.score.weight)


def test_a_base_in_half_precision_is_merged_in_float32_and_saved_in_its_dtype(sft, tmp_path):
    half = tmp_path / "half"
    base = hf.AutoModelForCausalLM.from_pretrained(sft, dtype=torch.bfloat16)
    base.save_pretrained(half)
    hf.AutoTokenizer.from_pretrained(sft).save_pretrained(half)
    adapted = trained(half, tmp_path / "adapter")
    merged: Any = hf.AutoModelForCausalLM.from_pretrained(merge(str(tmp_path / "adapter")))
    assert merged.dtype == torch.bfloat16
    exact = adapted.merge_and_unload().state_dict()
    # one rounding, of the sum: what float32 gives, to the nearest bfloat16
    assert all(torch.equal(value, exact[name].to(torch.bfloat16)) for name, value in merged.state_dict().items())


def test_a_trained_model_in_half_precision_is_freed_before_its_base_is_loaded_again(sft, tmp_path, monkeypatch):
    adapted = trained(sft, tmp_path / "adapter", dtype=torch.bfloat16)
    expected: Any = load_policy(str(tmp_path / "adapter"))
    exact = expected.merge_and_unload().state_dict()
    held = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        held.append(sum(p.numel() for p in adapted.parameters() if not p.requires_grad))
        return load_policy(*args, **kwargs)

    monkeypatch.setattr(loading, "load_policy", watched)
    merged = policy_of(adapted, tmp_path / "adapter")
    assert held == [0] and merged.dtype == torch.float32
    assert all(torch.equal(value, exact[name]) for name, value in merged.state_dict().items())


def test_nothing_is_overwritten(sft, tmp_path):
    trained(sft, tmp_path / "adapter")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        merge(str(tmp_path / "adapter"), output=tmp_path / "thesis")
    assert (tmp_path / "thesis" / "thesis.txt").read_text() == "mine"


def test_a_folder_that_is_not_an_adapter_is_an_error(sft, tmp_path):
    with pytest.raises(UserError, match=r"sft: not an adapter: expected a folder with adapter_config\.json"):
        merge(str(sft))
    trained(sft, tmp_path / "adapter")
    trained(sft, tmp_path / "other")
    with pytest.raises(UserError, match="other is an adapter itself"):
        merge(str(tmp_path / "adapter"), base=str(tmp_path / "other"))
    (tmp_path / "adapter" / "base.json").write_text(json.dumps({"base": 3}))
    with pytest.raises(UserError, match=r"base\.json: expected base and sha256 of weights"):
        merge(str(tmp_path / "adapter"))


def test_a_failed_merge_leaves_nothing(sft, tmp_path, monkeypatch):
    trained(sft, tmp_path / "adapter")
    monkeypatch.setattr("burnish.models.merge._logits", lambda model: torch.full((1,), math.nan))
    with pytest.raises(AssertionError, match="merging changed the logits"):
        merge(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter-merged").exists()
