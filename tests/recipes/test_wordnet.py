"""The dictionary of the classic chain, on a few lines of it."""

import json

import pytest

from burnish.errors import UserError
from burnish.recipes import wordnet
from burnish.recipes.wordnet import Noun, nouns, overlap, prepare
from burnish.types import Trajectory

WORDS = ("anchor", "basket", "candle", "dagger", "engine", "fiddle", "garden", "hammer", "island", "jacket")


def test_nouns_have_the_definition_of_their_first_sense_without_examples(dictionary):
    assert nouns(dictionary) == [Noun(word, f"what {word}s do") for word in WORDS]


def test_files_share_no_noun_and_depend_on_the_seed(dictionary, tmp_path):
    sizes = {"rows": 3, "pairs": 2, "prompts": 2, "held_out": 2}
    for name in ("a", "b"):
        prepare(tmp_path / name, 5, dictionary=str(dictionary), **sizes)
    files = {path.stem: path.read_text() for path in (tmp_path / "a" / "data").iterdir()}
    assert files == {path.stem: path.read_text() for path in (tmp_path / "b" / "data").iterdir()}
    asked = {name: {json.loads(line)["prompt"] for line in text.splitlines()} for name, text in files.items()}
    assert {name: len(prompts) for name, prompts in asked.items() if "eval" not in name} == {
        "sft": 3,
        "pairs": 2,
        "prompts": 2,
    }
    assert asked["sft-eval"] == asked["pairs-eval"] == asked["prompts-eval"]
    every = [*asked["sft"], *asked["pairs"], *asked["prompts"], *asked["sft-eval"]]
    assert len(every) == len(set(every)) == 9
    pair = json.loads(files["pairs"].splitlines()[0])
    assert pair["chosen"] != pair["rejected"] and pair["prompt"].split('"')[1] in pair["chosen"]


def test_too_few_nouns_or_no_dictionary_is_an_error(dictionary, tmp_path):
    with pytest.raises(UserError, match="add up to 20 nouns, but the dictionary has only 10 with a definition"):
        prepare(tmp_path, 0, dictionary=str(dictionary), rows=20, pairs=0, prompts=0, held_out=0)
    with pytest.raises(UserError, match=r"no WordNet in .*nowhere: run `make wordnet`"):
        prepare(tmp_path, 0, dictionary=str(tmp_path / "nowhere"))


def test_overlap_by_hand():
    def answer(text: str) -> Trajectory:
        return Trajectory.from_text(text, columns={"answer": "a device for cutting"}, source="x:1")

    # device, for and cutting are expected; "a" is too short to count
    assert overlap([answer("a device for cutting"), answer("cutting wood"), answer("2 + 2")]) == [1.0, 2 / 5, 0.0]
    assert wordnet.question(Noun("gadget", "")) == 'Define "gadget".'
