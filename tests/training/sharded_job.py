"""Trains every method in one process, in several, and with sharded weights; run by test_sharded.py.

``python -m torch.distributed.run --nproc-per-node 2 sharded_job.py train OUT CASE...`` trains the cases with whole
weights in OUT/ddp/CASE and with sharded ones in OUT/fsdp2/CASE, and saves what it measured in OUT/results.pt.
``... resume OUT CASE...`` does so from scratch and from the checkpoints of all ``LAYOUTS``.
"""

import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
    TrainingArguments,
)

from burnish import DPO, PPO, SFT, Distill, Pretrain, Reinforce, RewardModel, StepValue, Trainer
from burnish.generate.continuous import ContinuousGenerator
from burnish.generate.sampling import Sampling
from burnish.models.adapters import add_adapter
from burnish.models.forward import unwrap
from burnish.models.loaded import Loaded
from burnish.models.settings import AdapterConfig
from burnish.render.truncate import Truncation
from burnish.types import Steps

sys.path.insert(0, str(Path(__file__).parent))
from gradient_job import exact
from resume_job import PAIRS, ROWS, tokenizer
from warmup_job import PROMPTS, reward

ODD = Sampling(max_new_tokens=6, samples=3)
LABELED = [{"prompt": r["prompt"], "completion": r["completion"], "label": i % 3 > 0} for i, r in enumerate(ROWS)]
TEXTS = [{"text": r["prompt"] + r["completion"]} for r in ROWS]
SCORED = [
    {
        "text": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["completion"]}],
        "reward": (-1) ** i / (i % 3 + 1),
    }
    for i, r in enumerate(ROWS)
]
SOLUTIONS = [
    Steps(({"role": "user", "content": "q"},), ("a" * (1 + i), "b"), (0.5, 1.0 if i % 3 else -1.0), f"s:{i}")
    for i in range(9)
]


def model(dtype: torch.dtype, layers: int = 2, adapter: bool = False, score: bool = False, tied: bool = False) -> Any:
    """A tiny Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=102,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        pad_token_id=0,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        **({"id2label": {0: "score"}, "label2id": {"score": 0}} if score else {}),
    )
    made = exact((LlamaForSequenceClassification if score else LlamaForCausalLM)(config), dtype)
    if not adapter:
        return made
    torch.manual_seed(1)
    lora = AdapterConfig.model_validate({"r": 3, "dropout": 0.2 if not score else 0.0})
    return add_adapter(made, lora, "SEQ_CLS" if score else "CAUSAL_LM").to(dtype)


def ppo(critic: str, **settings: Any) -> PPO:
    """PPO whose critic learns alone in the first iteration, and with a rate of its own."""
    own = {"name": critic, "learning_rate": 2e-2, "warmup": 1}
    chosen: dict[str, Any] = {"critic": own, "epochs": 1, "mini_batches": 1} | settings
    return PPO(reward, ODD, **chosen)


def distill(dtype: torch.dtype) -> Distill:
    """Distillation on prompts from a larger model."""
    return Distill(
        sampling=ODD, load=lambda _: Loaded("teacher", model(dtype, layers=3), tokenizer()), teacher="teacher"
    )


CASES: dict[str, tuple[Any, Any, list[Any]]] = {
    "sft": (SFT, {}, ROWS),
    "sft lora": (SFT, {"adapter": True}, ROWS),
    "sft checkpointing": (SFT, {}, ROWS),
    "sft lora checkpointing": (SFT, {"adapter": True}, ROWS),
    "sft odd": (SFT, {}, ROWS[:5]),
    "pretrain": (Pretrain, {}, TEXTS),
    "dpo": (partial(DPO, nll_weight=0.1), {}, PAIRS),
    "dpo lora": (DPO, {"adapter": True}, PAIRS),
    "dpo live": (partial(DPO, reference="live"), {}, PAIRS),
    "orpo": (partial(DPO, loss="orpo"), {}, PAIRS),
    "kto": (partial(DPO, loss="kto"), {}, LABELED),
    "reward": (partial(RewardModel, centering=0.0), {"score": True}, PAIRS),
    "reward lora": (RewardModel, {"score": True, "adapter": True}, PAIRS),
    "step_value": (StepValue, {}, SOLUTIONS),
    "reinforce": (partial(Reinforce, advantage="rloo", kl_coef=0.1, kl_in="loss", kl_estimate="k2"), {}, SCORED),
    "rloo": (partial(Reinforce, reward, ODD, advantage="rloo"), {}, PROMPTS),
    "rloo continuous": (partial(Reinforce, reward, ODD, ContinuousGenerator, advantage="rloo"), {}, PROMPTS),
    "rloo odd": (partial(Reinforce, reward, ODD, advantage="rloo"), {}, PROMPTS[:5]),
    "grpo": (
        partial(
            Reinforce,
            reward,
            ODD,
            advantage="group_std",
            policy_loss="clip",
            epochs=2,
            kl_coef=0.1,
            kl_in="loss",
            kl_estimate="k3",
        ),
        {},
        PROMPTS,
    ),
    "ppo shared": (partial(ppo, "shared"), {"tied": True}, PROMPTS),
    "ppo shared lora": (partial(ppo, "shared"), {"adapter": True}, PROMPTS),
    "ppo separate": (partial(ppo, "separate"), {}, PROMPTS),
    "ppo separate lora": (partial(ppo, "separate"), {"adapter": True}, PROMPTS),
    "ppo target_kl": (partial(ppo, "separate", epochs=2, mini_batches=2, target_kl=1e-3), {}, PROMPTS),
    "distill": (distill, {}, PROMPTS),
}
"""Method, settings of the model and rows; `NAME float64` is the same in that dtype, and `NAME bf16` under autocast.

``odd``: every second step has one row, which only one process has. ``ppo``: the policy has no weight in the first step.
``reward``: a term of weight 0.
"""
STEPS = {"ppo target_kl": 6}
LAYOUTS = ["one", "ddp", "fsdp2"]


class Observer(TrainerCallback):
    """Keeps what is logged, and asserts that weights and gradients are sharded, or that none of them are."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded
        self.logs: list[dict[str, float]] = []
        self.without_gradient: list[list[str]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Check the parameters and their gradients."""
        self.on_step_end(args, state, control, model)
        gradients = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert all(g is None or isinstance(g, DTensor) == self.sharded for g in gradients.values())
        self.without_gradient.append([name for name, gradient in gradients.items() if gradient is None])

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Check the parameters."""
        assert all(isinstance(p, DTensor) == self.sharded for p in model.parameters())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep a line of the log."""
        self.logs.append(dict(logs))


def trainer(case: str, folder: Path, sharded: bool = False, save: bool = False) -> tuple[Trainer, Observer]:
    """A trainer of three optimizer steps."""
    name = case.removesuffix(" float64").removesuffix(" bf16")
    dtype = torch.float64 if case.endswith(" float64") else torch.float32
    method, options, rows = CASES[name]
    processes = int(os.environ.get("WORLD_SIZE", 1))
    observer = Observer(sharded)
    made = Trainer(
        model=model(dtype, **options),
        args=TrainingArguments(
            str(folder),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="steps" if save else "no",
            save_steps=1,
            logging_steps=1,
            per_device_train_batch_size=4 // processes,
            max_steps=STEPS.get(name, 3),
            learning_rate=1e-2,
            bf16=case.endswith(" bf16"),
            weight_decay=0.1,
            max_grad_norm=0.5,
            activation_checkpointing="checkpointing" in name,
            ddp_backend="gloo" if processes > 1 else None,
        ),
        method=method(dtype) if method is distill else method(),
        train_dataset=rows,
        eval_dataset=rows[:3],
        processing_class=tokenizer(),
        truncation=Truncation(max_length=8) if name == "pretrain" else None,
        callbacks=[observer],
        token_budget=40,
        sharded=sharded,
    )
    return made, observer


def frozen(trainer: Trainer) -> list[Any]:
    """The frozen models that training reads: a teacher, and a reference that is not the policy without its adapter."""
    reference = getattr(trainer.method, "reference", None)
    reference = getattr(reference, "reference", reference)  # DPO keeps its log-probabilities with it
    copy = getattr(reference, "frozen", None)
    return [*trainer.network.frozen, *([copy] if copy is not None else [])]


def full(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of all parameters."""
    named = trainer.network.named_parameters()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}


def train(case: str, folder: Path, sharded: bool = False) -> dict[str, Any]:
    """Evaluate, train, evaluate and save; with sharded weights, also load what was saved."""
    made, observer = trainer(case, folder, sharded)
    made.evaluate()
    made.train()
    made.evaluate()
    made.save_model(str(folder))
    results = {"metrics": observer.logs, "weights": full(made), "without_gradient": observer.without_gradient}
    results["frozen"] = [
        any(isinstance(parameter, DTensor) for parameter in model.parameters()) for model in frozen(made)
    ]
    results["trained"] = [name for name, parameter in made.network.named_parameters() if parameter.requires_grad]
    if sharded:
        made.accelerator.wait_for_everyone()
        with torch.no_grad():
            for parameter in made.network.parameters():
                if parameter.requires_grad:
                    parameter.zero_()
        made.engine.load(folder)
        results["loaded"] = full(made)
    return results


class End(NamedTuple):
    """The rows of the second and the third step, and the weights after them."""

    rows: list[list[str]]
    weights: dict[str, Tensor]


def resume(case: str, out: Path, layout: str, start: str | None = None) -> End:
    """Train from scratch, with a checkpoint after each step, or from the first checkpoint of a layout."""
    made, _ = trainer(case, out / layout / case / (start or ""), layout == "fsdp2", save=start is None)
    rows: list[list[str]] = []

    class Rows(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows.append(made._sources)

    made.add_callback(Rows())
    made.train(resume_from_checkpoint=str(out / start / case / "checkpoint-1") if start else None)
    return End(rows[-2:], full(made))


def resume_all(out: Path, cases: list[str], layouts: list[str]) -> dict[tuple[str, str, str | None], Any]:
    """The ends by case, layout and the layout of the checkpoint, which is None in a run from scratch."""
    ends: dict[tuple[str, str, str | None], Any] = {
        (case, layout, None): resume(case, out, layout) for layout in layouts for case in cases
    }
    for case in cases:
        for layout in layouts:
            for start in [start for start in LAYOUTS if (out / start / case).exists()]:
                ends[case, layout, start] = resume(case, out, layout, start)
    return ends


def out_of_memory(case: str, folder: Path, sharded: bool) -> dict[str, Any]:
    """Evaluate and train, with memory for fewer tokens than the budget in the last process.

    It runs out in the first layer: in passes without gradient and in the first and the third step in the forward pass,
    and in the second step in the backward pass.
    """
    made, _ = trainer(case, folder, sharded)
    failed = {"forward": 0, "backward": 0}

    def fail(tokens: int, way: str) -> None:
        if made.engine.rank == 1 and tokens > 60:
            failed[way] += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    def before_forward(module: Any, inputs: Any) -> None:
        if made.state.global_step != 1 or not torch.is_grad_enabled():
            fail(inputs[0][..., 0].numel(), "forward")

    def before_backward(module: Any, gradients: Any) -> None:
        if made.state.global_step == 1:
            fail(gradients[0][..., 0].numel(), "backward")

    class Budget(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            made.engine.token_budget = 100

    mlp = unwrap(made.network.policy).model.layers[0].mlp
    mlp.register_forward_pre_hook(before_forward)
    mlp.register_full_backward_pre_hook(before_backward)
    made.add_callback(Budget())
    made.engine.token_budget = 100
    metrics = made.evaluate()
    made.train()
    return {"weights": full(made), "failed": made.engine.gather(failed), "metrics": metrics}


def main(job: str, out: Path, cases: list[str]) -> None:
    """Train all cases."""
    if job == "train":
        results: Any = {
            layout: {case: train(case, out / layout / case, layout == "fsdp2") for case in cases}
            for layout in LAYOUTS[1:]
        }
    elif job == "out_of_memory":
        results = {
            layout: {case: out_of_memory(case, out / layout / case, layout == "fsdp2") for case in cases}
            for layout in LAYOUTS[1:]
        }
    else:
        results = {key: tuple(end) for key, end in resume_all(out, cases, LAYOUTS[1:]).items()}
    if torch.distributed.get_rank() == 0:
        torch.save(results, out / "results.pt")
    torch.distributed.barrier()
    # without taking gloo down: its destructor, which holds the interpreter, may wait for a thread that needs it
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
