"""Sharded weights (FSDP2) in two processes give the results of one process that has them all."""

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification, LlamaForCausalLM

from burnish import SFT, UserError
from burnish.models.heads import VALUE_HEAD
from burnish.types import Conversation

JOB = Path(__file__).with_name("sharded_job.py")
spec = spec_from_file_location("sharded_job", JOB)
assert spec is not None and spec.loader is not None
job = module_from_spec(spec)
spec.loader.exec_module(job)

TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
TIMES = ("runtime", "per_second", "seconds")
ROWS = [Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), None, "c:1")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes saved."""
    out = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(JOB)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([*command, str(out)], env=environment, timeout=300, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return out


@pytest.mark.parametrize("name", job.CASES)
def test_two_processes_with_sharded_weights_equal_one(name: str, folder: Path, tmp_path: Path) -> None:
    kind, dtype = job.CASES[name]
    tolerance = TOLERANCE[dtype]
    one, two = job.train(kind, dtype, tmp_path, 1), torch.load(folder / "results.pt")[name]
    assert len(one["metrics"]) == len(two["metrics"]) == 6  # an evaluation, three steps, the run, an evaluation
    for expected, measured in zip(one["metrics"], two["metrics"], strict=True):
        assert expected.keys() == measured.keys()
        for metric in (m for m in expected if not m.endswith(TIMES)):
            # transformers adds up losses in float32
            within = max(tolerance, 1e-6) if metric in ("loss", "train_loss") else tolerance
            assert measured[metric] == pytest.approx(expected[metric], rel=within, abs=within), metric
    assert [log["grad_norm"] > 0 for log in two["metrics"] if "grad_norm" in log] == [True] * 3
    # in the first step of PPO only the critic learns
    frozen = [] if kind == "sft" else [n for n in one["weights"] if n.startswith("policy.")]
    assert one["without_gradient"] == two["without_gradient"] == [frozen, [], []]
    for weight, expected in one["weights"].items():
        torch.testing.assert_close(two["weights"][weight], expected, atol=tolerance, rtol=tolerance, msg=weight)


@pytest.mark.parametrize("name", job.CASES)
def test_saved_weights_load_with_transformers_and_into_sharded_modules(name: str, folder: Path) -> None:
    kind, dtype = job.CASES[name]
    results = torch.load(folder / "results.pt")[name]
    weights = results["weights"]
    saved = LlamaForCausalLM.from_pretrained(folder / name, dtype=getattr(torch, dtype))
    parts = {f"policy.{n}": p for n, p in saved.named_parameters()}
    if kind == "shared":
        parts |= {f"critic.{n}": x for n, x in load_file(folder / name / VALUE_HEAD).items()}
    if kind == "separate":
        critic: Any = AutoModelForTokenClassification.from_pretrained(
            folder / name / "critic", dtype=getattr(torch, dtype)
        )
        parts |= {f"critic.{n}": p for n, p in critic.named_parameters()}
    assert parts.keys() == weights.keys() == results["loaded"].keys()
    assert all(torch.equal(parts[n], x) and torch.equal(results["loaded"][n], x) for n, x in weights.items())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"optim": "adafactor"}, "optim must be one of adamw_torch, adamw_torch_fused, sgd"),
        ({"torch_compile": True}, "torch_compile is not supported"),
        ({}, "only one process"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    arguments: dict[str, Any], message: str, make_trainer: Any, tiny_llama: Any
) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer(SFT(), tiny_llama(), ROWS, own={"sharded": True}, **arguments)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
def test_models_with_an_adapter_are_refused(tiny_llama: Any) -> None:
    from burnish.models.sharding import check_model

    check_model(tiny_llama())
    with pytest.raises(UserError, match="adapter"):
        check_model(get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"])))
