"""The log: the loss and the metrics of steps, evaluations, and trackers of transformers."""

import pytest
from transformers import TrainerCallback, TrainingArguments

from burnish import SFT, Trainer
from tiny_runs import ROWS, weights, with_dropout


def test_the_example_of_the_documentation_works_with_a_callback_and_tensorboard(tiny_llama, tiny_tokenizer, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen: list[str] = []

    class Callback(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, processing_class=None, **_):
            assert model is not None and model.config.vocab_size == 105 and processing_class is tiny_tokenizer
            seen.append("begin")

        def on_log(self, args, state, control, logs=None, **_):
            seen.extend(key for key in ("loss", "nll", "learning_rate", "grad_norm") if key in (logs or {}))

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2

    trainer = Trainer(
        model=tiny_llama(),
        args=TrainingArguments(
            str(tmp_path),
            learning_rate=1e-3,
            report_to="tensorboard",
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            per_device_train_batch_size=4,
        ),
        method=SFT(),
        train_dataset=ROWS,
        processing_class=tiny_tokenizer,
        callbacks=[Callback()],
    )
    result = trainer.train()
    assert seen == ["begin", *["loss", "nll", "learning_rate", "grad_norm"] * 2]
    assert result.global_step == 2
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(logged) and len(logged) == 2


def test_the_logged_loss_is_that_of_the_step(make, tmp_path):
    trainer = make(num_train_epochs=1, learning_rate=0.0)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["epoch"] for line in lines] == pytest.approx([1 / 3, 2 / 3, 1])
    for line in lines:
        assert line["loss"] == pytest.approx(line["nll"], rel=1e-4)
        assert line["tokens"] > 0 and line["seconds"] > 0
    # each row's tokens are counted once
    examples = trainer.train_examples.examples
    assert sum(line["tokens"] for line in lines) == sum(len(e.sequences[0].tokens) for e in examples)
    # at a learning rate of 0 the token-weighted mean of the steps is the loss over all rows
    counts = {id(e): e.counts["tokens"] for e in examples}
    order = [[examples.index(e) for e in step] for step in make(num_train_epochs=1).get_train_dataloader()]
    learned = [sum(counts[id(examples[i])] for i in step) for step in order]
    mean = sum(line["nll"] * n for line, n in zip(lines, learned, strict=True)) / sum(learned)
    assert trainer.evaluate(ROWS)["eval_nll"] == pytest.approx(mean, rel=1e-4)


def test_evaluation_runs_every_eval_steps(make):
    trainer = make(eval_strategy="steps", eval_steps=2, eval_dataset=ROWS[:3])
    trainer.train()
    lines = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[-1]["eval_loss"] == pytest.approx(lines[-1]["eval_nll"])
    assert lines[0]["eval_loss"] > lines[-1]["eval_loss"]


def test_evaluation_does_not_change_the_run(make):
    plain = make(model=with_dropout())
    plain.train()
    evaluated = make(model=with_dropout(), eval_strategy="steps", eval_steps=1, eval_dataset=ROWS[:3])
    evaluated.train()
    assert weights(plain) == weights(evaluated)
