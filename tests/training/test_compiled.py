"""torch_compile: the layers are compiled once, for micro-batches of all shapes, and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._dynamo.utils import get_compilation_metrics
from transformers import GPT2Config, GPT2LMHeadModel

from builders import llama
from burnish import GRPO, SFT, UserError
from burnish.generate.sampling import Sampling
from burnish.models.adapters import add_adapter
from burnish.models.compiled import compile_layers
from burnish.models.settings import AdapterConfig

NUMBERS = random.Random(0)
ROWS = [{"prompt": "x" * NUMBERS.randrange(1, 40), "completion": "y" * NUMBERS.randrange(1, 40)} for _ in range(60)]
PROMPTS = [{"prompt": "x" * NUMBERS.randrange(1, 40)} for _ in range(40)]
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo reads it

COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}  # traces like any backend, and generates no code


def distinct(trajectories: list[Any]) -> list[float]:
    """Reward different tokens."""
    return [float(len(set(t.tokens))) for t in trajectories]


def compilations() -> tuple[int, int]:
    """How many pieces of code were compiled, and how many times one of them was compiled again."""
    identifiers = [str(one.compile_id) for one in get_compilation_metrics()]
    return len(identifiers), sum(not identifier.endswith("/0") for identifier in identifiers)


@pytest.fixture(autouse=True)
def _new() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "packed"), [("sft", None), ("sft", False), ("grpo", None)])
def test_fifty_steps_of_any_lengths_compile_the_layers_once(name: str, packed: Any, make: Any) -> None:
    method: Any = SFT() if name == "sft" else GRPO(distinct, Sampling(length_range=[2, 12], samples=2))
    settings = {
        "max_steps": 50,
        "per_device_train_batch_size": 4,
        "token_budget": 128,
        "learning_rate": 1e-3,
        **COMPILED,
    }
    trainer = make(method, rows=ROWS if name == "sft" else PROMPTS, packed=packed, **settings)
    trainer.train()
    assert trainer.state.global_step == 50
    pieces, again = compilations()
    assert 1 <= pieces <= 8 and again <= 3


def test_compiled_layers_train_the_same_weights_and_leave_the_next_trainer_alone(make: Any) -> None:
    def trained(**settings: Any) -> Any:
        trainer = make(rows=ROWS[:8], max_steps=3, eval_dataset=ROWS[8:12], **settings)
        trainer.train()
        return trainer

    compiled = trained(**COMPILED)
    pieces, again = compilations()
    assert pieces and not again and type(compiled.model_wrapped) is type(compiled.network)
    compiled.evaluate()
    plain = trained()
    assert compilations()[0] == pieces
    for (name, one), (other, two) in zip(
        compiled.network.named_parameters(), plain.network.named_parameters(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # caused by peft
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_dropout_of_adapters_compiles_nothing_again_for_each_layer(make: Any) -> None:
    adapter = AdapterConfig(r=2, dropout=0.2, targets=["q_proj"])
    model = add_adapter(llama(num_hidden_layers=6), adapter, "CAUSAL_LM")
    make(model=model, rows=ROWS[:8], max_steps=2, **COMPILED).train()
    _, again = compilations()
    assert 0 < again <= 6  # the inputs of the first layer have no gradient


def test_a_model_whose_layers_have_no_name_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16))
    model._no_split_modules = []
    with pytest.raises(UserError, match="GPT2LMHeadModel does not name its layers"):
        compile_layers(model)
