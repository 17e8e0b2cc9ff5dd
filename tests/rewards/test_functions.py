"""Rewards by name, what is checked of the scores they give, and that they leave the run alone."""

import asyncio
import copy
import math
import os
import random
import sys
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.errors import UserCodeError, UserError
from burnish.rewards.functions import NamedReward
from burnish.rewards.scoring import score
from burnish.terminal import visible
from burnish.types import Messages, Trajectory
from burnish.user_functions import load
from hostile import examples, try_all


def answers(*texts):
    return [
        Trajectory.from_text(
            text,
            ({"role": "user", "content": "Hi"},),
            tokens=(5,) * len(text),
            columns={"n": i},
            source=f"prompts.jsonl:{i + 1}",
        )
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


def test_a_reward_of_weight_zero_is_only_logged():
    totals, by_name, _ = score(answers("a", "bb"), [NamedReward("length", 0.0, length), NamedReward("n", 1.0, number)])
    assert totals == [0.0, 1.0]
    assert by_name["length"] == [1.0, 2.0]


def test_scores_may_be_tensors_and_no_answers_call_no_reward():
    totals, _, _ = score(answers("a", "b"), [NamedReward("tensor", 1.0, lambda _: torch.tensor([1.5, 2.5]))])  # type: ignore
    assert totals == [1.5, 2.5]
    assert score([], [NamedReward("none", 1.0, length)]) == ([], {"none": []}, None)


@pytest.mark.parametrize(
    "returned, message",
    [
        ([1.0], "reward mine returned 1 scores for 2 trajectories, starting with prompts.jsonl:1"),
        ([1.0, math.nan], r"reward mine returned nan for prompts.jsonl:2, completion 'b': expected a finite number"),
        ([math.inf, 1.0], r"reward mine returned inf for prompts.jsonl:1, completion 'a'"),
        ([1.0, None], r"reward mine returned None for prompts.jsonl:2"),
        (["x", 1.0], r"reward mine returned 'x' for prompts.jsonl:1"),
        (None, "reward mine returned NoneType: expected a list of 2 numbers"),
        (3.0, "reward mine returned float: expected a list of 2 numbers"),
        ("ab", "reward mine returned str: expected a list of 2 numbers"),
        (b"ab", "reward mine returned bytes: expected a list of 2 numbers"),
        ({0: 1.0, 1: 2.0}, "reward mine returned dict: expected a list of 2 numbers"),
        ({1.0, 2.0}, "reward mine returned set: expected a list of 2 numbers"),
        (True, "reward mine returned bool: expected a list of 2 numbers"),
        (1j, "reward mine returned complex: expected a list of 2 numbers"),
        ((1.0 for _ in "ab"), "reward mine returned generator: expected a list of 2 numbers"),
        (torch.zeros(2, 1), r"reward mine returned Tensor of shape \(2, 1\): expected shape \(2,\), one number"),
        (np.zeros((1, 2)), r"reward mine returned ndarray of shape \(1, 2\): expected shape \(2,\)"),
        (torch.tensor(1.0), r"reward mine returned Tensor of shape \(\): expected shape \(2,\)"),
        (torch.zeros(3), "reward mine returned 3 scores for 2 trajectories"),
        (["1.5", 1.0], r"reward mine returned '1.5' for prompts.jsonl:1.*expected a finite number"),
        ([1.0, 1j], r"reward mine returned 1j for prompts.jsonl:2"),
        (torch.tensor([1.0, math.nan]), r"reward mine returned nan for prompts.jsonl:2"),
        (np.array(["1", "2"]), r"reward mine returned '1' for prompts.jsonl:1"),
        (
            [1.0, 1e39],
            r"reward mine returned 1e\+39 for prompts.jsonl:2.*a finite number of at most 3.4e\+38",
        ),
        ([1.0, -(10**400)], r"for prompts.jsonl:2"),
        ([1.0, 10**5000], r"returned an object of the class int for prompts.jsonl:2.* a finite number"),
        (range(10**12), "returned 1000000000000 scores for 2 trajectories"),
        (torch.ones(1).expand(10**12), "returned 1000000000000 scores for 2 trajectories"),
    ],
)
def test_an_invalid_score_is_reported_with_the_reward_and_the_row(returned, message):
    with pytest.raises(UserError, match=message):
        score(answers("a", "b"), [NamedReward("mine", 1.0, lambda _: returned)])


@pytest.mark.parametrize(
    "returned",
    [
        [1, Fraction(5, 2)],
        (1.0, 2.5),
        np.array([1.0, 2.5], dtype=np.float32),
        [np.int64(1), np.float16(2.5)],
        torch.tensor([1.0, 2.5], dtype=torch.bfloat16),
        torch.tensor([1.0, 2.5], requires_grad=True),
        [torch.tensor(1.0, requires_grad=True), np.array(2.5)],
        [True, 2.5],
    ],
)
def test_scores_may_be_lists_arrays_and_tensors(returned):
    totals, by_name, _ = score(answers("a", "b"), [NamedReward("mine", 2.0, lambda _: returned)])
    assert totals == [2.0, 5.0] and by_name == {"mine": [1.0, 2.5]}
    assert all(type(number) is float for number in by_name["mine"])


@pytest.mark.parametrize(
    "scores, weights",
    [((1e38, 1.0), (10.0, 1.0)), ((1e38, 3e38), (3.0, 3.0)), ((3e38, 3e38), (1e308, -1e308)), ((1.0,), (math.nan,))],
)
def test_a_total_beyond_float32_is_reported_with_the_rewards_and_the_row(scores, weights):
    rewards = [
        NamedReward(f"part{i}", weight, lambda answers, number=number: [0.5, *[number] * (len(answers) - 1)])
        for i, (number, weight) in enumerate(zip(scores, weights, strict=True))
    ]
    row = "1" if math.nan in weights else "2"
    with pytest.raises(UserError, match=rf"rewards for prompts.jsonl:{row} exceed the range of float32.*\(part0\)"):
        score(answers("a", "b"), rewards)


def test_token_scores_beyond_float32_are_refused_even_if_they_cancel_out():
    with pytest.raises(UserError, match=r"rewards for prompts.jsonl:1 exceed .*10 \* 1e\+38 \(mine\)"):
        score(answers("ab"), [NamedReward("mine", 10.0, lambda _: [[1e38, -1e38]])])


def test_two_rewards_with_the_same_name_are_refused():
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
        ("{folder}/mime.py:brevity", r"mime.py: no such file \(did you mean .*mine.py'\?\)"),
        ("{folder}/absent/x.py:brevity", r"x.py: no such file$"),
        ("{folder}/mine.py:brevty", r"has no brevty \(did you mean 'brevity'\?\)"),
        ("{folder}/mine.py:zzz", r"has no zzz; it has brevity$"),
        ("{folder}/mine.py:LIMIT", "LIMIT is a int, not a function"),
        ("{folder}/broken.py:f", r"broken.py:2: not Python"),
        ("burnish.no_such_module:f", "no module burnish.no_such_module is installed"),
        ("no_such_package.rewards:f", "no module no_such_package is installed"),
        ("math:fsun", r"math has no fsun \(did you mean 'fsum'\?\)"),
    ],
)
def test_mistakes_in_a_reference_are_reported(tmp_path, reference, message):
    (tmp_path / "mine.py").write_text("LIMIT = 3\ndef brevity(answers):\n    return [0.0 for _ in answers]\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(UserError, match=message):
        load(reference.format(folder=tmp_path))


def test_a_file_that_fails_to_import_shows_why(tmp_path):
    file = tmp_path / "needs.py"
    file.write_text("\nimport a_module_that_is_not_there\n")
    with pytest.raises(
        UserCodeError, match=r"needs.py raised ModuleNotFoundError when it was imported: No module named"
    ) as e:
        load(f"{file}:f")
    assert [line for line in e.value.traceback.splitlines() if "File" in line] == [
        f'  File "{file}", line 2, in <module>'
    ]
    file.write_text("import sys\nsys.exit()\n")
    for _ in range(2):  # no half of it is left in sys.modules
        with pytest.raises(UserCodeError, match=r"needs.py raised SystemExit when it was imported$"):
            load(f"{file}:f")


def test_random_numbers_during_an_import_are_always_the_same(tmp_path):
    drawn = []
    for number in (1, 2):  # the same source in two places is imported twice
        file = tmp_path / f"drawing{number}.py"
        file.write_text(
            "import random, torch\ndrawn = random.random(), torch.rand(()).item()\ndef f(_): return drawn\n"
        )
        before = state()
        drawn.append(load(f"{file}:f")([]))
        assert same(state(), before)
        random.seed(number)
        torch.manual_seed(number)
    assert drawn[0] == drawn[1]


# --- rewards that do more than score ------------------------------------------------------------------------------


def good(answers) -> list[float]:
    return [10.0 * answer.columns["n"] + len(answer.text) for answer in answers]


def naughty(act):
    """A reward that gives the scores of ``good`` and then acts."""

    def reward(answers):
        scores = good(answers)
        act(answers)
        return scores

    reward.__name__ = act.__name__
    return reward


def acts():
    """What a reward may do, each with its name."""

    def sort(answers):
        answers.sort(key=lambda answer: -len(answer.text))

    def reverse(answers):
        answers.reverse()

    def pop(answers):
        answers.pop(0)

    def clear(answers):
        answers.clear()

    def edit_columns(answers):
        for answer in answers:
            answer.columns["n"] = 7
            answer.columns["tests"].append("more")

    def remove_columns(answers):
        for answer in answers:
            answer.columns.clear()

    def edit_prompt(answers):
        for answer in answers:
            answer.prompt[0]["content"] += " and be brief"

    def edit_answers(answers):
        for answer in answers:
            object.__setattr__(answer, "turns", ())
            answer.sequences[0].arrays.clear()

    def chdir(answers):
        os.chdir("/")

    def environment(answers):
        os.environ["BURNISH_CACHE"] = "/nowhere"
        os.environ.pop("PATH", None)
        os.environ["NEW_VARIABLE"] = "1"

    def seed(answers):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    def draw(answers):
        random.random()
        np.random.rand()
        torch.rand(3)

    def no_grad(answers):
        torch.set_grad_enabled(False)

    def dtype(answers):
        torch.set_default_dtype(torch.float64)

    def device(answers):
        torch.set_default_device("meta")

    def threads(answers):
        torch.set_num_threads(3)

    def deterministic(answers):
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, True

    def precision(answers):
        torch.set_float32_matmul_precision("medium")

    def precision_of_the_new_kind(answers):
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def filters(answers):
        warnings.simplefilter("ignore")

    return [naughty(act) for act in locals().values()]


def state():
    """Everything of the process that could change a run."""
    return {
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.empty(0).device,
        "threads": torch.get_num_threads(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "benchmark": torch.backends.cudnn.benchmark,
        "precision": torch.get_float32_matmul_precision(),
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "torch": torch.get_rng_state().tolist(),
    }


def same(after, before) -> bool:
    assert [name for name in before if after[name] != before[name]] == []
    return True


def prompt_of(text) -> Messages:
    return ({"role": "user", "content": text},)


def asked(*texts):
    """Answers with columns and prompts that can be edited, which answers of one prompt share, as in a run."""
    prompt, columns = prompt_of("Hi"), {"n": 1, "tests": ["a"]}
    made = [
        Trajectory.from_text(text, prompt, tokens=(5,) * len(text), columns=columns, source=f"prompts.jsonl:{i}")
        for i, text in enumerate(texts)
    ]
    return [
        *made,
        Trajectory.from_text(
            "z", prompt_of("Bye"), tokens=(5,), columns={"n": 2, "tests": []}, source="prompts.jsonl:99"
        ),
    ]


@given(st.lists(st.sampled_from(acts()), min_size=1, max_size=3, unique=True), st.lists(st.text("ab", max_size=5)))
@settings(max_examples=60)
def test_side_effects_of_rewards_change_neither_scores_nor_the_run(rewards, texts):
    def witness(answers) -> list[float]:
        seen.append(copy.deepcopy(answers))
        return [random.random() + np.random.rand() + torch.rand(()).item() for _ in answers]

    results, kept, states = [], [], []
    for functions in (rewards, [good] * len(rewards)):
        seen: list[list[Trajectory]] = []
        given = asked(*texts)
        named = [NamedReward(f"reward{i}", 1.0 + i, function) for i, function in enumerate(functions)]
        states.append(state())
        results.append(score(given, [*named, NamedReward("witness", 1.0, witness)], (3, 4)))
        states.append(state())
        kept.append([given, *seen])
        random.random()  # what a reward draws does not depend on what was drawn before
    assert same(states[1], states[0]) and same(states[3], states[2])
    assert results[0] == results[1]
    assert kept[0] == kept[1] == [asked(*texts)] * 2


def test_random_numbers_of_a_reward_depend_on_the_seed_and_its_name():
    def draw(answers) -> list[float]:
        return [random.random() + np.random.rand() + torch.rand(()).item() for _ in answers]

    def drawn(seed, name="draw"):
        return score(answers("a", "b", "c"), [NamedReward("good", 1.0, number), NamedReward(name, 1.0, draw)], seed)[0]

    assert drawn((0, 1)) == drawn((0, 1))
    assert len({tuple(drawn(seed)) for seed in [(), (0, 1), (0, 2), (1, 1)]} | {tuple(drawn((0, 1), "other"))}) == 5


def test_a_column_that_cannot_be_copied_is_reported():
    answer = Trajectory.from_text("a", tokens=(5,), columns={"client": sys}, source="prompts.jsonl:3")
    with pytest.raises(UserError, match=r"prompts.jsonl:3: its columns cannot be copied for a reward: cannot pickle"):
        score([answer], [NamedReward("good", 1.0, length)])


def test_an_exception_is_reported_with_the_reward_the_batch_and_the_users_frames(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import json, torch\n"
        "@torch.no_grad()\n"
        "def ratio(answers):\n"
        "    return [ratio_of(a) for a in answers]\n"
        "def ratio_of(answer):\n"
        "    try:\n"
        "        json.loads('x')\n"
        "    except ValueError:\n"
        "        return 1 / 0\n"
        "def leave(answers):\n"
        "    import os, sys\n"
        "    os.chdir('/')\n"
        "    sys.exit(0)\n"
        "def nothing():\n"
        "    pass\n"
    )
    before = state()

    def error(name, texts=("a", "b", "c")):
        with pytest.raises(UserCodeError) as caught:
            score(answers(*texts), [NamedReward(name, 1.0, load(f"{file}:{name}"), f"mine.py:{name}")])
        assert same(state(), before)
        frames = [line for line in caught.value.traceback.splitlines() if line.startswith('  File "')]
        assert all(line.startswith(f'  File "{file}"') for line in frames)
        return str(caught.value), caught.value.traceback

    message, shown = error("ratio")
    batch = "on a batch of 3 trajectories (prompts.jsonl:1 ... prompts.jsonl:3)"
    assert message == f"reward ratio (mine.py:ratio) raised ZeroDivisionError {batch}: division by zero"
    assert "return 1 / 0" in shown and "During handling of the above" in shown and "JSONDecodeError" in shown
    message, shown = error("leave", ["a"])
    assert message == "reward leave (mine.py:leave) raised SystemExit on prompts.jsonl:1: 0"
    assert "line 13, in leave" in shown
    message, shown = error("nothing")
    assert "reward nothing (mine.py:nothing) raised TypeError" in message and "positional argument" in shown


def test_interrupts_and_messages_to_the_user_pass_through_rewards():
    for kind in (KeyboardInterrupt, UserError):

        def raising(answers, kind=kind):
            os.chdir("/")
            raise kind("stop")

        before = Path.cwd()
        with pytest.raises(kind, match="stop"):
            score(answers("a"), [NamedReward("mine", 1.0, raising)])
        assert Path.cwd() == before


# --- what rewards may return and receive ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one",
    [torch.tensor(1.5), np.array(1.5), np.float32(1.5), torch.tensor(1.5, dtype=torch.bfloat16), Fraction(3, 2)],
    ids=lambda one: type(one).__name__,
)
def test_scores_may_be_tensors_and_arrays_without_dimensions(one):
    reward = NamedReward("half", 1.0, lambda answers: [one for _ in answers])
    assert score(answers("a", "b"), [reward]).totals == [1.5, 1.5]


def cleared(answers):
    answers.clear()
    return [0.0 for _ in answers]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda answers: torch.zeros(2, device="meta"), "a tensor on the meta device, which holds no values"),
        (lambda answers: [torch.zeros((), device="meta")] * 2, "a tensor on the meta device"),
        (lambda answers: torch.zeros(2).to_sparse(), r"a tensor with the layout torch\.sparse_coo"),
        (cleared, "returned 0 scores for 2 trajectories"),
        (lambda answers: torch.tensor(1.0), r"Tensor of shape \(\): expected shape \(2,\)"),
    ],
)
def test_scores_that_cannot_be_read_are_one_message(function, message):
    with pytest.raises(UserError, match=f"^reward mine (returned )?{message}"):
        score(answers("a", "b"), [NamedReward("mine", 1.0, function)])


def test_a_reward_reads_the_text_of_the_prompt():
    reward = NamedReward("both", 1.0, lambda answers: [float(len(a.prompt_text + a.text)) for a in answers])
    assert score(answers("", "abc"), [reward]).totals == [2.0, 5.0]


def test_a_missing_column_is_named_with_those_that_exist():
    reward = NamedReward("mine", 1.0, lambda answers: [a.columns["nn"] for a in answers])
    with pytest.raises(UserCodeError, match=r"no column 'nn' \(did you mean 'n'\?\); columns are n"):
        score(answers("a"), [reward])
    with pytest.raises(KeyError, match="no column 'answer'; columns are none"):
        Trajectory.from_text("a").columns["answer"]


def test_rewards_with_the_parameters_of_trl():
    seen = []

    def whole(completions, **columns):
        seen.append((completions, columns))
        return [float(len(text)) for text in completions]

    async def some(prompts, completion_ids, n, scale=2.0):
        return [scale * len(ids) + k + len(text) for text, ids, k in zip(prompts, completion_ids, n, strict=True)]

    rewards: list = [NamedReward("whole", 1.0, whole), NamedReward("some", 1.0, some)]  # type: ignore[arg-type]
    by_name = score(answers("a", "bb"), rewards).by_name
    assert seen == [(["a", "bb"], {"prompts": ["Hi", "Hi"], "completion_ids": [[5], [5, 5]], "n": [0, 1]})]
    assert by_name == {"whole": [1.0, 2.0], "some": [4.0, 7.0]}
    with pytest.raises(
        UserError, match=r"reward mine: its parameter 'm' is not a column of the prompts; columns are n"
    ):
        score(answers("a"), [NamedReward("mine", 1.0, lambda completions, m: [0.0])])  # type: ignore[arg-type]


# --- generated ----------------------------------------------------------------------------------------------------


class Odd:
    """An object whose methods misbehave."""

    def __init__(self, error: type[BaseException] | None, length: int) -> None:
        self.error, self.length = error, length

    def _answer(self, value: object) -> Any:
        if self.error is not None:
            raise self.error("of a user's object \ud800")
        return value

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> float:
        return self._answer(1.0)

    def __float__(self) -> float:
        return self._answer(math.nan)

    def __repr__(self) -> str:
        return self._answer("Odd\x1b[2J")


class TrulyMine(BaseException):
    """Not even an ``Exception``."""


ERRORS: list[type[Exception]] = [
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    MemoryError,
    RecursionError,
    StopIteration,
    StopAsyncIteration,
    UnicodeError,
    type("Mine", (Exception,), {"__str__": lambda self: 1 / 0}),
]
NUMBERS = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from([10**400, 1j, True, None]),
    st.sampled_from([10**400, 10**3000]).map(lambda n: n * n),  # too long to be shown
    st.sampled_from([10**400, 10**3000]).map(lambda n: Fraction(n * n, 3)),
    st.sampled_from(["", "1.5", "x" * 10**6, b"1", "\ud800", "[/bold]", math.inf, -math.inf, math.nan, 1e39]),
    st.sampled_from([np.float64("nan"), np.str_("1"), np.datetime64("now"), np.longdouble("1e4000"), np.ma.masked]),
    st.builds(Odd, st.sampled_from([None, *ERRORS]), st.integers(0, 3)),
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
TENSORS = st.builds(
    lambda dtype, shape, device: torch.ones(shape, dtype=dtype, device=device),
    st.sampled_from([*DTYPES, torch.float8_e4m3fn]),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["cpu", "cpu", "meta"]),
)
ARRAYS = st.one_of(
    TENSORS,
    TENSORS.map(lambda tensor: tensor.cpu().numpy() if tensor.dtype in DTYPES[:2] and not tensor.is_meta else tensor),
    st.sampled_from(
        [
            torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,), check_invariants=True),
            torch.ones(1).expand(10**12),
            torch.ones(2, requires_grad=True),
            np.array(["a", None], dtype=object),
            np.array([(1, 2.0)] * 2, dtype=[("a", "i4"), ("b", "f4")]),
            np.ma.masked_array([1.0, 2.0], mask=[False, True]),
            np.broadcast_to(1.0, 10**12),
            range(10**12),
            range(2),
        ]
    ),
)
VALUES = st.recursive(
    NUMBERS | ARRAYS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=2, max_size=2),
        st.tuples(inner, inner),
        st.dictionaries(st.integers(0, 2), inner, max_size=2),
    ),
    max_leaves=6,
)


@examples(few=100, many=200)
def test_whatever_a_reward_returns_or_raises_is_a_number_or_one_message(examples: int, record_property: Any) -> None:
    given_numbers = 0

    def check(given: Any) -> None:
        nonlocal given_numbers

        def mine(answers: list) -> Any:
            answers.clear()
            if isinstance(given, type):
                raise given("of a reward \x1b")
            return given

        trajectories = answers("a", "b\x1b[2J")
        try:
            totals, _, _ = score(trajectories, [NamedReward("mine", 0.5, mine)])
        except (UserError, UserCodeError) as error:
            assert str(error).startswith("reward") and len(str(error)) < 1000
            visible(str(error)).encode()
        else:
            assert len(totals) == len(trajectories) == 2 and all(map(math.isfinite, totals))
            given_numbers += 1

    raised = st.sampled_from([*ERRORS, SystemExit, asyncio.CancelledError, TrulyMine])
    try_all(st.one_of(VALUES, st.lists(NUMBERS, min_size=2, max_size=2), raised), check, examples, record_property)
    assert given_numbers > examples // 20
