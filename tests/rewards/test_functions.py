"""Rewards by name, and what is checked of the scores they give."""

import math

import pytest
import torch

from burnish.rewards.functions import NamedReward, load, score
from burnish.types import Answer, UserError


def answers(*texts):
    return [
        Answer(({"role": "user", "content": "Hi"},), text, (5,) * len(text), "stop", {"n": i}, f"prompts.jsonl:{i + 1}")
        for i, text in enumerate(texts)
    ]


def length(answers) -> list[float]:
    return [float(len(answer.text)) for answer in answers]


def number(answers) -> list[float]:
    return [answer.columns["n"] for answer in answers]


def test_rewards_are_summed_by_weight_and_each_is_kept():
    rewards = [NamedReward("length", 0.5, length), NamedReward("number", -2.0, number)]
    totals, by_name, _ = score(answers("a", "bbbb", ""), rewards)
    assert totals == [0.5, 0.0, -4.0]
    assert by_name == {"length": [1.0, 4.0, 0.0], "number": [0.0, 1.0, 2.0]}


def test_a_weight_of_zero_measures_only():
    totals, by_name, _ = score(answers("a", "bb"), [NamedReward("length", 0.0, length), NamedReward("n", 1.0, number)])
    assert totals == [0.0, 1.0]
    assert by_name["length"] == [1.0, 2.0]


def test_scores_may_be_tensors_and_no_answers_need_no_reward():
    totals, _, _ = score(answers("a", "b"), [NamedReward("tensor", 1.0, lambda _: torch.tensor([1.5, 2.5]))])  # type: ignore
    assert totals == [1.5, 2.5]
    assert score([], [NamedReward("none", 1.0, length)]) == ([], {"none": []}, None)


@pytest.mark.parametrize(
    "returned, message",
    [
        ([1.0], "reward mine returned 1 scores for 2 answers, of which the first is prompts.jsonl:1"),
        ([1.0, math.nan], r"reward mine gave nan for prompts.jsonl:2, answer 'b': expected a finite number"),
        ([math.inf, 1.0], r"reward mine gave inf for prompts.jsonl:1, answer 'a'"),
        ([1.0, None], r"reward mine gave None for prompts.jsonl:2"),
        (["x", 1.0], r"reward mine gave 'x' for prompts.jsonl:1"),
        (None, "reward mine returned NoneType: expected a list of 2 numbers"),
        (3.0, "reward mine returned float: expected a list of 2 numbers"),
        ("ab", "reward mine returned str: expected a list of 2 numbers"),
    ],
)
def test_what_is_not_a_score_names_the_reward_and_the_row(returned, message):
    with pytest.raises(UserError, match=message):
        score(answers("a", "b"), [NamedReward("mine", 1.0, lambda _: returned)])


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(UserError, match="two rewards are named same"):
        score(answers("a"), [NamedReward("same", 1.0, length), NamedReward("same", 1.0, number)])


def test_functions_are_found_in_files_and_packages(tmp_path):
    file = tmp_path / "random.py"  # a file named like a module of Python does not take its place
    file.write_text("def brevity(answers):\n    return [-float(len(a.text)) for a in answers]\n")
    assert load(f"{file}:brevity")(answers("abc")) == [-3.0]
    import random

    assert hasattr(random, "shuffle")
    assert load("math:fsum") is math.fsum
    file.write_text("def brevity(answers):\n    return [0.0 for a in answers]\n")
    assert load(f"{file}:brevity")(answers("abc")) == [0.0], "the file as it is now"


def test_functions_of_one_file_share_its_state(tmp_path):
    file = tmp_path / "counting.py"
    file.write_text(
        "seen = []\ndef first(answers):\n    seen.append(1)\n    return seen\ndef second(answers):\n    return seen"
    )
    assert load(f"{file}:first")([]) is load(f"{file}:second")([])


@pytest.mark.parametrize(
    "reference, message",
    [
        ("brevity", "not a function: expected file.py:name or package.module:name"),
        ("{folder}/mine.py:", "not a function: expected file.py:name"),
        ("{folder}/mime.py:brevity", r"mime.py: no such file: did you mean .*mine.py\?"),
        ("{folder}/absent/x.py:brevity", r"x.py: no such file$"),
        ("{folder}/mine.py:brevty", r"has no brevty: did you mean brevity\?"),
        ("{folder}/mine.py:zzz", r"has no zzz: it has brevity$"),
        ("{folder}/mine.py:LIMIT", "LIMIT is a int, not a function"),
        ("{folder}/broken.py:f", r"broken.py:2: not Python"),
        ("burnish.no_such_module:f", "no module burnish.no_such_module is installed"),
        ("no_such_package.rewards:f", "no module no_such_package is installed"),
        ("math:fsun", r"math has no fsun: did you mean fsum\?"),
    ],
)
def test_mistakes_in_a_name_are_told(tmp_path, reference, message):
    (tmp_path / "mine.py").write_text("LIMIT = 3\ndef brevity(answers):\n    return [0.0 for _ in answers]\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(UserError, match=message):
        load(reference.format(folder=tmp_path))


def test_a_file_that_fails_to_import_shows_why(tmp_path):
    file = tmp_path / "needs.py"
    file.write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load(f"{file}:f")
