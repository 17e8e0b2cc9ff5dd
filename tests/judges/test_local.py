"""The local judge against a naive sum over all sequences of tokens, and the questions that it is asked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import character_tokenizer, llama, word_tokenizer
from burnish.errors import UserError
from burnish.judges.local import AT_ONCE, LocalJudge
from burnish.judges.protocol import NoVerdictError, Question, Verdict
from burnish.judges.questions import GRADES, pair_question, score_question
from burnish.judges.spelling import Continued, continued, continues_word
from burnish.judges.store import StoredJudge, VerdictStore
from burnish.render.renderer import Renderer
from burnish.types import Message, Messages


def user(text: str) -> Messages:
    return (Message(role="user", content=text),)


def question(text: str = "A or B?", choices: tuple[str, ...] = ("A", "B")) -> Question:
    return Question(user(text), choices)


# --- spelling: by hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "token", "expected"),
    [
        ("", "A", Continued(None, 0)),
        ("", " B\n", Continued(None, 1)),
        ("", "\n", Continued("")),
        ("", "C", Continued(None)),
        ("", "AB", Continued(None)),
    ],
)
def test_a_token_completes_a_choice_with_any_white_space(text: str, token: str, expected: Continued) -> None:
    assert continued(text, token, ("A", "B")) == expected


@pytest.mark.parametrize(
    ("text", "token", "expected"),
    [
        ("", "1", Continued("1")),  # may become 10
        ("", " 1 ", Continued(None, 0)),  # white space ends it
        ("", "10", Continued(None, 9)),
        ("1", "0", Continued(None, 9)),
        ("1", " 0", Continued(None)),  # "1 0" is no choice
        ("1", "1", Continued(None)),
        ("1", "\n", Continued(None, 0)),
    ],
)
def test_a_choice_that_begins_another_one_waits_for_what_follows(text: str, token: str, expected: Continued) -> None:
    assert continued(text, token, GRADES) == expected


def test_only_letters_and_digits_continue_a_word() -> None:
    assert [continues_word(token) for token in ("0", "s", " 0", ".", "\n", "")] == [True, True, *[False] * 4]


# --- probabilities: against a naive sum ------------------------------------------------------------------------------


def naive(model: Any, tokenizer: Any, asked: Question, longest: int) -> list[float]:
    """The probability of each choice: the sum over all sequences of at most ``longest`` tokens, one pass for each."""
    prompt = Renderer(tokenizer).prompt(asked.messages)
    special = set(tokenizer.all_special_ids)
    texts = {i: t for t, i in tokenizer.get_vocab().items() if i not in special}
    useful = {i: t for t, i in tokenizer.get_vocab().items() if not t.strip() or set(t) <= set("".join(asked.choices))}
    useful = {i: t for i, t in useful.items() if i not in special}

    @torch.no_grad()
    def following(ids: tuple[int, ...]) -> torch.Tensor:
        return model(torch.tensor([[*prompt, *ids]])).logits[0, -1].double().softmax(-1)

    found = [0.0] * len(asked.choices)
    for n in range(1, longest + 1):
        for ids in itertools.product(useful, repeat=n):
            text = "".join(useful[i] for i in ids)
            if text.strip() not in asked.choices or text != text.rstrip() or not useful[ids[-1]].strip():
                continue  # white space at the end is what follows a choice, not another spelling of it
            p = math.prod(float(following(ids[:k])[ids[k]]) for k in range(n))
            if any(choice != text.strip() and choice.startswith(text.strip()) for choice in asked.choices):
                if n == longest:
                    continue  # the judge would have to read one more token
                p *= 1 - sum(float(following(ids)[i]) for i, t in texts.items() if t[:1].isalnum())
            found[asked.choices.index(text.strip())] += p
    return found


@pytest.mark.parametrize("choices", [("A", "B"), ("1", "2", "10")])
def test_the_probabilities_are_those_of_all_spellings(choices: tuple[str, ...]) -> None:
    model, tokenizer = llama(3), character_tokenizer()
    asked = question("Which?", choices)
    expected = naive(model, tokenizer, asked, longest=1 + max(map(len, choices)))
    judge = LocalJudge(model, tokenizer, negligible=0.0)
    (verdict,) = judge.ask([asked])
    assert verdict.mass == pytest.approx(sum(expected), rel=1e-4)
    assert verdict.probabilities == pytest.approx([p / sum(expected) for p in expected], abs=1e-5)


def test_choices_of_several_tokens_in_a_model_written_out_by_hand() -> None:
    """After any token, the model writes 1 with probability 0.5, 0 with 0.3, and the space with 0.2."""
    words = ("<unk>", "<eos>", "user", "1", "0", " ")
    tokenizer = word_tokenizer(*words, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}user {% endfor %}user"
    model = llama(vocab_size=len(words), tie_word_embeddings=False)
    logits = torch.full((len(words),), -100.0)
    logits[torch.tensor([3, 4, 5])] = torch.tensor([0.5, 0.3, 0.2]).log()
    model.lm_head = torch.nn.Linear(32, len(words))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(logits)
    (verdict,) = LocalJudge(model, tokenizer, negligible=0.0).ask([question("x", ("1", "10"))])
    # At most one space comes first: 1 + 0.2. "1" ends unless 1 or 0 follows: 0.5 * 0.2 * 1.2 = 0.12. "10" is
    # 0.5 * 0.3 * 1.2 = 0.18. Together they are 0.3, of which they have the shares 0.4 and 0.6.
    assert verdict.mass == pytest.approx(0.3, abs=1e-6)
    assert verdict.probabilities == pytest.approx((0.4, 0.6), abs=1e-6)


def test_probabilities_sum_to_one_and_do_not_depend_on_the_batch() -> None:
    judge = LocalJudge(llama(1), character_tokenizer())
    asked = [question(f"{'x' * n}?", GRADES if n % 2 else ("A", "B")) for n in range(AT_ONCE + 3)]
    together = judge.ask(asked)
    alone = [judge.ask([one])[0] for one in asked[::-1]][::-1]
    for one, other in zip(together, alone, strict=True):
        assert sum(one.probabilities) == pytest.approx(1, abs=1e-12)
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)
        assert 0 < one.mass < 1
    assert [v.probabilities for v in judge.ask(asked)] == [v.probabilities for v in together]  # the same bytes


def test_rare_beginnings_count_as_lost_mass() -> None:
    model, tokenizer = llama(3), character_tokenizer()
    (every,) = LocalJudge(model, tokenizer, negligible=0.0).ask([question()])
    (frequent,) = LocalJudge(model, tokenizer, negligible=1.0).ask([question()])
    assert frequent.mass < every.mass
    assert frequent.tokens < every.tokens


def test_a_question_that_does_not_fit_has_no_verdict_and_others_do() -> None:
    judge = LocalJudge(llama(), character_tokenizer())
    asked = [question("short"), question("x" * 300)]
    ((_, fits), (index, long)) = next(judge.each(asked))
    assert isinstance(fits, Verdict)
    assert index == 1
    assert isinstance(long, NoVerdictError)
    assert "reads at most 256" in str(long)
    with pytest.raises(NoVerdictError) as error:
        judge.ask(asked)
    assert error.value.index == 1


def test_the_reasoning_is_written_first_and_changes_the_question() -> None:
    model, tokenizer = llama(3, max_position_embeddings=1024), character_tokenizer()
    (plain,) = LocalJudge(model, tokenizer).ask([question()])
    judge = LocalJudge(model, tokenizer, reasoning=5)
    (reasoned,) = judge.ask([question()])
    assert (plain.reasoning, plain.calls, reasoned.calls) == ("", 1, 2)
    assert 0 < len(reasoned.reasoning) <= 5
    after = Question(
        (
            *user("A or B?\n\nDo not answer yet. First, explain your reasoning in a few sentences."),
            Message(role="assistant", content=reasoned.reasoning),
            *user("Now answer with A or B, and nothing else."),
        ),
        ("A", "B"),
    )
    assert reasoned.probabilities == pytest.approx(LocalJudge(model, tokenizer).ask([after])[0].probabilities, abs=1e-6)
    assert judge.identity != LocalJudge(model, tokenizer).identity


def test_the_identity_is_that_of_the_weights_and_the_tokenizer() -> None:
    tokenizer = character_tokenizer()
    assert LocalJudge(llama(1), tokenizer).identity == LocalJudge(llama(1), character_tokenizer()).identity
    assert LocalJudge(llama(1), tokenizer).identity != LocalJudge(llama(2), tokenizer).identity
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert LocalJudge(llama(1), tokenizer).identity != LocalJudge(llama(1), character_tokenizer()).identity


def test_a_local_judge_that_was_killed_between_two_batches_gives_the_same_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.judges.local.AT_ONCE", 2)
    questions, batches = [question("x" * (i % 5)) for i in range(12)], []
    own, batch = LocalJudge(llama(3), character_tokenizer()), LocalJudge._batch

    def counted(self: LocalJudge, asked: Sequence[Question]) -> list[Verdict | NoVerdictError]:
        batches.append(list(asked))
        if len(batches) == killed_at:
            raise KeyboardInterrupt
        return batch(self, asked)

    monkeypatch.setattr(LocalJudge, "_batch", counted)
    killed_at = 0
    whole = StoredJudge(own, VerdictStore(tmp_path / "whole.sqlite"))
    expected = whole.ask(questions)
    uninterrupted, batches[:], killed_at = batches[:], [], 2
    stored = StoredJudge(own, VerdictStore(tmp_path / "killed.sqlite"))
    with pytest.raises(KeyboardInterrupt):
        stored.ask(questions)
    found = stored.ask(questions)
    assert batches == [
        *uninterrupted[:2],
        *uninterrupted[1:],
    ]  # the first batch is not asked again, the others are equal
    assert [verdict.probabilities for verdict in found] == [verdict.probabilities for verdict in expected]
    whole.close()
    stored.close()


# --- questions -----------------------------------------------------------------------------------------------------


def test_questions_show_the_conversation_the_replies_and_the_principle() -> None:
    replies = [(Message(role="assistant", content=text),) for text in ("two", "three")]
    text = pair_question(user("1+1?"), replies[0], replies[1], "Prefer the correct reply.").messages[0]["content"]
    parts = [
        "1+1?",
        "<reply A>\ntwo\n</reply A>",
        "<reply B>\nthree\n</reply B>",
        "Prefer the correct reply.",
        "A or B",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    graded = score_question((Message(role="system", content="Be brief."), *user("1+1?")), replies[0])
    assert graded.choices == GRADES == ("1", "2", "3", "4", "5", "6", "7", "8", "9", "10")
    assert "System: Be brief.\n\nUser: 1+1?" in graded.messages[0]["content"]


@pytest.mark.parametrize("choices", [("A",), ("A", "A"), ("A", ""), ("A", " B")])
def test_choices_must_be_different_words(choices: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="choices"):
        Question(user("?"), choices)


@pytest.mark.parametrize("probabilities", [(0.5, 0.6), (math.nan, 1.0), (-0.1, 1.1)])
def test_a_verdict_must_be_a_distribution(probabilities: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        Verdict(probabilities, 1.0)


def test_a_tokenizer_without_a_template_is_an_error() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="template"):
        LocalJudge(llama(), tokenizer).ask([question()])
