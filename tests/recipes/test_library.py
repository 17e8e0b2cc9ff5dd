"""Prose of the running Python: files, held-out sections, and the tokenizer."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from burnish.errors import UserError
from burnish.recipes import library


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    library.prepare(folder, 0, held_out=5, docstrings=40, vocabulary=300)
    return folder


def test_files_contain_prose_and_share_no_rows(made):
    files = {path.stem: texts(path) for path in (made / "data").glob("*.jsonl")}
    assert {name: len(rows) for name, rows in files.items() if name != "reference"} == {
        "docstrings": 40,
        "reference-eval": 5,
    }
    assert len(files["reference"]) > 50 and sum(map(len, files["reference"])) > 200_000
    assert not set(files["reference-eval"]) & set(files["reference"])
    assert any("expression" in text for text in files["reference"])


def test_the_tokenizer_round_trips_text(made):
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    text = "An if statement, é and\n  white space."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == 300


def test_the_same_seed_writes_the_same_bytes(made, tmp_path):
    library.prepare(tmp_path, 0, held_out=5, docstrings=40, vocabulary=300)
    for path in made.rglob("*"):
        if path.is_file():
            assert (tmp_path / path.relative_to(made)).read_bytes() == path.read_bytes(), path


def test_nothing_left_to_train_on_is_refused(tmp_path):
    with pytest.raises(UserError, match="held_out: expected 1 to"):
        library.prepare(tmp_path, 0, held_out=5000)
