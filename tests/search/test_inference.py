"""Inference by search with a tiny model: it is greedy decoding at width one, never reads answers, and keeps limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from burnish.commands.generate import completions
from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.sampling import Sampling
from burnish.models.loaded import Loaded
from burnish.search.answers import Answers
from burnish.search.inference import METHODS, InferenceSettings, Solved, Strategy, compare, solve, vote
from burnish.search.settings import AnswerSettings, StepSettings
from burnish.search.steps import Partial
from burnish.search.tree import Finish, Node, Step, Tree, to_json
from stepwise import LETTERS, questions, stepwise

ANSWER = AnswerSettings(find="last_line", check="exact")
SMALL: dict[str, dict[str, int]] = {"mcts": {"simulations": 12, "children": 3}, "dvts": {"beams": 2, "children": 2}}
STRATEGIES = [Strategy.model_validate({"method": method, **SMALL.get(method, {})}) for method in METHODS]
STEP = 4
"""The tokens of each step of the model."""


@pytest.fixture(scope="module")
def model() -> Loaded:
    return stepwise()


def settings(**changes: Any) -> InferenceSettings:
    defaults: dict[str, Any] = {"answer": ANSWER, "sampling": Sampling(max_new_tokens=12)}
    return InferenceSettings(**(defaults | changes))


def what(solved: Sequence[Solved]) -> list[tuple[Any, ...]]:
    """All of a solution but its check and its costs."""
    return [(one.source, one.text, one.answer, one.finish, one.value, to_json(one.tree)) for one in solved]


# --- greedy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [True, False])
def test_one_beam_with_one_child_at_temperature_0_is_plain_generation(values: bool) -> None:
    loaded, rows = stepwise(values), questions(8)
    cold = settings(sampling=Sampling(max_new_tokens=12, temperature=0))
    beam = solve(rows, loaded, Strategy(method="sbs", beams=1, children=1), cold)
    greedy = solve(rows, loaded, Strategy(method="greedy"), settings())
    assert what(beam) == what(greedy)
    # the ninth step of 4 tokens is where the depth ends a solution
    plain = completions(loaded, rows, Sampling(max_new_tokens=9 * STEP, temperature=0))
    lines = [line for _, some in plain for line in some]
    assert [one.text for one in greedy] == [line["completion"] for line in lines]
    ends = {"answer": "stop", "depth": "length"}
    assert [ends[one.finish] for one in greedy] == [line["finish_reason"] for line in lines]
    assert {one.finish for one in greedy} == {"answer", "depth"}


def test_greedy_ignores_the_temperature_of_the_other_methods(model: Loaded) -> None:
    warm = settings(sampling=Sampling(max_new_tokens=12, temperature=2, top_k=3))
    greedy = Strategy(method="greedy")
    assert what(solve(questions(3), model, greedy, warm)) == what(solve(questions(3), model, greedy, settings()))


# --- known answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.method)
def test_solutions_are_the_same_without_known_answers(model: Loaded, strategy: Strategy) -> None:
    known, unknown = questions(6), questions(6, answers=False)
    wrong = [replace(row, columns={"answer": "no"}) for row in known]
    solved = [solve(rows, model, strategy, settings()) for rows in (known, unknown, wrong)]
    assert what(solved[0]) == what(solved[1]) == what(solved[2])
    assert [one.correct for one in solved[0]] == [
        one.answer == row.columns["answer"] for one, row in zip(solved[0], known, strict=True)
    ]
    assert {(one.correct, one.known) for one in solved[1]} == {(None, False)}
    assert {(one.correct, one.known) for one in solved[2]} == {(False, True)}


def test_a_blank_answer_is_unknown_and_a_failed_solution_is_incorrect(model: Loaded) -> None:
    rows = [replace(row, columns={"answer": answer}) for row, answer in zip(questions(3), ("", None, 5), strict=True)]
    solved = solve(rows, model, Strategy(method="greedy"), settings(step=StepSettings(depth=1)))
    assert [(one.finish, one.answer, one.known, one.correct) for one in solved] == [
        ("depth", None, False, None),
        ("depth", None, False, None),
        ("depth", None, True, False),
    ]


def test_answers_are_found_and_checked_by_functions_of_the_user(
    model: Loaded, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "def find(text):\n    return 'L' + text[:1]\n\ndef check(answer, columns):\n"
        "    return None if columns['answer'] == '0' else answer == 'Lb'\n"
    )
    monkeypatch.chdir(tmp_path)
    answer = AnswerSettings(find="own.py:find", check="own.py:check")
    solved = solve(questions(2), model, Strategy(method="sbs"), settings(answer=answer))
    assert [one.answer for one in solved] == [f"L{one.text[:1]}" for one in solved]
    assert solved[0].correct is None and solved[0].known  # the answer of the first question is 0
    assert solved[1].correct is (solved[1].text[:1] == "b")


# --- costs --------------------------------------------------------------------------------------------------------


def test_passes_are_counted(model: Loaded) -> None:
    (solved,) = solve(questions(1), model, Strategy(method="greedy"), settings())
    # one pass over the prompt, then one for each of 9 steps of 4 tokens, in one call for each step
    assert (solved.finish, solved.steps, solved.tokens, solved.passes, solved.calls) == ("depth", 9, 36, 37, 9)


def test_one_beam_with_five_children_makes_at_most_twice_the_passes_of_greedy(model: Loaded) -> None:
    for row in questions(6):
        (greedy,) = solve([row], model, Strategy(method="greedy"), settings())
        (wide,) = solve([row], model, Strategy(method="sbs", beams=1, children=5), settings())
        # by step: the tokens of a step, and one more pass for the value after it
        assert wide.passes / wide.steps <= 2 * greedy.passes / greedy.steps
        assert wide.passes <= 1 + (STEP + 1) * (wide.steps + 1)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.method)
def test_trees_share_calls_and_are_the_same_as_alone(model: Loaded, strategy: Strategy) -> None:
    rows = questions(10)
    together = solve(rows, model, strategy, settings())
    alone = solve(rows, model, strategy, settings(together=1))
    assert [(one.text, one.answer, one.finish) for one in together] == [
        (one.text, one.answer, one.finish) for one in alone
    ]
    assert [nodes(one.tree) for one in together] == [nodes(one.tree) for one in alone]
    assert 5 * sum(one.calls for one in together) <= sum(one.calls for one in alone)
    assert sum(one.passes for one in together) < sum(one.passes for one in alone)


def nodes(tree: Tree[Any]) -> list[tuple[Any, ...]]:
    """The nodes of a tree. Values and priors are rounded, because a batch changes the order of sums."""
    return [
        (node.step.text, node.step.finish, node.visits, round(node.value or 0.0, 9), round(node.step.prior, 9))
        for node in tree.nodes()
    ]


def test_a_solution_does_not_depend_on_the_order_of_questions(model: Loaded) -> None:
    rows = questions(5)
    forward = solve(rows, model, Strategy(method="sbs"), settings(together=2))
    backward = solve(rows[::-1], model, Strategy(method="sbs"), settings())
    assert [one.text for one in forward] == [one.text for one in backward[::-1]]
    other = solve(rows, model, Strategy(method="sbs"), settings(seed=1))
    assert [one.text for one in forward] != [one.text for one in other]


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["majority", "best-of-n", "sbs", "dvts", "mcts"])
def test_the_steps_that_reach_the_limit_of_tokens_are_the_last(model: Loaded, method: str) -> None:
    strategy = Strategy.model_validate({"method": method, **SMALL.get(method, {})})
    free = solve(questions(6), model, strategy, settings())
    limited = solve(questions(6), model, strategy, settings(tokens=30))
    for one, other in zip(free, limited, strict=True):
        # a wave samples at most ``draws`` steps, of 4 tokens or of the end token alone
        assert other.tokens < 30 + strategy.draws * STEP
        if one.tokens < 30:
            assert to_json(one.tree) == to_json(other.tree)
        elif other.finish == "tokens":
            assert other.answer is None
    assert any(other.tree.stopped == "tokens" for other in limited)


def test_the_steps_that_reach_the_time_limit_are_the_last(model: Loaded) -> None:
    ticks = iter(range(100))
    solved = solve(questions(2), model, Strategy(method="greedy"), settings(seconds=3), lambda: float(next(ticks)))
    # The clock is read when the chunk begins (0), when the search does (1), and before every further step (2, 3, 4).
    # At 4, three seconds are over.
    assert [(one.steps, one.finish) for one in solved] == [(3, "seconds")] * 2
    assert all(one.answer is None for one in solved)


@pytest.mark.parametrize("method", ["majority", "sbs", "dvts", "mcts"])
def test_the_time_limit_is_kept_where_each_call_takes_a_second(
    model: Loaded, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[int] = []
    submit = LocalGenerator.submit

    def counting(self: Any, requests: Any, version: int) -> Any:
        submitted.append(len(requests))
        return submit(self, requests, version)

    monkeypatch.setattr(LocalGenerator, "submit", counting)
    strategy = Strategy.model_validate({"method": method, **SMALL.get(method, {})})
    solved = solve(questions(4), model, strategy, settings(seconds=2.5), lambda: float(len(submitted)))
    # two calls end before the limit, and the third one reaches it; one more may compute values of what it sampled
    assert {one.seconds * 4 for one in solved} <= {3.0, 4.0}
    assert {one.tree.stopped for one in solved} <= {"seconds", "exhausted"} and "seconds" in [
        one.tree.stopped for one in solved
    ]


def test_blank_lines_up_to_the_end_of_the_context_window_end_a_solution() -> None:
    loaded = stepwise()
    line_break = loaded.tokenizer.convert_tokens_to_ids("\n")
    with torch.no_grad():
        loaded.model.lm_head.weight[:, line_break] = -20
        loaded.model.lm_head.weight[line_break, line_break] = 0
    (solved,) = solve(questions(1), loaded, Strategy(method="greedy"), settings(sampling=Sampling(max_new_tokens=999)))
    assert (solved.text, solved.finish, solved.steps) == ("", "context", 0)


# --- votes --------------------------------------------------------------------------------------------------------


def end(text: str, finish: Finish = "answer") -> Node[Partial]:
    return Node(Step(Partial(0, 0, (), text), text, 1.0, 1, finish))


@pytest.mark.parametrize(
    ("texts", "winner"),
    [
        (["1", "2", "2"], 1),
        (["1", "2", "2", "1"], 0),  # a tie: 1 came first
        (["2", "1", "1/2", "0.5"], 2),  # equal by math-verify
        (["1"], 0),
    ],
)
def test_the_most_frequent_answer_wins(texts: list[str], winner: int) -> None:
    ends = [end(f"so {text}") for text in texts]
    assert vote(ends, Answers(AnswerSettings())) is ends[winner]


def test_solutions_without_an_answer_do_not_vote() -> None:
    answers = Answers(ANSWER)
    ends = [end("a=1", "depth"), end("b=1", "depth"), end("c=2")]
    assert vote(ends, answers) is ends[2]
    assert vote(ends[:2], answers) is ends[0]


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["best-of-n", "sbs", "dvts", "mcts"])
def test_values_need_a_value_head(method: str) -> None:
    with pytest.raises(UserError, match=r"no value head: train one with method: \{name: step_value\}, or use greedy"):
        solve(questions(1), stepwise(values=False), Strategy(method=method), settings())  # type: ignore[arg-type]


def test_one_delimiter(model: Loaded) -> None:
    other = settings(step=StepSettings(delimiter=";"))
    with pytest.raises(UserError, match=r"judges steps that end with '\\n', but the delimiter is set to ';'"):
        solve(questions(1), model, Strategy(method="greedy"), other)
    loaded = stepwise(delimiter="=")
    (solved,) = solve(questions(1), loaded, Strategy(method="greedy"), settings())
    assert solved.tree.root.children[0].step.text.removesuffix("=") in LETTERS  # not up to the line break


def test_equal_samples_and_other_models_are_refused(model: Loaded) -> None:
    cold = settings(sampling=Sampling(temperature=0))
    with pytest.raises(UserError, match=r"majority\(5\): all 5 samples are the same at temperature 0"):
        solve(questions(1), model, Strategy(method="majority"), cold)
    with pytest.raises(UserError, match="a reward model cannot solve questions"):
        solve(questions(1), replace(model, is_reward_model=True), Strategy(method="greedy"), settings())


def test_settings_that_are_not_read_are_refused() -> None:
    with pytest.raises(UserError, match="samples: sbs does not read it: it applies to majority, best"):
        Strategy(method="sbs", samples=4)
    with pytest.raises(UserError, match=r"sampling\.stop: the search sets it"):
        InferenceSettings(sampling=Sampling(stop=["\n"]))


def test_labels() -> None:
    labels = ["greedy", "majority(5)", "best-of-n(5)", "sbs(3, 5)", "dvts(2, 2)", "mcts(12, 3)"]
    assert [strategy.label for strategy in STRATEGIES] == labels
    assert Strategy(method="mcts", by="visits", exploration=2).label == "mcts(40, 5, exploration=2.0, by=visits)"


# --- comparison ---------------------------------------------------------------------------------------------------


def result(correct: bool | None, known: bool = True, tokens: int = 10) -> Solved:
    finish = "answer" if correct is not False else "depth"
    tree = Tree.start("q", None)
    return Solved("q", "", None, finish, None, correct, 2, tokens, 3.0, 1.0, 0.5, tree, known)


def test_methods_are_compared_on_rows_with_a_known_answer() -> None:
    first = [result(True)] * 4 + [result(False)] * 4 + [result(None, known=False)] * 2
    second = [result(True, tokens=20)] * 6 + [result(None), result(False)] + [result(None, known=False)] * 2
    both = compare({"a": first, "b": second})
    # Wilson for 4 of 8: center (4 + 1.92) / (8 + 3.84) = .5, half width 1.96 / 11.84 sqrt(2 + .96) = .2848
    assert both["a"]["accuracy"] == pytest.approx({"value": 0.5, "low": 0.2152, "high": 0.7848}, abs=1e-4)
    assert "difference" not in both["a"] and both["a"]["finish"] == {"answer": 6, "depth": 4}
    assert (both["b"]["rows"], both["b"]["known"], both["b"]["undecided"]) == (10, 8, 1)
    assert both["b"]["tokens"] == 16 and both["b"]["steps"] == 2  # means over all 10 rows: (6 * 20 + 4 * 10) / 10
    difference = both["b"]["difference"]
    # 2 of 8 rows change, both for the better, so that no resample is below 0
    assert difference["value"] == 0.25 and 0 <= difference["low"] < 0.25 < difference["high"] <= 0.75


def test_few_rows_have_no_interval_of_the_difference_and_unknown_ones_no_accuracy() -> None:
    assert compare({"a": [result(True)], "b": [result(False)]})["b"]["difference"] == {"value": -1.0}
    unknown = compare({"a": [result(None, known=False)], "b": [result(None, known=False)]})
    assert "accuracy" not in unknown["a"] and "difference" not in unknown["b"] and unknown["b"]["known"] == 0
