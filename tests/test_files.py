"""A folder is complete or absent, and what is damaged is not taken."""

import hashlib
import json

import pytest

from burnish.files import (
    CHECKSUMS,
    checkpoints,
    checksums,
    damage,
    latest,
    remove_leftovers,
    rotate,
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


def test_a_new_folder_takes_the_place_of_the_old_and_of_what_was_left_behind(tmp_path):
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


@pytest.mark.parametrize("harm", [truncated, changed, lambda path: path.unlink()], ids=["cut", "changed", "gone"])
@pytest.mark.parametrize("name", ["weights", "critic/weights", CHECKSUMS])
def test_what_is_damaged_is_not_complete_and_the_older_is_taken(harm, name, tmp_path):
    for step in (2, 10, 9):
        make(tmp_path / f"checkpoint-{step}", weights=f"{step} of them", critic__weights="56")
    assert latest(tmp_path) == (tmp_path / "checkpoint-10", [])
    harm(tmp_path / "checkpoint-10" / name)
    wrong = damage(tmp_path / "checkpoint-10")
    assert wrong and name in wrong
    assert latest(tmp_path) == (tmp_path / "checkpoint-9", [f"{tmp_path / 'checkpoint-10'}: {wrong}"])


def test_files_of_others_do_not_matter(tmp_path):
    folder = make(tmp_path / "checkpoint-1")
    (folder / ".DS_Store").write_text("")
    (folder / "critic").mkdir()
    (folder / "critic" / "notes.txt").write_text("mine")
    assert damage(folder) is None and latest(tmp_path) == (folder, [])


@pytest.mark.parametrize("text", ["[]", "{", '{"weights": 3}', "null"])
def test_a_list_of_checksums_that_is_none_is_damage(text, tmp_path):
    folder = make(tmp_path / "checkpoint-1")
    (folder / CHECKSUMS).write_text(text)
    assert damage(folder) == f"{CHECKSUMS} is damaged"


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [(None, None, [4, 3, 2, 1]), (2, None, [4, 3]), (1, 2, [4, 2]), (2, 2, [4, 2]), (3, 1, [4, 3, 1]), (1, 4, [4])],
)
def test_the_oldest_checkpoints_go_and_the_best_and_the_newest_stay(limit, best, kept, tmp_path):
    for step in range(1, 5):
        make(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-5").write_text("a file")
    (tmp_path / "checkpoint-6-mine").mkdir()
    rotate(tmp_path, limit, best and tmp_path / f"checkpoint-{best}", 4)
    assert [int(path.name.rpartition("-")[2]) for path in checkpoints(tmp_path)] == kept
    assert (tmp_path / "checkpoint-6-mine").is_dir()


def test_checkpoints_of_a_run_that_started_over_do_not_push_out_new_ones(tmp_path):
    """A damaged checkpoint-30 stayed, and each new one was removed as soon as it was written."""
    for step in (30, 5, 10):
        make(tmp_path / f"checkpoint-{step}")
    rotate(tmp_path, 1, None, 10)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-30", "checkpoint-10"]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    for name in (".checkpoint-1.partial", ".model.old", ".git", "model.old"):
        (tmp_path / name).mkdir()
    (tmp_path / ".link.old").symlink_to(tmp_path / "model.old")
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".git", "model.old", ".link.old"}


def test_nothing_is_complete_where_nothing_is(tmp_path):
    assert latest(tmp_path) == (None, []) and damage(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1").mkdir()
    staging(tmp_path / "checkpoint-2").mkdir()
    assert latest(tmp_path) == (None, [f"{tmp_path / 'checkpoint-1'}: it has no {CHECKSUMS}"])


def test_a_text_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "manifest.json"
    for text in ("one", "zwei: ä"):
        write_text(path, text)
        assert path.read_text("utf-8") == text
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
