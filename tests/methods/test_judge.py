"""The method judge: labels, scores, measures and failures with judges written out, and a recipe with a local model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from builders import character_tokenizer, llama
from burnish.config import load, row_stage
from burnish.config import run as pipeline
from burnish.data.readers import load as load_rows
from burnish.errors import UserError
from burnish.judges.protocol import Judge as JudgeProtocol
from burnish.judges.protocol import NoVerdictError, Question, Verdict
from burnish.judges.settings import JudgeSettings
from burnish.judges.store import StoredJudge, VerdictStore
from burnish.methods.judge import Judge
from burnish.protocols import Made
from burnish.rewards.judge import JudgeReward
from burnish.types import Conversation, Message, Preference, Ranking, Trajectory
from scripted_judge import Script, ScriptedJudge, always_first, uniform
from tiny_runs import entries, json_rows, run_until_chunk

Make = Callable[..., Made]
PAIRS = [
    {"prompt": "Name a number.", "chosen": "two", "rejected": "a dog", "id": 5, "lang": "en"},
    {"prompt": "Name a number.", "chosen": "a cat", "rejected": "three", "p_chosen": 0.3, "margin": 1.5},
]


class OneJudge:
    """The part of a run that the method needs."""

    def __init__(self, judge: JudgeProtocol, folder: Path) -> None:
        self.stored = StoredJudge(judge, VerdictStore(folder / "verdicts.sqlite"), "stage")

    def judge(self, settings: JudgeSettings) -> StoredJudge:
        return self.stored


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Judges rows by a script, and also writes the files, from which ``results`` reads."""
    runs = []

    def made(judge: Script | ScriptedJudge, records: Sequence[dict[str, Any]], kind: type, **settings: Any) -> Made:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(_json, records)))
        loaded = load_rows(tmp_path / "rows.jsonl", (kind,), keep=["lang"], records=True)
        runs.append(
            run := OneJudge(
                judge if isinstance(judge, ScriptedJudge) else ScriptedJudge(judge, judge.__qualname__), tmp_path
            )
        )
        method = Judge(judge={"model": "here"}, **settings)
        made = method.make(loaded.rows, list(loaded.records), 0, run)  # type: ignore[arg-type]
        for name, rows in made.files.items():
            (tmp_path / name).write_text("".join(_json(row) + "\n" for row in rows))
        return made

    yield made
    for run in runs:
        run.stored.close()


def _json(row: dict[str, Any]) -> str:
    return json.dumps(row)


def prefers(*words: str, by: float = 0.5) -> Script:
    """A judge that likes completions with one of these words: it gives them ``by`` more of the probability."""

    def script(asked: Question) -> list[float]:
        text = asked.messages[0]["content"]
        first, second = text.split("<reply A>")[1].split("<reply B>")
        better = any(word in first for word in words) - any(word in second for word in words)
        return [0.5 + by * better, 0.5 - by * better]

    return script


def test_the_likelier_completion_is_chosen_and_other_columns_stay(make: Make) -> None:
    made = make(prefers("two", "three", by=0.3), PAIRS, Preference)
    first, second = made.files["pairs.jsonl"]
    assert first["p_chosen"] == pytest.approx(0.8) and second["p_chosen"] == pytest.approx(0.8)
    assert (first["chosen"], first["rejected"], first["meta"]) == ("two", "a dog", {"lang": "en"})
    assert (second["chosen"], second["rejected"]) == ("three", "a cat")
    assert "margin" not in second
    assert made.measured["agreement"] == [1, 1]  # the labels of the second row prefer "three" by 0.7
    assert made.measured["position_bias"] == made.measured["ties"] == [0, 0]
    assert made.counts == {"made": 2}


def test_a_judge_of_the_position_gives_exactly_one_half(make: Make, tmp_path: Path) -> None:
    made = make(always_first, PAIRS, Preference)
    assert [row["p_chosen"] for row in made.files["pairs.jsonl"]] == [0.5, 0.5]
    assert [row["chosen"] for row in made.files["pairs.jsonl"]] == ["two", "a cat"]  # as in the input
    assert made.measured["position_bias"] == made.measured["ties"] == [1, 1]
    assert make(always_first, PAIRS, Preference, ties="drop").files["pairs.jsonl"] == []
    assert make(always_first, PAIRS, Preference, ties="drop").counts == {"skipped: a tie": 2}


def test_the_verdicts_are_kept_before_they_are_combined(make: Make) -> None:
    made = make(prefers("two", by=0.4), PAIRS[:1], Preference, principles=["Be brief.", "Be kind."])
    (line,) = made.files["verdicts.jsonl"]
    assert [(one["principle"], one["order"]) for one in line["verdicts"]] == [
        *(("Be brief.", order) for order in ("AB", "BA")),
        *(("Be kind.", order) for order in ("AB", "BA")),
    ]
    assert [one["probabilities"][0] for one in line["verdicts"]] == pytest.approx([0.9, 0.1, 0.9, 0.1])
    assert (line["p_first"], line["biased"], line["label"]) == (pytest.approx(0.9), False, 0.5)


def test_labels_are_averaged_over_principles_and_clamped(make: Make, tmp_path: Path) -> None:
    def script(asked: Question) -> Sequence[float]:
        by = 0.5 if "number" in asked.messages[0]["content"].split("</reply B>")[1] else 0.1
        return prefers("two", by=by)(asked)

    (tmp_path / "mine.yaml").write_text("- {name: a, compare: Prefer a number.}\n- {name: b, compare: Prefer brevity.}")
    principles = str(tmp_path / "mine.yaml")
    (row,) = make(script, PAIRS[:1], Preference, principles=principles).files["pairs.jsonl"]
    assert row["p_chosen"] == pytest.approx(0.8)  # the mean of 1 and 0.6
    (row,) = make(script, PAIRS[:1], Preference, principles=principles, clamp=0.1).files["pairs.jsonl"]
    assert row["p_chosen"] == pytest.approx(0.6)


def test_pairs_by_the_grade_of_each_completion(make: Make) -> None:
    def script(asked: Question) -> Sequence[float]:
        assert len(asked.choices) == 10
        reply = asked.messages[0]["content"].split("<reply>\n")[1].split("\n</reply>")[0]
        return [0.0] * 4 + ([0.25, 0.75] if reply in {"two", "three"} else [0.75, 0.25]) + [0.0] * 4

    made = make(script, PAIRS, Preference, pointwise=True, principles=["Be brief.", "Be kind."])
    first, second = made.files["pairs.jsonl"]
    # P(6 and 5) + (P(5 and 5) + P(6 and 6)) / 2 = 0.5625 + 0.1875
    assert (first["chosen"], first["rejected"], first["p_chosen"]) == ("two", "a dog", 0.75)
    assert (second["chosen"], second["rejected"], second["p_chosen"]) == ("three", "a cat", 0.75)
    assert made.measured["agreement"] == [1, 1] and "position_bias" not in made.measured
    line, _ = made.files["verdicts.jsonl"]
    assert [(one["principle"], one["graded"]) for one in line["verdicts"]] == [
        (principle, graded) for principle in ("Be brief.", "Be kind.") for graded in ("first", "second")
    ]
    assert line["p_first"] == 0.75 and "biased" not in line
    tied = make(uniform, [RANKING], Ranking, pointwise=True, ties="drop")
    assert tied.files["pairs.jsonl"] == [] and tied.measured["ties"] == [1, 1, 1]


RANKING = {"prompt": "Name a number.", "completions": ["one", "a dog", "three"], "scores": [2, 0, 1]}


@pytest.mark.parametrize(
    ("pairs", "ids"),
    [("all", ["0-0-1", "0-0-2", "0-1-2"]), ("adjacent", ["0-0-2", "0-1-2"]), ("best_worst", ["0-0-1"])],
)
def test_the_pairs_of_a_ranking(make: Make, tmp_path: Path, pairs: str, ids: list[str]) -> None:
    made = make(prefers("one"), [RANKING], Ranking, pairs=pairs)
    assert [row["id"] for row in made.files["pairs.jsonl"]] == ids
    assert made.counts == {"made": 1}
    for row in made.files["pairs.jsonl"]:
        assert row["chosen"] == "one" or row["p_chosen"] == 0.5
    rows = load_rows(tmp_path / "pairs.jsonl", (Preference,)).rows
    assert len(rows) == len(ids)


def test_a_ranking_without_different_scores_has_no_labels(make: Make) -> None:
    made = make(uniform, [{**RANKING, "scores": [0, 0, 0]}], Ranking)
    assert "agreement" not in made.measured
    assert len(made.files["pairs.jsonl"]) == 3


def graded(asked: Question) -> list[float]:
    """Grade 10 for completions with an x, otherwise 4."""
    reply = asked.messages[0]["content"].split("<reply>")[1].split("</reply>")[0]
    grades = [0.0] * 10
    grades[9 if "x" in reply else 3] = 1.0
    return grades


SAMPLES = [
    {"prompt": "p", "completion": "x", "score": 0.9, "rewards": {"other": 0.9}, "finish_reason": "stop"},
    {"prompt": "p", "completion": "y", "score": 0.1},
    {"prompt": "q", "completion": "y", "score": 0.5},
    {"messages": [{"role": "user", "content": "r"}, {"role": "assistant", "content": "xx"}]},
]


def test_samples_get_the_expected_grade(make: Make, tmp_path: Path) -> None:
    made = make(graded, SAMPLES, Conversation)
    rows = made.files["scored.jsonl"]
    assert [row["score"] for row in rows] == pytest.approx([1, -1 / 3, -1 / 3, 1])  # 4 is 2 (4 - 1) / 9 - 1
    assert rows[0]["rewards"] == {"judge": 1}
    assert (rows[3]["prompt"], rows[3]["completion"]) == ("r", "xx")
    assert make(uniform, SAMPLES, Conversation).measured["score"] == [0] * 4
    assert len(load_rows(tmp_path / "scored.jsonl", (Conversation,)).rows) == 4


def test_results_are_totals_and_agreement_with_the_labels(make: Make, tmp_path: Path) -> None:
    make(prefers("two", "cat"), PAIRS, Preference)  # right on the first pair, wrong on the second
    results = Judge(judge={"model": "here"}).results(tmp_path, 0)["after"]
    assert results == {"kappa": 0, "calls": 4, "judge_tokens": 40, "cost": 0, "cached": 0}
    make(prefers("two", "cat"), [*PAIRS, PAIRS[0]], Preference)  # the same stage asks for one pair twice
    results = Judge(judge={"model": "here"}).results(tmp_path, 0)["after"]
    assert (results["calls"], results["cached"]) == (4, 2)
    make(graded, SAMPLES, Conversation)
    results = Judge(judge={"model": "here"}).results(tmp_path, 0)["after"]
    assert (results["agreement"], results["kappa"]) == (1, 1)  # of the two samples of p


class Unsure(ScriptedJudge):
    """Gives no verdict on questions with a cat."""

    def each(self, questions: Sequence[Question]) -> Iterator[list[tuple[int, Verdict | NoVerdictError]]]:
        for i, asked in enumerate(questions):
            unsure = "cat" in asked.messages[0]["content"]
            yield [(i, NoVerdictError("a cat", i) if unsure else self.ask([asked])[0])]


def test_a_row_without_a_verdict_stops_the_stage_by_name_and_keeps_the_others(make: Make, tmp_path: Path) -> None:
    judge = Unsure(uniform)
    with pytest.raises(UserError, match=r"rows\.jsonl:2: a cat; every verdict so far is stored.*on_failure: skip"):
        make(judge, PAIRS, Preference)
    assert len(judge.asked) == 2
    made = make(judge, PAIRS, Preference, on_failure="skip")
    assert len(judge.asked) == 2  # those of the first row were stored
    assert made.counts == {"made": 1, "failed: no verdict": 1}
    assert made.files["failed.jsonl"] == [{"id": "1", "row": "rows.jsonl:2", "reason": "a cat"}]
    assert made.measured["failed"] == [0, 1]


def test_a_ranking_of_which_some_pairs_have_no_verdict(make: Make) -> None:
    row = {**RANKING, "completions": ["one", "two", "a cat"]}
    made = make(Unsure(uniform), [row], Ranking, on_failure="skip")
    assert made.counts == {"made, but not of all pairs: no verdict": 1}
    assert len(made.files["pairs.jsonl"]) == 1 and len(made.files["failed.jsonl"]) == 2


# --- the reward ----------------------------------------------------------------------------------------------------


def test_the_reward_is_the_expected_grade_averaged_over_principles(tmp_path: Path) -> None:
    def script(asked: Question) -> list[float]:
        return graded(asked) if "letter" in asked.messages[0]["content"] else uniform(asked)

    stored = StoredJudge(ScriptedJudge(script), VerdictStore(tmp_path / "v.sqlite"))
    prompt = (Message(role="user", content="p"),)
    texts = [Trajectory.from_text(text, prompt, source=f"p.jsonl:{i}") for i, text in enumerate("xyx")]
    reward = JudgeReward(stored, ["Prefer the letter x.", "Be kind."])
    assert reward(texts) == pytest.approx([0.5, -1 / 6, 0.5])  # means of 1 or -1/3, and 0
    assert len(stored.judge.asked) == 4  # type: ignore[attr-defined]
    stored.judge = Unsure(uniform)
    with pytest.raises(UserError, match=r"p\.jsonl:1: no verdict on the completion 'a cat'"):
        reward([texts[0], Trajectory.from_text("a cat", prompt, source="p.jsonl:1")])
    reward.close()


# --- a recipe ------------------------------------------------------------------------------------------------------

RECIPE = """
name: judged
threads: 1
stages:
  - name: samples
    method: {name: sample}
    model: model
    generation: {samples: 2, max_new_tokens: 4}
    data: {rows: prompts.jsonl}
    reward: [{judge: {model: model}, principles: mine.yaml}]
  - name: labels
    method: {name: judge, judge: {model: model}, principles: mine.yaml}
    data: {rows: {stage: samples, file: ranked.jsonl}}
  - name: scores
    method: {name: judge, judge: {model: model}, principles: mine.yaml}
    data: {rows: {stage: samples, file: samples.jsonl}}
"""
GRPO = """
name: rewarded
threads: 1
stages:
  - name: grpo
    method: {name: grpo}
    model: model
    generation: {samples: 2, max_new_tokens: 4}
    reward: [{judge: {model: model}, principles: ["Prefer digits."]}]
    data: {train: prompts.jsonl}
    trainer: {per_device_train_batch_size: 4, max_steps: 1, learning_rate: 1.0e-3, logging_steps: 1}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    llama(3, max_position_embeddings=1024).save_pretrained(folder / "model")
    character_tokenizer().save_pretrained(folder / "model")
    (folder / "judged.yaml").write_text(RECIPE)
    (folder / "grpo.yaml").write_text(GRPO)
    (folder / "mine.yaml").write_text("- {name: brief, compare: Prefer the brief reply.}\n")
    (folder / "prompts.jsonl").write_text("".join(_json({"prompt": f"{i} + {i} ="}) + "\n" for i in range(4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_stage, "CHUNK", 2)
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    return pipeline.run(load(home / "judged.yaml", [f"out={home / 'whole'}"]))


def test_a_local_model_labels_and_scores_and_rewards(whole: Path) -> None:
    labels = entries(whole)["labels"]
    pairs = json_rows(whole / "labels/data/pairs.jsonl")
    assert pairs and all(0.5 <= row["p_chosen"] <= 1 for row in pairs)
    after = labels["results"]["after"]
    assert 0 < after["eval_mass_lost"] < 1
    assert after["eval_calls"] == 2 * len(pairs) and after["eval_cached"] == 0
    # the reward of `samples` was asked by the same judge and principle
    scores = entries(whole)["scores"]["results"]["after"]
    assert scores["eval_calls"] == 0 and scores["eval_cached"] == len(json_rows(whole / "samples/data/samples.jsonl"))
    assert scores["eval_kappa"] in (0, 1)
    before, now = (json_rows(whole / f"{name}.jsonl") for name in ("samples/data/samples", "scores/data/scored"))
    assert [row["score"] for row in now] == pytest.approx([row["score"] for row in before])
    assert all(-1 <= row["score"] <= 1 for row in now)
    assert "mine.yaml" in labels["inputs"]


def test_a_policy_learns_from_the_grades_of_a_judge(home: Path) -> None:
    folder = pipeline.run(load(home / "grpo.yaml", [f"out={home / 'rewarded'}"]))
    (line,) = json_rows(folder / "grpo/metrics.jsonl")
    assert -1 < line["reward_judge"] < 1
    assert (folder / "verdicts.sqlite").is_file()


def test_a_stage_that_was_killed_ends_with_the_same_bytes(
    home: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(home / "judged.yaml", [f"out={home / 'killed'}"])
    run_until_chunk(lambda: pipeline.run(recipe), 3, monkeypatch)  # `labels` has written one of its two chunks
    pipeline.run(recipe)
    for path in sorted(whole.glob("*/data/*.jsonl")):
        assert (recipe.folder / path.relative_to(whole)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("stages.labels.method.judge={model: {stage: lables}}", "labels.method.judge.model.stage: 'lables' is not a"),
        ("stages.labels.method.judge={model: {stage: samples}}", "'samples' makes rows and no model"),
        ("stages.labels.method.judge={}", "a judge needs either model: or url:"),
        ("stages.labels.method.judge={model: model, votes: 3}", "votes: only for a judge with url:"),
        ('stages.labels.method.judge={url: "http://x/v1"}', "url: needs name:"),
        ('stages.labels.method.judge={url: "http://me:pw@x/v1", name: m}', "without a password"),
        ('stages.labels.method.judge={url: "ftp://x", name: m}', "expected an address"),
        ('stages.labels.method.judge={url: "http://x/v1", name: m, max_cost: 1}', "max_cost needs input_price"),
        ("stages.labels.method.judge={model: ./nowhere}", "no such model: ./nowhere"),
        ("stages.labels.method.principles=none.yaml", "none.yaml: No such file"),
        (
            "stages.samples.reward=[{judge: {model: {stage: lables}}}]",
            "samples.reward.0.judge.model.stage: 'lables' is",
        ),
        ("stages.samples.reward=[{judge: {model: model}, principles: none.yaml}]", "none.yaml: No such file"),
        ("stages.samples.reward=[{judge: {model: model}, normalize: true}]", "only for a reward with model:"),
    ],
)
def test_mistakes_are_found_before_anything_runs(home: Path, change: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        load(home / "judged.yaml", [change])
    assert says in str(error.value)


def test_a_missing_key_is_found_before_anything_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    change = 'stages.labels.method.judge={url: "http://127.0.0.1:9/v1", name: m, key: NO_SUCH_KEY}'
    with pytest.raises(UserError, match="NO_SUCH_KEY is not set"):
        pipeline.run(load(home / "judged.yaml", [change, f"out={home / 'none'}"]))
    assert not (home / "none").exists()


def test_limits_may_change_before_a_run_is_resumed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = '{url: "http://127.0.0.1:9/v1", name: m, retries: 0'
    recipe = [f"out={home / 'limits'}", f"stages.labels.method.judge={judge}, max_calls: 3}}"]
    with pytest.raises(UserError, match="no connection"):
        pipeline.run(load(home / "judged.yaml", recipe))
    with pytest.raises(UserError, match="no connection"):
        pipeline.run(load(home / "judged.yaml", [recipe[0], recipe[1].replace("max_calls: 3", "max_calls: 30")]))
    with pytest.raises(UserError, match=r"stages\.1\.method\.judge\.name was 'm' and is 'n'"):
        pipeline.run(load(home / "judged.yaml", [recipe[0], recipe[1].replace("name: m", "name: n")]))


def test_a_reward_model_cannot_judge(home: Path, tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    model = llama(3)
    model.config.num_labels = 1
    LlamaForSequenceClassification(model.config).save_pretrained(tmp_path / "reward")
    character_tokenizer().save_pretrained(tmp_path / "reward")
    change = f"stages.labels.method.judge={{model: {tmp_path / 'reward'}}}"
    with pytest.raises(UserError, match="is a reward model, which answers no questions"):
        pipeline.run(load(home / "judged.yaml", [change, f"out={tmp_path / 'out'}"]))
