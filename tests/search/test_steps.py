"""Reasoning steps as tokens: where they end, why solutions end, their code, their seeds and their values."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from threading import Timer
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import byte_tokenizer, character_tokenizer
from burnish.data.recognition import parse
from burnish.errors import UserError
from burnish.generate.local import LocalGenerator
from burnish.generate.sampling import Sampling
from burnish.render.renderer import Renderer
from burnish.render.solutions import solution
from burnish.rl.sandbox import client
from burnish.rl.sandbox.client import Sandbox, enforced
from burnish.rl.sandbox.types import History, Limits, Result
from burnish.search.mcts import Settings, grow
from burnish.search.settings import StepSettings
from burnish.search.solutions import paths
from burnish.search.steps import Partial, StepSampler, open_sandbox
from burnish.search.tree import Finish, Node, Step, Tree
from burnish.types import Messages, Prompt, Steps
from scripted import ScriptedGenerator
from stepwise import stepwise

QUESTION: Messages = ({"role": "user", "content": "3*4+2=?"},)
END = "<|im_end|>"


def last_number(text: str) -> str | None:
    """What follows the last = sign."""
    return text.rpartition("=")[2].strip() or None if "=" in text else None


def root(tokenizer: Any, question: int = 0, tree: int = 0) -> Tree[Partial]:
    prompt = tokenizer.apply_chat_template(list(QUESTION), add_generation_prompt=True, return_dict=False)
    return Tree.start(question, Partial(question, tree, tuple(prompt)))


def scripted(
    script: Callable[[str], str | tuple[str, str]], tokenizer: Any = None, new: int = 40, **own: Any
) -> StepSampler:
    """A sampler of what a script writes behind the text so far. ``own``: settings of steps, or of the sampler."""
    tokenizer = tokenizer or character_tokenizer()
    keys = {"context", "sandbox", "outcome", "printed"} & set(own)
    return StepSampler(
        ScriptedGenerator(tokenizer, lambda prompt: script(prompt.partition("assistant\n")[2])),
        tokenizer,
        frozenset({tokenizer.eos_token_id}),
        StepSettings(**{key: value for key, value in own.items() if key not in keys}),
        Sampling(max_new_tokens=new),
        0,
        values=False,
        answer=last_number,
        **{key: own[key] for key in keys},
    )


def walk(sampler: StepSampler, most: int = 12) -> list[Step[Partial]]:
    """One chain of steps, to the end of the solution."""
    node, steps = root(sampler.tokenizer).root, []
    while not node.finished and len(steps) < most:
        ((step,),) = sampler.expand([(node, 1)])
        (node,) = node.add([step])
        steps.append(step)
    return steps


def pieces(tokenizer: Any, state: Partial) -> str:
    """The text of a state behind the question, with special tokens."""
    return tokenizer.decode(list(state.tokens)).partition("assistant\n")[2]


# --- where steps end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", ["\n", "\n\n", " ; ", "</step>"])
@pytest.mark.parametrize("merges", [(), ((".", "Ċ"), ("Ċ", "Ċ"), ("p", ">"), (";", "Ġ"))])
def test_a_step_ends_at_the_delimiter_be_it_several_tokens_or_a_part_of_one(delimiter, merges):
    tokenizer = byte_tokenizer(merges=merges)
    written = [f"3*4=12.{delimiter}", f"  12+2=14.{delimiter}", END]
    sampler = scripted(lambda text: written[text.count("=") if text.endswith(delimiter) else 0], tokenizer)
    sampler.settings = StepSettings(delimiter=delimiter)
    steps = walk(sampler)
    assert [step.text for step in steps] == ["3*4=12.", "12+2=14.", ""]
    assert [step.finish for step in steps] == ["", "", "answer"]
    assert steps[-1].state.text.startswith(f"3*4=12.{delimiter}12+2=14.")
    assert pieces(tokenizer, steps[-1].state) == "".join(written)


def test_text_after_the_delimiter_in_its_own_token_belongs_to_the_next_step():
    tokenizer = byte_tokenizer(merges=(("Ċ", "1"),))
    parts = {"": "3*4=12\n1", "3*4=12\n1": "2+2=14\n", "3*4=12\n12+2=14\n": END}
    steps = walk(scripted(parts.__getitem__, tokenizer))
    assert [(step.text, step.finish) for step in steps] == [("3*4=12", ""), ("12+2=14", ""), ("", "answer")]
    assert steps[-1].state.text == "3*4=12\n12+2=14"
    last = walk(scripted(lambda text: f"2{END}" if text else "3*4=12\n1", tokenizer))[-1]
    assert (last.text, last.finish) == ("12", "answer")
    whole = walk(scripted(lambda text: f"\n1{END}" if text else "3*4=12\n1", tokenizer))[-1]
    assert whole.state.text == "3*4=12\n1\n1"


def test_empty_steps_belong_to_the_step_after_them():
    parts = {"": "\n", "\n": " \n", "\n \n": "3*4=12\n", "\n \n3*4=12\n": f"\n{END}"}
    steps = walk(scripted(parts.__getitem__))
    assert [(step.text, step.finish) for step in steps] == [("3*4=12", ""), ("", "answer")]
    assert [step.tokens for step in steps] == [1 + 2 + 7, 2]
    tags = walk(scripted(lambda text: "</step>" if not text else "a=1</step>", delimiter="</step>", depth=1))
    assert tags[0].text == tags[0].state.text == "a=1"
    assert walk(scripted(lambda text: "\n", new=3))[0].finish == "length"  # blank lines only


def test_a_solution_ends_with_the_models_turn_or_with_final():
    (step,) = walk(scripted(lambda text: f"3*4+2=14{END}"))
    assert (step.text, step.finish, step.state.text) == ("3*4+2=14", "answer", "3*4+2=14")
    steps = walk(scripted(lambda text: "So the answer = 14\n" if text else "3*4=12\n", final="the answer"))
    assert [(step.text, step.finish) for step in steps] == [("3*4=12", ""), ("So the answer = 14", "answer")]


# --- why solutions end --------------------------------------------------------------------------------------------


class Fails:
    """A sandbox in which all code fails, but ``ok``."""

    def run(self, code: str, after: History = ()) -> Result:
        return Result("", "1" if code == "ok" else "no", "ok" if code == "ok" else "error", (*after, code))


ENDS: dict[Finish, tuple[Callable[[str], str | tuple[str, str]], dict[str, Any]]] = {
    "answer": (lambda text: f"3*4=12{END}", {}),
    "unparsable": (lambda text: f"I do not know{END}", {}),
    "depth": (lambda text: "3*4=12\n", {"depth": 2}),
    "tools": (lambda text: "<code>1/0</code>", {"code": {}, "sandbox": Fails()}),
    "context": (lambda text: ("3*4", "context"), {}),
    "length": (lambda text: "3*4=12\n", {"new": 5}),
}


@pytest.mark.parametrize("reason", ENDS)
def test_each_finish_reason_and_its_outcome(reason):
    script, own = ENDS[reason]
    for known in (1.0, -1.0):
        sampler = scripted(script, **own, outcome=lambda state, known=known: known)
        tree = root(sampler.tokenizer)
        grow([tree], sampler, Settings(simulations=20, children=1))
        (end,) = [node for node in tree.nodes() if node.finished]
        assert end.step.finish == reason
        assert end.outcome == end.value == (known if reason == "answer" else -1.0)


def test_these_are_all_finish_reasons():
    assert {*ENDS, ""} == set(get_args(Finish))


@pytest.mark.parametrize(("steps", "finish"), [(2, "answer"), (3, "depth")])
@pytest.mark.parametrize("apart", [True, False])
def test_a_solution_may_have_as_many_steps_as_depth_and_an_empty_one_that_ends_it(steps, finish, apart):
    """Training puts a delimiter after the last step, and the end of the turn after that."""
    written = ["3*4=12\n"] * steps
    written = [*written, END] if apart else [*written[:-1], f"3*4=12{END}"]
    script = iter(written)
    found = walk(scripted(lambda text: next(script), depth=2))
    assert found[-1].finish == finish
    assert [step.text for step in found if step.text] == ["3*4=12"] * steps


def test_without_known_answers_an_answer_has_no_outcome_and_a_failure_has():
    sampler = scripted(lambda text: f"3*4=12{END}")
    answer, failure = root(sampler.tokenizer).root.add([step := walk(sampler)[0], replace(step, finish="length")])
    assert sampler.outcomes([answer, failure]) == [None, -1.0]


def test_a_full_context_ends_a_solution_before_the_generator_refuses_it():
    prompt = len(root(character_tokenizer()).root.step.state.tokens)
    # The third step would begin with one token of room.
    sampler = scripted(lambda text: "3*4=12\n", context=prompt + 15)
    assert [step.finish for step in walk(sampler)] == ["", "context"]


def test_output_that_fills_the_context_ends_a_solution_even_if_it_is_final():
    prompt = len(root(character_tokenizer()).root.step.state.tokens)
    written = "final = 1 <code>ok</code>"  # and <output>1</output> and a line break
    room = len(written) + len("<output>1</output>\n")
    for context, reason in ((prompt + room + 1, "context"), (prompt + room + 2, "answer")):
        sampler = scripted(lambda text: written, code={}, final="final", sandbox=Fails(), context=context)
        assert walk(sampler)[0].finish == reason


# --- tokens in, tokens out ----------------------------------------------------------------------------------------


def sampled(seed: int = 0, slots: int = 8, **own: Any) -> StepSampler:
    loaded = stepwise()
    generator = LocalGenerator(loaded.model, loaded.tokenizer, loaded.value_head, slots)
    stop = frozenset({loaded.tokenizer.eos_token_id})
    settings = StepSettings(depth=4)
    return StepSampler(
        generator, loaded.tokenizer, stop, settings, Sampling(max_new_tokens=9), seed, answer=last_number, **own
    )


def grown(sampler: StepSampler, questions: Sequence[int], tree: int = 0) -> list[Tree[Partial]]:
    prompts = [Prompt(({"role": "user", "content": f"{question}+{question}="},), {}, "p:1") for question in questions]
    ids = Renderer(sampler.tokenizer).prompts(prompts)
    trees = [Tree.start(q, Partial(q, tree, tuple(tokens))) for q, tokens in zip(questions, ids, strict=True)]
    grow(trees, sampler, Settings(simulations=6, children=3))
    return trees


def told(tree: Tree[Partial]) -> list[tuple[Any, ...]]:
    return [(node.path(), node.step.state.tokens, node.step.finish, node.visits) for node in tree.nodes()]


def test_values_are_those_of_a_plain_forward_pass():
    sampler, loaded = sampled(), stepwise()
    head = loaded.value_head
    assert head is not None
    seen = set()
    for tree in grown(sampler, range(1, 6)):
        for node in tree.nodes():
            state = node.step.state
            if node.parent is None or node.step.finish in ("length", "context") or not node.visits:
                continue
            ended = state.tokens[-1] in sampler.stop_ids
            ids = torch.tensor([state.tokens[: len(state.tokens) - ended]])  # the V before the end token
            with torch.no_grad():
                expected = head(loaded.model.model(ids).last_hidden_state)[0, -1].item()
            assert sampler.evaluate([node]) == pytest.approx([expected], abs=1e-9)
            seen.add((ended, node.step.text == ""))
    assert {(True, True), (False, False)} <= seen  # this model ends its turn after a line break only


def test_a_value_that_was_not_read_when_sampling_is_read_later():
    sampler = sampled()
    trees = grown(sampler, range(1, 6))
    nodes = [node for tree in trees for node in tree.nodes() if node.parent and node.step.finish == ""]
    unread = [Node(replace(node.step, state=replace(node.step.state, value=None))) for node in nodes]
    assert len(nodes) > 1
    assert sampler.evaluate(unread) == pytest.approx(sampler.evaluate(nodes), abs=1e-9)


def test_a_tree_does_not_depend_on_the_trees_beside_it():
    alone = [grown(sampled(slots=64), [question])[0] for question in (3, 5)]
    together = grown(sampled(slots=3), [2, 3, 4, 5, 6])
    assert [told(tree) for tree in alone] == [told(together[1]), told(together[3])]


def test_draws_depend_on_the_run_the_question_the_tree_and_the_path():
    first = told(grown(sampled(), [3])[0])
    assert told(grown(sampled(), [3])[0]) == first
    assert told(grown(sampled(), [3], tree=1)[0]) != first
    assert told(grown(sampled(seed=1), [3])[0]) != first
    sampler = sampled()
    (tree,) = grown(sampler, [3])
    node = tree.root.children[0]
    seeds = {sampler._seed(each, draw) for each in (tree.root, node) for draw in range(3)}
    assert len(seeds) == 6
    other = Node(Step(replace(tree.root.step.state, question=4), "", 1.0, 0))
    assert sampler._seed(other, 0) not in seeds


def test_a_state_holds_the_ids_that_were_sampled():
    sampler = sampled()
    submitted = sampler.generator.submit
    drawn: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    requests: list[Any] = []
    sampler.generator.submit = lambda plan, version: (requests.extend(plan), submitted(plan, version))[1]  # type: ignore
    added = sampler._add

    def add(draft: Any, completion: Any) -> None:
        before = (*draft.parent.tokens, *draft.tokens)
        drawn.setdefault(before, []).append(tuple(completion.tokens.tolist()))
        added(draft, completion)

    sampler._add = add  # type: ignore[method-assign]
    trees = grown(sampler, [3, 4])
    # Each request begins with the ids that were sampled before it.
    known = {(*before, *ids) for before, all_ids in drawn.items() for ids in all_ids}
    roots = {tree.root.step.state.tokens for tree in trees}
    assert {request.tokens for request in requests} <= known | roots
    assert {node.step.state.tokens for tree in trees for node in tree.nodes() if node.parent} <= known


# --- code ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sandbox():
    if "protection" in (missing := enforced()):
        pytest.skip(missing["protection"])
    with Sandbox(Limits(cpu_seconds=2), preload=["math"]) as started:
        yield started


def test_the_output_of_code_is_appended(sandbox):
    written = {
        "": "Multiply. <code>print(3 * 4)</code>",
        "Multiply. <code>print(3 * 4)</code><output>12</output>\n": f"3*4=12{END}",
    }
    sampler = scripted(written.__getitem__, code={}, sandbox=sandbox)
    steps = walk(sampler)
    assert [(s.text, s.output, s.code) for s in steps] == [
        ("Multiply. <code>print(3 * 4)</code>", "<output>12</output>", "ok"),
        ("3*4=12", "", ""),
    ]
    assert pieces(sampler.tokenizer, steps[-1].state) == "".join(list(written)[1:]) + f"3*4=12{END}"
    assert steps[-1].state.text == "".join(list(written)[1:]) + "3*4=12"
    assert steps[0].tokens == len("Multiply. <code>print(3 * 4)</code>")  # what was sampled


def test_variables_live_along_a_path_and_each_child_has_its_own(sandbox):
    sampler = scripted(lambda text: "<code>x = [1]</code>" if not text else "<code>x.append(2); x</code>", code={})
    sampler.sandbox = sandbox
    node = root(sampler.tokenizer).root
    (node,) = node.add(sampler.expand([(node, 1)])[0])
    children = sampler.expand([(node, 3)])[0]
    assert [step.output for step in children] == ["<output>[1, 2]</output>"] * 3
    (child,) = node.add(children)  # equal steps are one child
    assert sampler.expand([(child, 1)])[0][0].output == "<output>[1, 2, 2]</output>"
    assert child.step.state.history == ("x = [1]", "x.append(2); x")


def test_equal_code_after_equal_code_runs_once():
    class Counted:
        def __init__(self) -> None:
            self.runs: list[tuple[str, tuple[str, ...]]] = []

        def run(self, code: str, history: tuple[str, ...]) -> Result:
            self.runs.append((code, history))
            return Result(f"{len(self.runs)}\n", "", "ok", (*history, code))

    sampler = scripted(lambda text: "<code>x = [1]</code>" if not text else "<code>x.append(2); x</code>", code={})
    counted = Counted()
    sampler.sandbox = counted  # type: ignore[assignment]
    tree = root(sampler.tokenizer)
    first = sampler.expand([(tree.root, 2)])[0]
    assert [step.output for step in first] == ["<output>1</output>"] * 2
    nodes = [tree.root.add([step])[0] for step in first]  # two states, as the chains of a vote
    assert [[step.output for step in each] for each in sampler.expand([(node, 2) for node in nodes])] == [
        ["<output>2</output>"] * 2,
        ["<output>2</output>"] * 2,
    ]
    assert counted.runs == [("x = [1]", ()), ("x.append(2); x", ("x = [1]",))]


def test_ctrl_c_ends_code_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    if "protection" in (missing := enforced()):
        pytest.skip(missing["protection"])
    with Sandbox(Limits(cpu_seconds=60, wall_seconds=60)) as endless:
        numbers = count()
        sampler = scripted(lambda text: f"<code>while {next(numbers)} + 1: pass</code>", code={}, sandbox=endless)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        start = time.monotonic()
        timer = Timer(1, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                sampler.expand([(root(sampler.tokenizer).root, 6)])
        finally:
            timer.cancel()
            signal.signal(signal.SIGINT, before)
        assert endless.closed and time.monotonic() - start < 20


def test_three_failures_in_a_row_end_a_solution_and_one_success_resets_the_count():
    codes = iter(["no", "no", "ok", "no", "3=3", "no", "no"])

    def script(text: str) -> str:
        code = next(codes)
        return f"{code}\n" if "=" in code else f"<code>{code}</code>"

    steps = walk(scripted(script, code={}, depth=20, sandbox=Fails()))
    assert [step.code for step in steps] == ["error", "error", "ok", "error", "", "error", "error"]
    assert [step.finish for step in steps] == [""] * 6 + ["tools"]  # a step without code does not count


def test_output_is_cut(sandbox):
    code = {"characters": 5, "output": "[{}] {x}"}
    (step,) = walk(scripted(lambda text: "<code>'9' * 30</code>", code=code, final="9", sandbox=sandbox))
    assert step.output == "['9999... [cut after 5 characters]] {x}"


@pytest.mark.parametrize(("code", "outcome"), [("print(7)\n14", "answer"), ("print(14)\n7", "ok"), ("1/0", "error")])
def test_code_that_prints_the_known_answer_is_told_only_in_training(code, outcome, sandbox):
    known: dict[str, Any] = {"printed": lambda question, line: (question, line) == (0, "14")}
    for own, expected in ((known, outcome), ({}, "ok" if outcome == "answer" else outcome)):
        sampler = scripted(lambda text: f"<code>{code}</code>", code={}, delimiter="</step>", depth=1, sandbox=sandbox)
        sampler.printed = own.get("printed")
        assert walk(sampler)[0].code == expected


ALPHAMATH = {
    "delimiter": "\n</step>\n",
    "final": "Final Answer",
    "code": {
        "start": "<code>\n```python\n",
        "end": "\n```\n</code>",
        "output": "\n<output>\n{}\n</output>",
    },
}


def test_the_tags_of_alphamath(sandbox):
    first = "<step>\n<p>\nMultiply first.\n</p>\n<code>\n```python\nx = 3 * 4\nprint(x + 2)\n```\n</code>"
    last = "<step>\n<p>\nFinal Answer: $=14$\n</p>\n</step>\n"
    steps = walk(scripted(lambda text: last if text else first, new=120, **ALPHAMATH, sandbox=sandbox))
    assert [(step.text, step.output) for step in steps] == [
        (first, "\n<output>\n14\n</output>"),
        ("<step>\n<p>\nFinal Answer: $=14$\n</p>", ""),
    ]
    assert steps[-1].state.text == f"{first}\n<output>\n14\n</output>\n</step>\n<step>\n<p>\nFinal Answer: $=14$\n</p>"


def test_text_that_only_closes_code_is_no_code():
    parts = {"": "a </code>", "a </code>": " =1\n"}
    (step,) = walk(scripted(parts.__getitem__, code={}, final="=1", sandbox=Fails()))
    assert (step.text, step.code, step.output) == ("a </code> =1", "", "")


def test_code_whose_end_is_in_one_token_with_the_delimiter_runs():
    tokenizer = byte_tokenizer(merges=((">", "Ċ"),))
    (step,) = walk(scripted(lambda text: "<code>ok</code>\n", tokenizer, code={}, final="ok", sandbox=Fails()))
    assert (step.text, step.output) == ("<code>ok</code>", "<output>1</output>")


def test_without_protection_there_is_the_same_message_as_for_environments(monkeypatch):
    class Refused:
        def __init__(self, *_: Any) -> None:
            raise UserError("the sandbox for Python did not start: no Landlock")

    monkeypatch.setattr(client, "_Server", Refused)
    code = StepSettings(code={"seconds": 17}).code  # type: ignore[arg-type]
    with pytest.raises(UserError, match="did not start: no Landlock"):
        open_sandbox(code)
    assert open_sandbox(None) is None


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"code": {"output": "none"}}, "expected {} once"),
        ({"code": {"end": "</code>\n"}}, "expected no white space at its end"),
        ({"delimiter": "code>", "code": {}}, "code.start: it contains the delimiter 'code>'"),
        ({"delimiter": ""}, "at least 1 character"),
    ],
)
def test_settings_that_cannot_work_are_refused(step, message):
    with pytest.raises(ValueError, match=message):
        StepSettings(**step)


# --- from search to training --------------------------------------------------------------------------------------

WORDS = st.text("abc =.+", min_size=1, max_size=6).filter(str.strip)


@settings(max_examples=40)
@given(st.lists(st.tuples(WORDS, st.booleans()), min_size=1, max_size=4), st.sampled_from(["\n", " ; "]))
def test_the_row_of_a_search_trains_on_the_ids_of_the_search(lines, delimiter):
    """A character is a token here, so the tokenizer gives the same ids back."""
    written = [f"<code>{text.strip()}</code>" if coded else text.strip() + delimiter for text, coded in lines]
    written[-1] += f"={END}" if lines[-1][1] is False else ""
    if written[-1].endswith(END):
        written[-1] = written[-1].replace(delimiter, "")
    script = iter(written)
    sampler = scripted(
        lambda text: next(script, END), delimiter=delimiter, depth=len(written), code={"errors": 9}, sandbox=Fails(),
        outcome=lambda state: 1.0,
    )  # fmt: skip
    tree = root(sampler.tokenizer)
    grow([tree], sampler, Settings(simulations=len(written) + 1, children=1))
    (found,) = paths([tree])
    row = {"instruction": QUESTION[0]["content"], "output": found.rows()}
    read = parse(json.loads(json.dumps(row)), (Steps,), "s:1")
    assert isinstance(read, Steps)
    trained = solution(Renderer(sampler.tokenizer), read, learn_eos=False, delimiter=delimiter)
    end = list(tree.nodes())[-1].step.state.tokens
    if end[-1] in sampler.stop_ids:  # the delimiter of the last step is added in training
        assert trained.tokens.tolist()[: len(end) - 1] == list(end[:-1])
    else:
        assert trained.tokens.tolist() == list(end)
