"""Promise 1: the gradient of an optimizer step does not depend on how it is laid out in memory or over processes."""

import itertools
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from burnish.config.schema import method_class
from burnish.generate.sampling import Sampling
from burnish.methods.policy_gradient import ADVANTAGES, POLICY_LOSSES, REDUCTIONS
from burnish.methods.settings import PRESETS
from burnish.models.batching import collate
from burnish.models.layout import Layout
from burnish.types import Example, Sequence

JOB = Path(__file__).with_name("gradient_job.py")
spec = spec_from_file_location("gradient_job", JOB)
assert spec is not None and spec.loader is not None
job = module_from_spec(spec)
spec.loader.exec_module(job)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
LAYOUTS = [
    {"token_budget": 1},
    {"shared_prompts": False},
    {"shared_prompts": False, "packed": True},
    {"token_budget": 40},
    {"token_budget": 100, "padding_side": "left"},
    {"padding_side": "left"},
    {"pad_to": 40},
    {"pad_to": 40, "padding_side": "left"},
    {"packed": True},
    {"packed": True, "token_budget": 40},
    {"packed": True, "padding_side": "left", "pad_to": 300},
]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("straight"))
    return {dtype: job.gradients(folder, dtype) for dtype in TOLERANCE}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_does_not_change_the_gradient(layout, dtype, straight, tmp_path):
    for name, gradient in job.gradients(str(tmp_path), dtype, **layout).items():
        assert gradient.norm() > 1e-3, name
        assert distance(gradient, straight[dtype][name]) < TOLERANCE[dtype], name


def test_in_bfloat16_layouts_differ_by_its_rounding(straight, tmp_path):
    """Autocast rounds the results of matrix products to 8 bits, a relative error of up to 0.4 %, in every layer.

    Another layout sums in another order, so some results are rounded differently. Gradients then differ by 0.1 to 0.3 %
    from those of another layout, and by 0.3 to 1 % from those of float32. The latter does not hold for the two cases
    with adapters, which are so strong that a change of all weights by 0.1 % changes the gradient by 7 and 25 %.
    """
    half, *others = (
        job.gradients(str(tmp_path), torch.float32, bf16=True, **layout)
        for layout in ({}, {"packed": True, "token_budget": 40}, {"shared_prompts": False, "padding_side": "left"})
    )
    for name, gradient in straight[torch.float32].items():
        assert all(distance(other[name], half[name]) < 0.01 for other in others), name
        assert "adapter" in name or 1e-4 < distance(half[name], gradient) < 0.02, name


def test_any_preset_with_any_loss_any_estimator_and_any_reduction() -> None:
    """Advantages from padded rewards, then the gradient of their loss, whatever the layout of either.

    Every preset meets every loss with every estimator. Each of these also meets every reduction.
    """
    completions = job.completions("old_logprobs", "values", "rewards", "ref_logprobs")
    width = max(len(example.sequences[0]) for example in completions)
    groups = torch.arange(len(completions)) % 3  # three completions of each prompt
    networks = {critic: job.network(critic) for critic in (False, True)}
    layouts = [
        (Layout(networks[False].models, torch.device("cpu"), 1, side, 0, packed, shared), budget)
        for side, packed, shared, budget in (
            ("right", False, False, None),
            ("right", True, True, 90),
            ("left", False, True, 50),
        )
    ]
    wide, narrow = (collate(completions, 0, pad_to=n) for n in (width + 7, 0))
    tried = set()
    for name, loss, estimator in itertools.product(PRESETS, POLICY_LOSSES, ADVANTAGES):
        number = list(PRESETS).index(name) + list(POLICY_LOSSES).index(loss) + list(ADVANTAGES).index(estimator)
        reduction = list(REDUCTIONS)[number % len(REDUCTIONS)]
        critic = estimator == "gae"
        settings = {"policy_loss": loss, "advantage": estimator, "reduction": reduction, "epochs": 1}
        method = method_class(name)(len, Sampling(samples=3), critic="shared" if critic else "none", **settings)
        arrays = {}
        for side, batch in (("wide", wide), ("narrow", narrow)):
            values = batch.arrays["values"].double() if critic else None
            given = batch.arrays["rewards"].double(), batch.loss_mask, groups, values
            arrays[side] = method.estimator(*given)
            assert not arrays[side][0][~batch.loss_mask].any()
        advantages, returns = arrays["narrow"]
        assert torch.equal(arrays["wide"][0][:, :width], advantages), (name, loss, estimator)
        learned = {k: narrow.arrays[k].double() for k in ("old_logprobs", "ref_logprobs")} | {"advantages": advantages}
        if returns is not None:
            learned |= {"values": narrow.arrays["values"].double(), "returns": returns}
        examples = [
            Example(
                (Sequence(s.tokens, s.loss_mask, s.source, {k: x[i, : len(s)].numpy() for k, x in learned.items()}),)
            )
            for i, s in enumerate(example.sequences[0] for example in completions)
        ]
        network = networks[critic]
        first, *others = (job.plain_gradient(method, network, layout, examples, budget) for layout, budget in layouts)
        assert first.norm() > 1e-3, (name, loss, estimator, reduction)
        for other in others:
            assert distance(other, first) < 1e-9, (name, loss, estimator, reduction)
        tried.add((name, loss, estimator, reduction))
    assert len(tried) == 4 * 6 * 8
    assert [len({(each[i], each[3]) for each in tried}) for i in range(3)] == [4 * 4, 6 * 4, 8 * 4]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The results of two processes."""
    folder = tmp_path_factory.mktemp("both")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", JOB, folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run(list(map(str, command)), check=True, env=environment, timeout=300, capture_output=True)
    return torch.load(folder / "gradients.pt")


def test_two_processes_give_the_gradient_of_one(straight, both):
    for dtype, tolerance in TOLERANCE.items():
        for name, gradient in both[str(dtype)].items():
            assert distance(gradient, straight[dtype][name]) < tolerance, (dtype, name)


def test_parameters_without_a_gradient_in_one_process_have_none_in_two(both, tmp_path):
    """Zeros instead would count as a step of Adam, and decay."""
    for name, weights in job.partial_steps(str(tmp_path)).items():
        for part, weight in weights.items():
            torch.testing.assert_close(both["weights"][name][part], weight, atol=1e-9, rtol=1e-6, msg=f"{name}: {part}")
