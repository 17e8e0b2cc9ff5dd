"""Checkpoints are complete or absent, and a resumed run ends with the bytes of one that never stopped."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import TrainerCallback

from burnish import DPO, PPO, SFT, Reinforce, RewardModel, Trainer, files
from burnish.errors import UserError
from burnish.report.metrics import Recorder, is_timing, read_metrics
from burnish.training import checkpoint, optimizer_state
from tiny_runs import PAIRS, PROMPTS, ROWS, distill, grpo, lora, ppo, weights, with_dropout

# --- the folders -----------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path) -> None:
    with files.writing(folder) as aside:
        (aside / "critic").mkdir()
        for name in ("weights", "critic/weights"):
            (aside / name).write_text(folder.name)


@pytest.mark.parametrize("name", ["weights", "critic/weights", files.CHECKSUMS])
def test_the_latest_complete_checkpoint_is_the_one_before_a_damaged_one(name, tmp_path):
    for step in (2, 10, 9):
        make_checkpoint(tmp_path / f"checkpoint-{step}")
    newest = tmp_path / "checkpoint-10"
    assert checkpoint.latest(tmp_path) == (newest, [])
    (newest / name).write_bytes((newest / name).read_bytes()[:-1])
    wrong = files.damage(newest)
    assert wrong and name in wrong
    assert checkpoint.latest(tmp_path) == (tmp_path / "checkpoint-9", [f"{newest}: {wrong}"])


def test_files_of_others_do_not_damage_a_checkpoint(tmp_path):
    make_checkpoint(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / ".DS_Store").write_text("")
    assert checkpoint.latest(tmp_path) == (tmp_path / "checkpoint-1", [])


def test_a_folder_without_complete_checkpoints_has_no_latest_one(tmp_path):
    assert checkpoint.latest(tmp_path) == (None, []) and files.damage(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1").mkdir()
    files.staging(tmp_path / "checkpoint-2").mkdir()
    assert checkpoint.latest(tmp_path) == (None, [f"{tmp_path / 'checkpoint-1'}: it has no {files.CHECKSUMS}"])


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [(None, None, [4, 3, 2, 1]), (2, None, [4, 3]), (1, 2, [4, 2]), (2, 2, [4, 2]), (3, 1, [4, 3, 1]), (1, 4, [4])],
)
def test_rotation_removes_the_oldest_checkpoints_but_never_the_best_or_the_latest(limit, best, kept, tmp_path):
    for step in range(1, 5):
        make_checkpoint(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-5").write_text("a file")
    (tmp_path / "checkpoint-6-mine").mkdir()
    checkpoint.rotate(tmp_path, limit, best and tmp_path / f"checkpoint-{best}", 4)
    assert [int(path.name.rpartition("-")[2]) for path in checkpoint.checkpoints(tmp_path)] == kept
    assert (tmp_path / "checkpoint-6-mine").is_dir()


def test_rotation_does_not_count_checkpoints_from_before_training_started_over(tmp_path):
    """Otherwise a damaged checkpoint-30 would stay, and each new checkpoint would be removed at once."""
    for step in (30, 5, 10):
        make_checkpoint(tmp_path / f"checkpoint-{step}")
    checkpoint.rotate(tmp_path, 1, None, 10)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-30", "checkpoint-10"]


def test_a_checkpoint_is_sealed_and_loads_with_transformers_alone(make, tiny_tokenizer, tmp_path):
    trainer = make(save_strategy="steps", save_steps=6)
    trainer.train()
    folder = tmp_path / "out" / "checkpoint-6"
    assert files.damage(folder) is None and checkpoint.latest(tmp_path / "out") == (folder, [])
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["checkpoint-6"]
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([[1, 5, 9, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, trainer.network.policy.eval()(tokens).logits)
    text = hf.AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "a"}])["input_ids"]
    assert text == tiny_tokenizer.apply_chat_template([{"role": "user", "content": "a"}])["input_ids"]


def test_a_damaged_checkpoint_is_refused(make, tmp_path):
    make(save_strategy="steps", save_steps=6).train()
    file = tmp_path / "out" / "checkpoint-6" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"checkpoint-6: the checkpoint is damaged: model\.safetensors has changed"):
        make().train(resume_from_checkpoint=True)


def test_save_total_limit_removes_old_checkpoints(make, tmp_path):
    make(save_strategy="steps", save_steps=1, save_total_limit=2).train()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["checkpoint-5", "checkpoint-6"]


def test_the_best_model_is_loaded_at_the_end(make, tmp_path):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_dataset": ROWS[:3],
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the best is the first
        "save_total_limit": 1,
    }
    trainer = make(**options)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / "checkpoint-1")
    loaded = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    trainer.network.load_weights(tmp_path / "out" / "checkpoint-1")
    assert all(torch.equal(value, loaded[name]) for name, value in trainer.network.state_dict().items())
    assert sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-1"]


# --- resuming --------------------------------------------------------------------------------------------------------


CASES = {
    "sft with dropout": lambda llama: (SFT(), with_dropout(), ROWS),
    "sft with an adapter": lambda llama: (SFT(), lora(llama(), 0.2), ROWS),
    "reinforce on scored rows": lambda llama: (
        Reinforce(advantage="rloo", kl_coef=0.1, kl_in="loss", kl_estimate="k2", policy_loss={"floor": -4.0}),
        llama(),
        [
            {
                "text": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["completion"]},
                ],
                "reward": (-1) ** i / (i % 3 + 1),
            }
            for i, row in enumerate(ROWS)
        ],
    ),
    "reinforce on prompts, as grpo": lambda llama: (grpo(), llama(), PROMPTS),
    "dpo with an adapter": lambda llama: (DPO(nll_weight=0.1), lora(llama()), PAIRS),
    "kto": lambda llama: (DPO(loss="kto"), llama(), PAIRS),
    "distill on prompts": lambda llama: (distill(), llama(), PROMPTS),
    "ppo, separate critic": lambda llama: (ppo(critic={"learning_rate": 3e-2}), llama(), PROMPTS),
    "ppo, shared critic, early stops": lambda llama: (ppo(critic="shared", target_kl=1e-3), llama(), PROMPTS),
    "ppo, adapters": lambda llama: (ppo(critic={"warmup": 1}), lora(llama()), PROMPTS),
}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if not is_timing(key)} for line in read_metrics(folder)]


class Record(TrainerCallback):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_log(self, args, state, control, logs=None, **_):
        self.recorder.metrics(state.global_step, logs or {})


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_bytes_of_one_that_never_stopped(case, make, tiny_llama, tmp_path):
    def trainer(folder: Path, save: str = "no") -> Trainer:
        method, model, rows = CASES[case](tiny_llama)
        recorder = Recorder(folder)
        return make(
            method,
            model,
            rows,
            folder=folder,
            recorder=recorder,
            callbacks=[Record(recorder)],
            save_strategy=save,
            save_steps=1,
            num_train_epochs=1 if isinstance(method, PPO) else 2 if rows is not PROMPTS else 3,
            token_budget=120,
            max_grad_norm=1.0,
            neftune_noise_alpha=5 if isinstance(method, SFT) else None,
        )

    straight = trainer(tmp_path / "straight", "steps")
    straight.train()
    last = straight.state.max_steps
    assert last == straight.state.global_step and last >= 6
    expected, start = weights(straight), weights(trainer(tmp_path / "unused"))
    assert expected != start
    # every step of the first kind, every second one of the variants
    for step in range(1, last, 2 if "adapter" in case or "shared" in case else 1):
        folder = tmp_path / f"from {step}"
        folder.mkdir()
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = tmp_path / "straight" / name
            (folder / name).write_bytes(path.read_bytes() if path.exists() else b"")
        torch.manual_seed(step)
        again = trainer(folder)
        again.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        assert again.state.global_step == last
        assert weights(again) == expected, step
        a, b = ([line for line in lines(f) if "train_loss" not in line] for f in (folder, tmp_path / "straight"))
        assert a == b, step
        state, other = (t.optimizer.state_dict()["state"] for t in (again, straight))  # type: ignore[union-attr]
        assert all(torch.equal(state[i][key], other[i][key]) for i in state for key in state[i])
        assert again.loader.state_dict() == straight.loader.state_dict()  # type: ignore[union-attr]


@pytest.mark.parametrize(("method", "rows"), [(SFT, ROWS), (ppo, PROMPTS)])
def test_a_checkpoint_between_two_log_lines_loses_no_line(method, rows, make, tmp_path):
    def trained(folder: Path, start: str | None = None) -> list[dict[str, Any]]:
        recorder = Recorder(folder)
        steps = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 3, "max_steps": 6}
        options = {"folder": folder, "recorder": recorder, "callbacks": [Record(recorder)], **steps}
        make(method(), rows=rows, **options).train(resume_from_checkpoint=start)
        return [line for line in lines(folder) if "train_loss" not in line]

    straight = trained(tmp_path / "run")
    assert [line["step"] for line in straight][-1] == 6
    assert trained(tmp_path / "run", str(tmp_path / "run" / "checkpoint-2")) == straight


def test_a_critics_learning_rate_survives_a_resume(make, tiny_llama, tmp_path):
    def trainer() -> Trainer:
        options = {"save_strategy": "steps", "save_steps": 5, "num_train_epochs": 1, "warmup_steps": 2}
        return make(ppo(critic={"learning_rate": 3e-2}), rows=PROMPTS, **options)

    def rates(trainer: Trainer) -> dict[str, set[float]]:
        names = {id(p): name.split(".")[0] for name, p in trainer.network.named_parameters()}
        rates_by_part: dict[str, set[float]] = {}
        optimizer: Any = trainer.optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rates_by_part.setdefault(names[id(parameter)], set()).add(group["initial_lr"])
        return rates_by_part

    first = trainer()
    first.train()
    assert rates(first) == {"policy": {1e-2}, "critic": {3e-2}}
    again = trainer()
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert rates(again) == {"policy": {1e-2}, "critic": {3e-2}}
    assert weights(again) == weights(first)


def test_an_optimizer_whose_state_has_no_plain_form_is_saved_as_transformers_does(make, tmp_path, monkeypatch):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    assert optimizer_state.can_name(optimizer)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"quantized": {"codes": torch.zeros(2)}}
    assert not optimizer_state.can_name(optimizer)
    monkeypatch.setattr(optimizer_state, "can_name", lambda optimizer: False)
    first = make(save_strategy="steps", save_steps=4)
    first.train()
    folder = tmp_path / "out" / "checkpoint-4"
    assert (folder / "optimizer.pt").is_file() and not (folder / optimizer_state.FOLDER).exists()
    again = make()
    again.train(resume_from_checkpoint=str(folder))
    assert weights(again) == weights(first)


def test_other_groups_of_parameters_cannot_resume(make, tmp_path):
    make(ppo(critic={"learning_rate": 3e-2}), rows=PROMPTS, save_strategy="steps", save_steps=2, max_steps=2).train()
    again = make(ppo(), rows=PROMPTS, max_steps=4)
    with pytest.raises(UserError, match="checkpoint-2: it was saved with other groups of parameters"):
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_resume_from_checkpoint_true_finds_the_last_checkpoint(make, tmp_path):
    first = make(save_strategy="steps", save_steps=4)
    first.train()
    for path in (tmp_path / "out").glob("checkpoint-6"):
        path.rename(tmp_path / "kept")
    again = make()
    again.train(resume_from_checkpoint=True)
    assert weights(again) == weights(first)


def test_a_resumed_run_keeps_its_rows_per_step(make, tmp_path):
    first = make(save_strategy="steps", save_steps=2, save_total_limit=3)
    first.train()
    again = make(per_device_train_batch_size=2, gradient_accumulation_steps=1)
    with pytest.warns(UserWarning, match="the run keeps its 4 rows per optimizer step"):
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert weights(again) == weights(first)


@pytest.mark.parametrize("method", [SFT, RewardModel, ppo])
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(method, make, tiny_llama):
    def run(seed: int) -> dict[str, bytes]:
        model = with_dropout() if method is SFT else tiny_llama()
        if method is RewardModel:
            config = copy.deepcopy(model.config)
            config.num_labels = 1
            torch.manual_seed(0)
            model = hf.LlamaForSequenceClassification(config)
        rows = {SFT: ROWS, RewardModel: PAIRS, ppo: PROMPTS}[method]
        trainer = make(method(), model, rows, seed=seed, num_train_epochs=1)
        trainer.train()
        return weights(trainer)

    assert run(0) == run(0) != run(1)
