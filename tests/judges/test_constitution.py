"""Constitutions: the one that comes with Burnish, and what is said about mistakes in another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.errors import UserError
from burnish.judges.constitution import Principle, load_constitution

GOOD = """\
# two principles
- name: short
  critique: Find what could be left out.
  revise: Shorten the answer.
- name: kind
  compare: Prefer the kinder reply.
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, "utf-8")
    return path


def test_the_constitution_that_comes_with_burnish_has_every_text_of_every_principle() -> None:
    principles = load_constitution(uses=("critique", "revise", "compare"))
    assert 12 <= len(principles) <= 16
    texts = [text for one in principles for text in (one.critique, one.revise, one.compare)]
    assert len(set(texts)) == len(texts)
    for one in principles:
        assert one.compare is not None and one.compare.startswith("Prefer the reply ")


def test_a_file_is_read_in_order(tmp_path: Path) -> None:
    assert load_constitution(write(tmp_path, GOOD)) == (
        Principle(name="short", critique="Find what could be left out.", revise="Shorten the answer."),
        Principle(name="kind", compare="Prefer the kinder reply."),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"mine\.yaml: expected a list of principles, each with name: and its texts, got nothing"),
        ("[]", "got an empty list"),
        ("name: short", "got a block of keys"),
        ("- short", r"mine\.yaml:1: expected a block with name: and one of critique, revise, compare, got the text"),
        (GOOD + "- critique: What?", r"mine\.yaml:7: name: this key is missing"),
        (GOOD + "- {name: x, criteque: y}", r"mine\.yaml:7: criteque: unknown key \(did you mean 'critique'\?\)"),
        (GOOD + "- {name: x, critique: 3}", r"mine\.yaml:7: critique: expected text, got 3"),
        (GOOD + "- {name: short}", r"mine\.yaml:7: name: 'short' is the name of two principles, first .*mine\.yaml:2"),
        ("- name: [", r"mine\.yaml:\d: not valid YAML"),
        ("- {name: a, name: b}", r"mine\.yaml:1: not valid YAML"),
    ],
)
def test_mistakes_are_reported_with_their_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_constitution(write(tmp_path, text))


def test_a_text_that_is_needed_and_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.yaml:5: the principle 'kind' has no critique:, which is needed here"):
        load_constitution(write(tmp_path, GOOD), ("critique", "revise"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.yaml: No such file or directory: expected a YAML list of principles"):
        load_constitution(tmp_path / "no.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"- name: caf\xe9")
    with pytest.raises(UserError, match=r"latin\.yaml: not UTF-8"):
        load_constitution(tmp_path / "latin.yaml")
