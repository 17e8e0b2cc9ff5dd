import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.commands.inspect import marked, percentile
from burnish.machine import advice
from burnish.types import Sequence


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([9, 1, 2], 0.0, 1), ([9, 1, 2], 0.5, 2), ([9, 1, 2], 1.0, 9), ([4, 3, 2, 1], 0.5, 2), ([5], 0.99, 5)],
)
def test_percentiles_by_hand(values, share, expected):
    assert percentile(values, share) == expected


class Letters:
    """Token i is the i-th letter. 0 is special, and every other token but the first begins with a space."""

    all_special_ids = (0,)

    def decode(self, tokens, clean_up_tokenization_spaces):
        return " ".join("<s>" if token == 0 else "abc"[token - 1] for token in tokens)


def test_spans_keep_the_space_between_them_and_are_marked():
    sequence = Sequence((0, 1, 2, 3), (False, False, True, True), "x:1")
    assert marked(sequence, Letters(), colors=False).plain == "<s> a[[ b c]]"  # type: ignore[arg-type]
    colored = marked(sequence, Letters(), colors=True)  # type: ignore[arg-type]
    assert colored.plain == "<s> a b c"
    assert [(str(span.style), colored.plain[span.start : span.end]) for span in colored.spans] == [
        ("dim bold reverse", "<s>"),
        ("dim", " a"),
        ("green", " b c"),
    ]


def test_a_part_of_a_row_is_shown_as_in_the_whole():
    sequence = Sequence((0, 1, 2, 3, 1), (False, False, True, True, False), "x:1")
    assert marked(sequence, Letters(), range(2), colors=False).plain == "<s> a"  # type: ignore[arg-type]
    assert marked(sequence, Letters(), range(3, 5), colors=False).plain == "[[c]] a"  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2, 3]), st.booleans()), min_size=2))
def test_the_spans_of_a_row_join_to_its_text(tokens):
    ids, mask = zip(*tokens, strict=True)
    text = marked(Sequence(ids, (False, *mask[1:]), "x:1"), Letters(), colors=True).plain  # type: ignore[arg-type]
    assert text == Letters().decode(ids, clean_up_tokenization_spaces=False)


def test_the_value_of_a_step_follows_its_last_token():
    arrays = {"targets": (0.0, 0.0, 0.0, -1.0), "outcomes": (0.0, -1.0, 0.0, -1.0)}
    sequence = Sequence((1, 2, 3, 1), (False,) * 4, "x:1", arrays)
    assert marked(sequence, Letters(), colors=False).plain == "a b<+0> c a<-1>"  # type: ignore[arg-type]
    learned = Sequence((1, 2, 3, 1), (False, True, True, False), "x:1", arrays)
    assert marked(learned, Letters(), colors=False).plain == "a[[ b]]<+0>[[ c]] a<-1>"  # type: ignore[arg-type]


class Lines(Letters):
    """The third letter is the end of a line."""

    def decode(self, tokens, clean_up_tokenization_spaces):
        return "".join("<s>" if token == 0 else "ab\n"[token - 1] for token in tokens)


@pytest.mark.parametrize("trained", [False, True])
def test_the_value_of_a_step_is_on_the_line_of_the_step(trained):
    arrays = {"targets": (0.0, 0.0, 0.5, 0.0), "outcomes": (0.0, 0.0, 1.0, 0.0)}
    sequence = Sequence((1, 2, 3, 1), (False, trained, trained, False), "x:1", arrays)
    expected = "a[[b]]<+0.5>\na" if trained else "ab<+0.5>\na"
    assert marked(sequence, Lines(), colors=False).plain == expected  # type: ignore[arg-type]
    colored = "ab⏎<+0.5>\na" if trained else "ab<+0.5>\na"
    assert marked(sequence, Lines(), colors=True).plain == colored  # type: ignore[arg-type]


def test_tokens_with_a_negative_reward_are_red():
    sequence = Sequence((1, 2), (False, True), "x:1", {"advantages": (-0.5, -0.5)})
    spans = marked(sequence, Letters(), colors=True).spans  # type: ignore[arg-type]
    assert [str(span.style) for span in spans] == ["dim", "red"]


def test_advice_is_given_only_if_it_helps():
    good = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "cores": "2 of 4",
        "threads": "2",
        "GPU": "none",
        "bfloat16": "1.30 times as fast as float32",
        "memory": "8.0 GiB",
    }
    assert advice(good) == []
    bad = good | {
        "OMP_WAIT_POLICY": "not set",
        "threads": "4",
        "bfloat16": "0.50 times as fast as float32",
        "memory": "3.9 GiB",
    }
    assert [line.split()[0] for line in advice(bad)] == ["set", "4", "keep", "less"]
