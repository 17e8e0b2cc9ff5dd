"""Small stand-ins for the downloads of recipes: rated film reviews and a dictionary."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

RESOURCES = "hutto_ICWSM_2014"


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def sources(folder: Path, lines: list[tuple[int, str, list[int]]]) -> Path:
    """An archive laid out like vaderSentiment's, with other snippets."""
    texts = "".join(f"{number}\t{sum(r) / len(r)}\t{text}\r\n" for number, text, r in lines)
    ratings = "".join(f"{number}\t{sum(r) / len(r)}\t1.0\t{r}\n" for number, _, r in lines)
    inner = packed(
        {
            f"{RESOURCES}/movieReviewSnippets_GroundTruth.txt": texts.encode(),
            f"{RESOURCES}/movieReviewSnippets_anonDataRatings.txt": ratings.encode(),
        }
    )
    path = folder / "sources.tar.gz"
    path.write_bytes(packed({f"vaderSentiment-3.3.2/additional_resources/{RESOURCES}.tar.gz": inner, "setup.py": b""}))
    return path


@pytest.fixture
def pack() -> Callable[[dict[str, bytes]], bytes]:
    """Makes the bytes of an archive of files."""
    return packed


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety snippets, and one that repeats the text of another."""
    # the mean rating of snippet n is (n % 9) - 4, so that a snippet's number tells its rating
    lines = [(n, f"Sentence number {n}.", [n % 9 - 5, n % 9 - 4, n % 9 - 3]) for n in range(1, 91)]
    return sources(tmp_path_factory.mktemp("archive"), [*lines, (91, "Sentence number 5.", [1, 1, 1])])


LICENCE = "  1 This software and database is being provided to you\n"
WORDS = ("anchor", "basket", "candle", "dagger", "engine", "fiddle", "garden", "hammer", "island", "jacket")


@pytest.fixture(scope="session")
def dictionary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten tagged nouns, one with two senses, then nouns that are left out: two words, and one that no text has."""
    folder = tmp_path_factory.mktemp("wordnet")
    index = "".join(f"{word} n 1 2 @ ~ 1 3 {i:08d}  \n" for i, word in enumerate(WORDS))
    index = index.replace("anchor n 1 2 @ ~ 1 3 00000000", "anchor n 2 1 @ 2 3 00000000 00000001")
    index += "brick_wall n 1 0 1 5 00000001  \nabacus n 1 0 1 0 00000001  \n"
    data = "".join(f'{i:08d} 06 n 01 {word} 0 000 | what {word}s do; "a {word}"  \n' for i, word in enumerate(WORDS))
    (folder / "index.noun").write_text(LICENCE + index)
    (folder / "data.noun").write_text(LICENCE + data)
    return folder
