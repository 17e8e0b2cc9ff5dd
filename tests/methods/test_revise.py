"""Critiques and revisions: what is asked, what is kept, and what becomes of texts that cannot be used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from builders import character_tokenizer, llama
from burnish.config import load
from burnish.config import run as pipeline
from burnish.data.readers import load as load_rows
from burnish.errors import UserError
from burnish.generate.protocol import request_seed
from burnish.generate.sampling import Sampling
from burnish.methods.revise import Revise
from burnish.models.loaded import Loaded
from burnish.protocols import Made, RowRun
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Messages, Preference, Prompt, Row
from scripted import ScriptedGenerator
from tiny_runs import entries, json_rows, run_until_chunk

CONSTITUTION = [{"name": x, "critique": f"find {x}", "revise": f"fix {x}"} for x in "abcd"]
SHORT = {"constitution": CONSTITUTION, "critique_request": "C {principle}", "revision_request": "R {principle}"}
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


def asked(text: str) -> Messages:
    """A prompt of the user."""
    return ({"role": "user", "content": text},)


def appends(prompt: str) -> str:
    """Answers a question with 0, and appends the principle to it in every revision: 0b, 0ba, ..."""
    turns = TURN.findall(prompt)
    request = turns[-1][1]
    if request.startswith("C find "):
        return f"no {request[-1]}"
    return f"{turns[-4][1]}{request[-1]}" if request.startswith("R fix ") else "0"


def scripted(script: Callable[[str], str | tuple[str, str]], **own: Any) -> Any:
    """A run whose model is a script."""
    tokenizer = character_tokenizer()
    loaded = Loaded("model", llama(max_position_embeddings=own.pop("context", 512)), tokenizer)
    return SimpleNamespace(
        load=lambda: loaded,
        tokenizer=tokenizer,
        generator=ScriptedGenerator(tokenizer, script),
        sampling=own.pop("sampling", Sampling(max_new_tokens=16)),
        truncation=own.pop("truncation", Truncation()),
        seed=7,
    )


def make(
    rows: list[Row], run: Any, first: int = 0, records: list[Mapping[str, Any]] | None = None, **settings: Any
) -> Made:
    method = Revise(**{**SHORT, "revisions": 2, **settings})
    method.check(rows, (), reward_model=False)
    return method.make(rows, records or [{}] * len(rows), first, cast(RowRun, run))


PROMPTS: list[Row] = [Prompt(asked(f"q{i}"), {"n": i}, f"p.jsonl:{i + 1}") for i in range(6)]


def test_the_last_revision_follows_from_the_critiques_in_their_order() -> None:
    made = make(PROMPTS, scripted(appends))
    assert made.counts == {"made": 6}
    orders = []
    for i, line in enumerate(made.files["revisions.jsonl"]):
        first, second = (step["principle"] for step in line["revisions"])
        orders.append(first + second)
        assert line == {
            "id": f"{i}-0",
            "source": f"p.jsonl:{i + 1}",
            "prompt": f"q{i}",
            "answer": "0",
            "revisions": [
                {"principle": first, "critique": f"no {first}", "revision": f"0{first}"},
                {"principle": second, "critique": f"no {second}", "revision": f"0{first}{second}"},
            ],
        }
        end = {"id": f"{i}-0", "meta": {"n": i}}
        last = f"0{first}{second}"
        assert made.files["revised.jsonl"][i] == {"prompt": f"q{i}", "completion": last, **end}
        assert made.files["pairs.jsonl"][i] == {"prompt": f"q{i}", "chosen": last, "rejected": "0", **end}
    assert all(order[0] != order[1] for order in orders)  # without replacement
    assert len(set(orders)) > 1  # another draw for each row
    measured = dict(made.measured)
    assert measured["length"] == [3.0] * 6 and measured["changed"] == [1.0] * 6 and measured["revisions"] == [2.0] * 6
    assert all(values == [0.0] * 6 for name, values in measured.items() if name.startswith("unrevised_"))


def test_all_rows_share_the_plan_of_each_pass_and_no_two_requests_a_seed() -> None:
    run = scripted(appends)
    make(PROMPTS, run, first=64)
    plans = run.generator.plans
    assert [len(plan) for plan in plans] == [6] * 5  # answers, then a critique and a revision, twice
    seeds = [[request.seed for request in plan] for plan in plans]
    assert seeds == [[request_seed(7, 64 + i, 0, number) for i in range(6)] for number in range(5)]
    assert len({seed for plan in seeds for seed in plan}) == 30


def test_rows_are_the_same_however_they_are_cut_into_chunks() -> None:
    whole = make(PROMPTS, scripted(appends)).files
    parts = [make(PROMPTS[:4], scripted(appends)).files, make(PROMPTS[4:], scripted(appends), first=4).files]
    assert whole == {name: parts[0][name] + parts[1][name] for name in whole}
    other = scripted(appends)
    other.seed = 8
    assert make(PROMPTS, other).files["revisions.jsonl"] != whole["revisions.jsonl"]


def test_requests_are_turns_of_the_conversation_after_the_examples() -> None:
    system: Messages = ({"role": "system", "content": "Be brief."},)
    row = Conversation(
        (*system, *asked("q"), {"role": "assistant", "content": " old "}), 2, "c.jsonl:1"
    )  # the text of an answer is stripped
    run = scripted(lambda prompt: "new" if "R fix" in prompt else "bad")
    examples = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]
    record = {"prompt": "q", "completion": "old", "lang": "en", "id": 3}
    made = make([row], run, records=[record], revisions=1, examples=examples)
    (x,) = (step["principle"] for step in made.files["revisions.jsonl"][0]["revisions"])
    before = [("system", "Be brief."), ("user", "e"), ("assistant", "f"), ("user", "q"), ("assistant", "old")]
    critique = [*before, ("user", f"C find {x}")]
    turns = [TURN.findall(run.tokenizer.decode(list(request.tokens))) for (request,) in run.generator.plans]
    assert turns == [critique, [*critique, ("assistant", "bad"), ("user", f"R fix {x}")]]
    prompt = [*system, *asked("q")]
    assert made.files["revised.jsonl"] == [{"prompt": prompt, "completion": "new", "id": "0-0", "meta": {"lang": "en"}}]


def fails(at: str, how: str | tuple[str, str]) -> Callable[[str], str | tuple[str, str]]:
    """Like ``appends``, but a request that begins like this is always completed so."""
    return lambda prompt: how if TURN.findall(prompt)[-1][1].startswith(at) else appends(prompt)


LONG = "x" * 40
"""Longer than max_new_tokens."""


@pytest.mark.parametrize(
    ("at", "how", "failure"),
    [
        ("C", LONG, "critique_cut_off"),
        ("C", "", "critique_empty"),
        ("C", " \n", "critique_empty"),
        ("C", ("so", "context"), "critique_cut_off"),
        ("R", LONG, "revision_cut_off"),
        ("R", "", "revision_empty"),
    ],
)
def test_a_bad_critique_or_revision_leaves_the_answer_as_it_is(at: str, how: Any, failure: str) -> None:
    made = make(PROMPTS[:1], scripted(fails(at, how)))
    assert made.counts == {"made, but not revised": 1}
    assert [row["completion"] for row in made.files["revised.jsonl"]] == ["0"]
    assert made.files["pairs.jsonl"] == []
    assert [step["failure"] for step in made.files["revisions.jsonl"][0]["revisions"]] == [failure] * 2
    assert made.measured["changed"] == [0.0] and made.measured["revisions"] == [0.0]
    assert {name: values for name, values in made.measured.items() if values == [1.0]} == {
        "length": [1.0],
        f"unrevised_{failure}": [1.0],
    }


def test_after_a_bad_critique_the_next_principle_revises_the_last_good_answer() -> None:
    # The plans are an answer, a critique, its revision, and as the fourth the second critique.
    run = scripted(lambda prompt: "" if len(run.generator.plans) == 4 else appends(prompt))
    made = make(PROMPTS[:1], run, revisions=3)
    (line,) = made.files["revisions.jsonl"]
    first, second, third = (step["principle"] for step in line["revisions"])
    assert line["revisions"] == [
        {"principle": first, "critique": f"no {first}", "revision": f"0{first}"},
        {"principle": second, "critique": "", "failure": "critique_empty"},
        {"principle": third, "critique": f"no {third}", "revision": f"0{first}{third}"},
    ]
    assert made.files["revised.jsonl"][0]["completion"] == f"0{first}{third}"
    assert made.measured["revisions"] == [2.0]
    assert made.measured["unrevised_critique_empty"] == [pytest.approx(1 / 3)]


def test_a_first_answer_that_is_cut_off_can_be_revised_but_makes_no_pair() -> None:
    made = make(PROMPTS[:1], scripted(lambda prompt: LONG if TURN.findall(prompt)[-1][1] == "q0" else "good"))
    assert made.counts == {"made": 1}
    assert made.files["revised.jsonl"][0]["completion"] == "good" and made.files["pairs.jsonl"] == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (LONG, "skipped: the first answer is cut off and was not revised"),
        ("", "skipped: the first answer is empty"),
    ],
)
def test_a_row_without_a_complete_answer_is_skipped_with_the_reason(answer: str, reason: str) -> None:
    made = make(PROMPTS[:2], scripted(lambda prompt: answer if TURN.findall(prompt)[-1][1] == "q0" else ""))
    assert made.counts == {reason: 1, "skipped: the first answer is empty": 1} if answer else {reason: 2}
    assert made.files["revised.jsonl"] == [] and len(made.files["revisions.jsonl"]) == 2


def test_every_answer_of_several_samples_is_revised_on_its_own() -> None:
    made = make(PROMPTS[:2], scripted(appends, sampling=Sampling(max_new_tokens=16, samples=3)))
    assert [row["id"] for row in made.files["revised.jsonl"]] == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    assert made.counts == {"made": 2} and made.measured["revisions"] == [2.0, 2.0]


def test_critiques_have_a_limit_of_their_own() -> None:
    made = make(PROMPTS[:1], scripted(appends), critique_tokens=4)
    assert made.counts == {"made": 1}
    assert make(PROMPTS[:1], scripted(appends), critique_tokens=3).counts == {"made, but not revised": 1}  # "no a"


@pytest.mark.parametrize("own", [{"context": 100}, {"truncation": Truncation(max_length=110)}])
def test_a_request_without_room_leaves_the_answer_as_it_is(own: dict[str, Any]) -> None:
    # Without names of roles, "q0" is a prompt of 30 tokens, and the request for a critique has 78.
    made = make(PROMPTS[:1], scripted(appends, **own), critique_request=f"C {'please ' * 9}find it {{principle}}")
    assert made.counts == {"made, but not revised": 1} and made.measured["unrevised_no_room"] == [1.0]


def test_a_prompt_that_is_too_long_is_dropped() -> None:
    long = Prompt(asked("q" * 200), {}, "p.jsonl:7")
    made = make([*PROMPTS[:1], long], scripted(appends, truncation=Truncation(max_length=150, too_long="drop")))
    assert made.counts == {"made": 1, "dropped: too long": 1}
    assert [line["source"] for line in made.files["revisions.jsonl"]] == ["p.jsonl:1"]


def test_a_completion_of_several_messages_is_refused() -> None:
    turns = (*asked("q"), {"role": "assistant", "content": "1"}, *asked("2"), {"role": "assistant", "content": "3"})
    row = Conversation(cast(Messages, turns), 1, "c.jsonl:1")
    with pytest.raises(UserError, match=r"c\.jsonl:1: the completion has 3 messages: expected one, which is revised"):
        make([row], scripted(appends))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"critique_request": "What is bad?"}, r"critique_request must contain \{principle\}"),
        ({"examples": [{"role": "user", "content": "x"}]}, "examples must alternate between user and assistant"),
        ({"revisions": 5}, "revisions: 5, but the constitution has 4 principles, .*: expected at most 4"),
        ({"constitution": [{"name": "a", "revise": "x"}]}, "constitution.0: the principle 'a' has no critique:"),
        ({"constitution": [*CONSTITUTION, CONSTITUTION[0]]}, "constitution.4: name: 'a' is the name of two principles"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(PROMPTS, scripted(appends), **settings)


RECIPE = """
name: revise
threads: 1
stages:
  - name: revised
    method: {name: revise, revisions: 2, constitution: mine.yaml, critique_request: "{principle}",
             revision_request: "{principle}"}
    model: MODEL
    generation: {max_new_tokens: 12, stop: [a, b, c, d, e, f, g, h, i, j, k, l, m, "0", "1", "2", "3", "4"]}
    data: {rows: [{from: prompts.jsonl}, {from: chat.jsonl}]}
  - name: sft
    method: {name: sft}
    model: MODEL
    data: {train: {stage: revised, file: revised.jsonl}}
    trainer: {max_steps: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in a folder of its own, with its constitution. Rows are in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "revise.yaml").write_text(RECIPE.replace("MODEL", str(tiny_folder)))
    (tmp_path / "recipes" / "mine.yaml").write_text(json.dumps([{**one, "critique": "?"} for one in CONSTITUTION]))
    prompts = [{"prompt": f"{i}"} for i in range(40)]
    chat = [{"prompt": f"{i}", "completion": f"{i}{i}", "lang": "en"} for i in range(40)]
    for name, rows in (("prompts", prompts), ("chat", chat)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "recipes" / "revise.yaml"


def test_a_recipe_revises_and_learns_and_resumes_with_the_same_bytes(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pipeline.run(load(recipe, ["out=plain"]))
    made = entries(folder)["revised"]
    assert "mine.yaml" in made["inputs"]
    assert sum(made["rows"]["rows"]["counts"].values()) == 80
    assert {"eval_revisions", "eval_changed", "eval_length", "eval_unrevised_no_room"} <= made["results"][
        "after"
    ].keys()
    data = folder / "revised" / "data"
    assert load_rows(data / "revised.jsonl", (Conversation,)).rows
    assert load_rows(data / "pairs.jsonl", (Preference,)).rows
    assert len(json_rows(data / "revisions.jsonl")) == 80
    run_until_chunk(lambda: pipeline.run(load(recipe, ["out=killed"])), 1, monkeypatch)
    resumed = pipeline.run(load(recipe, ["out=killed"]))
    for path in data.iterdir():
        assert (resumed / "revised" / "data" / path.name).read_bytes() == path.read_bytes()


def test_a_constitution_that_changes_stops_the_stage(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until_chunk(lambda: pipeline.run(load(recipe)), 1, monkeypatch)
    other = recipe.with_name("mine.yaml")
    other.write_text(other.read_text().replace("fix a", "mend a"))
    with pytest.raises(UserError, match=r"mine\.yaml has changed since revised started"):
        pipeline.run(load(recipe))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.revised.method.constitution=my.yaml", r"revise\.yaml:\d+: .*my\.yaml: No such file"),
        ("stages.revised.method.revisions=5", "but the constitution has 4 principles"),
    ],
)
def test_mistakes_are_found_before_anything_runs(recipe: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(recipe, [override])
