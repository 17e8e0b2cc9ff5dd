"""A sealed folder is complete or absent, and damage to it is detected."""

import hashlib
import json

import pytest

from burnish.files import (
    CHECKSUMS,
    checksums,
    damage,
    remove_leftovers,
    sha256,
    staging,
    write_text,
    writing,
)


def make(folder, **files):
    with writing(folder) as aside:
        for name, text in (files or {"weights": "1234"}).items():
            path = aside / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return folder


def test_a_folder_appears_once_it_is_sealed(tmp_path):
    folder = tmp_path / "checkpoint-1"
    with writing(folder) as aside:
        (aside / "weights").write_text("1234")
        assert not folder.exists() and aside == staging(folder)
    assert (folder / "weights").read_text() == "1234" and damage(folder) is None
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_checksums_are_those_of_every_file(tmp_path):
    folder = make(tmp_path / "a", weights="1234", critic__weights="56")
    expected = {
        "critic/weights": hashlib.sha256(b"56").hexdigest(),
        "weights": hashlib.sha256(b"1234").hexdigest(),
    }
    assert checksums(folder) == expected == json.loads((folder / CHECKSUMS).read_text())
    assert sha256(folder / "weights") == expected["weights"]


def test_an_error_leaves_the_old_folder(tmp_path):
    folder = make(tmp_path / "model", weights="old")
    with pytest.raises(KeyError), writing(folder) as aside:
        (aside / "weights").write_text("new")
        raise KeyError
    assert (folder / "weights").read_text() == "old" and damage(folder) is None


def test_a_new_folder_replaces_the_old_one_and_leftovers(tmp_path):
    folder = make(tmp_path / "model", weights="old", extra="x")
    staging(folder).mkdir()
    (staging(folder) / "left").write_text("behind")
    make(folder, weights="new")
    assert {p.name for p in folder.iterdir()} == {"weights", CHECKSUMS}
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def changed(path):
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize("harm", [truncated, changed, lambda path: path.unlink()], ids=["truncated", "changed", "gone"])
@pytest.mark.parametrize("name", ["weights", "critic/weights", CHECKSUMS])
def test_damage_names_the_damaged_file(harm, name, tmp_path):
    folder = make(tmp_path / "model", weights="1234", critic__weights="56")
    harm(folder / name)
    wrong = damage(folder)
    assert wrong and name in wrong


def test_other_files_in_a_sealed_folder_are_ignored(tmp_path):
    folder = make(tmp_path / "checkpoint-1")
    (folder / ".DS_Store").write_text("")
    (folder / "critic").mkdir()
    (folder / "critic" / "notes.txt").write_text("mine")
    assert damage(folder) is None


@pytest.mark.parametrize("text", ["[]", "{", '{"weights": 3}', "null"])
def test_an_invalid_list_of_checksums_is_damage(text, tmp_path):
    folder = make(tmp_path / "checkpoint-1")
    (folder / CHECKSUMS).write_text(text)
    assert damage(folder) == f"{CHECKSUMS} is damaged"


def test_only_leftovers_of_a_killed_process_are_removed(tmp_path):
    for name in (".checkpoint-1.partial", ".model.old", ".git", "model.old"):
        (tmp_path / name).mkdir()
    (tmp_path / ".link.old").symlink_to(tmp_path / "model.old")
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".git", "model.old", ".link.old"}


def test_a_text_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "manifest.json"
    for text in ("one", "zwei: ä"):
        write_text(path, text)
        assert path.read_text("utf-8") == text
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
