"""Two processes give the results of one, with whole weights (DDP) and with sharded ones (FSDP2)."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM

from burnish import SFT, UserError
from burnish.models import collectives, sharding
from burnish.models.heads import VALUE_HEAD
from burnish.models.sharding import check_model
from burnish.types import Conversation
from layouts import TIMES, check, check_saved, job, launch, tolerance

CASES = ["sft lora checkpointing", "dpo", "ppo shared float64"]
OUT_OF_MEMORY = ["sft lora checkpointing", "distill", "ppo separate"]
RESUMED = ["sft lora", "ppo separate float64"]
ROWS = [Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), None, "c:1")]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two processes have trained ``CASES``."""
    folder = tmp_path_factory.mktemp("sharded")
    launch("train", folder, CASES)
    return folder


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_what_one_does_sharded_or_not(case: str, out: Path, tmp_path: Path) -> None:
    one, several = job.train(case, tmp_path), torch.load(out / "results.pt")
    check(case, one, several["ddp"][case])
    check(case, one, several["fsdp2"][case])
    check_saved(case, several["fsdp2"][case])


def test_saved_weights_load_with_transformers(out: Path) -> None:
    """One with tied embeddings and a critic, and one with an adapter."""
    results = torch.load(out / "results.pt")["fsdp2"]
    folder = out / "fsdp2" / "ppo shared float64"
    saved = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")  # tied weights are saved once
    parts = {f"policy.{n}": p for n, p in saved.named_parameters()}
    parts |= {f"critic.{n}": x for n, x in load_file(folder / VALUE_HEAD).items()}
    weights = results["ppo shared float64"]["weights"]
    assert parts.keys() == weights.keys() and all(torch.equal(parts[n], x) for n, x in weights.items())
    adapter = load_file(out / "fsdp2" / "sft lora checkpointing" / "adapter_model.safetensors")
    weights = results["sft lora checkpointing"]["weights"]
    trained = {n.replace(".default", ""): x for n, x in weights.items() if "lora_" in n}
    assert trained and adapter.keys() == {n.removeprefix("policy.") for n in trained}
    assert all(torch.equal(adapter[n.removeprefix("policy.")], x) for n, x in trained.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
def test_every_layout_resumes_from_the_checkpoints_of_every_other(tmp_path: Path) -> None:
    """In the same layout with the same bytes. The first checkpoint of PPO has no optimizer state of the policy."""
    ends: dict[Any, Any] = {(case, "one", None): job.resume(case, tmp_path, "one") for case in RESUMED}
    ends |= launch("resume", tmp_path, RESUMED)
    for case in RESUMED:
        ends |= {(case, "one", start): job.resume(case, tmp_path, "one", start) for start in job.LAYOUTS}
    assert len(ends) == len(RESUMED) * 3 * 4
    for (case, layout, start), (rows, weights) in ends.items():
        expected_rows, expected = ends[case, "one", None]
        assert rows == expected_rows and len(rows) == 2
        for name, weight in weights.items():
            if start in (None, layout):
                assert torch.equal(weight, ends[case, layout, None][1][name]), (case, layout, name)
            within = tolerance(case)
            torch.testing.assert_close(weight, expected[name], atol=within, rtol=within, msg=f"{case} {layout} {start}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
def test_if_one_process_runs_out_of_memory_all_of_them_repeat_the_step(tmp_path: Path) -> None:
    results = launch("out_of_memory", tmp_path, OUT_OF_MEMORY)
    for case in OUT_OF_MEMORY:
        one = job.train(case, tmp_path / case)
        for layout in ("ddp", "fsdp2"):
            several = results[layout][case]
            first, second = several["failed"]
            assert first == {"forward": 0, "backward": 0} and min(second.values()) >= 1, second
            within = tolerance(case)
            for name, value in several["metrics"].items():
                if not name.endswith(TIMES):
                    assert value == pytest.approx(one["metrics"][0][name], rel=within, abs=within), name
            for name, weight in one["weights"].items():
                torch.testing.assert_close(several["weights"][name], weight, atol=within, rtol=within, msg=name)


def logs(run: dict[str, Any]) -> list[dict[str, float]]:
    """What was logged after each optimizer step."""
    return [log for log in run["metrics"] if "grad_norm" in log]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
def test_in_bfloat16_shards_are_float32_and_losses_those_of_float32_up_to_rounding(tmp_path: Path) -> None:
    cases = ["sft lora bf16", "dpo bf16", "reward lora bf16", "ppo shared bf16", "ppo separate bf16"]
    results = launch("train", tmp_path, cases)
    for case in cases:
        online = case.startswith("ppo")  # rounding changes which tokens are sampled, and then the loss
        expected = logs(job.train(case if online else case.removesuffix(" bf16"), tmp_path / "one"))
        for layout in ("ddp", "fsdp2"):
            several = results[layout][case]
            assert {weight.dtype for weight in several["weights"].values()} == {torch.float32}
            steps = logs(several)
            if online:
                assert steps[0]["entropy"] == pytest.approx(expected[0]["entropy"], rel=0.02)
                assert all(0 < log["sampler_mismatch"] < 0.02 for log in steps)
            for log, other in zip(steps[:2], expected[:2], strict=True):
                if online and log["score"] != other["score"]:
                    break
                assert log["loss"] == pytest.approx(other["loss"], rel=0.02, abs=0.02)
                assert log["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.1)
                assert online or log["grad_norm"] != other["grad_norm"]
            if case.startswith("dpo"):  # sharded, embeddings and norms of the reference stay in float32
                near = 0.005 if layout == "fsdp2" else 0
                assert max(abs(steps[0][name]) for name in ("margin", "chosen")) <= near
    check_saved("dpo bf16", results["fsdp2"]["dpo bf16"])


@pytest.mark.acceptance
def test_continuous_batching_samples_from_an_unsharded_copy(tmp_path: Path) -> None:
    results = launch("train", tmp_path, ["rloo continuous"])
    whole, sharded = (results[layout]["rloo continuous"] for layout in ("ddp", "fsdp2"))
    check("rloo continuous", whole, sharded)
    mismatches = [line["sampler_mismatch"] for line in sharded["metrics"] if "sampler_mismatch" in line]
    assert len(mismatches) == 3 and max(mismatches) < 0.05


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"optim": "adafactor"}, "sharded: optim adafactor does not work: use adamw_torch, adamw_torch_fused, sgd"),
        ({"torch_compile": True}, "sharded: torch_compile does not work: remove it"),
        ({"fp16": True}, "sharded: fp16 does not work: use bf16"),
        ({"push_to_hub": True}, "sharded: push_to_hub does not work: remove it, and upload the finished folder"),
        ({}, "sharded: there is only one process"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    arguments: dict[str, Any], message: str, make_trainer: Any, tiny_llama: Any
) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer(SFT(), tiny_llama(), ROWS, own={"sharded": True}, **arguments)


def test_only_public_names_of_torch_are_used() -> None:
    """Of FSDP2 and of collectives, whose private parts change between versions of torch."""
    for module in (sharding, collectives):
        source = Path(str(module.__file__)).read_text("utf-8")
        assert not re.search(r"torch\.distributed[\w.]*\._", source)
    used = ("set_custom_all_gather", "set_custom_reduce_scatter", "reset_iter_state")
    assert all(callable(getattr(FSDPModule, name)) for name in used)


def test_quantized_models_are_refused(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_model(tiny_llama())
    monkeypatch.setattr(sharding, "is_quantized", lambda model: True)
    with pytest.raises(UserError, match="quantized weights cannot be sharded"):
        check_model(tiny_llama())
