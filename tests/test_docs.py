"""The pages of docs/: their recipes parse, their Python compiles, their rows are rows, their links lead somewhere."""

import json
import re
from pathlib import Path

import pytest
import yaml

from burnish.config import Stage, load, method_spec, shipped
from burnish.config.evaluation import load_evaluation
from burnish.config.schema import MethodChoice
from burnish.data.readers import parse
from burnish.methods import METHODS
from burnish.types import Row

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FILE = re.compile(r"[\w./-]+\.(?:jsonl|json|csv|parquet)\b")
MODEL = re.compile(r"\bruns/[\w./-]+")
FUNCTION = re.compile(r"\b([\w/]+\.py):(\w+)")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def make_what_is_named(recipe: str) -> None:
    """Stand-ins for the user's own files, models and functions, which only have to exist."""
    for name in FILE.findall(recipe):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}\n", "utf-8")
    for name in MODEL.findall(recipe):
        Path(name).mkdir(parents=True, exist_ok=True)
        (Path(name) / "config.json").write_text("{}", "utf-8")
    for file, function in FUNCTION.findall(recipe):
        with Path(file).open("a", encoding="utf-8") as code:
            code.write(f"def {function}(answers): ...\n")


def part_of_one(block: str) -> MethodChoice | None:
    """The method in a few lines of a recipe."""
    part = yaml.safe_load(block)
    assert set(part) <= set(Stage.model_fields)
    return MethodChoice(**part["method"]) if "method" in part else None


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_page_with_a_recipe_of_it(method: str) -> None:
    page = DOCS / f"{method}.md"
    assert page.is_file()
    assert any(re.search(rf"method:\s*(\{{name:\s*)?.*\b{method}\b", block) for block in blocks(page, "yaml"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipes_parse_and_their_settings_are_settings(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "yaml"):
        make_what_is_named(block)
        if page.stem == "inference":
            Path("evaluation.yaml").write_text(block, "utf-8")
            load_evaluation(["evaluation.yaml"])
            continue
        Path("recipe.yaml").write_text(block, "utf-8")
        whole = block.startswith("name:")
        methods = [stage.method for stage in load("recipe.yaml").stages] if whole else [part_of_one(block)]
        for method in filter(None, methods):
            method_spec(method.name).config(**method.settings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_compiles_rows_are_read_and_links_lead_somewhere(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")
    kinds = method_spec(page.stem).kinds if page.stem in METHODS else Row.__args__
    for block in blocks(page, "json"):
        for line in block.splitlines():
            parse(json.loads(line), kinds, page.name)
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"burnish run ([\w-]+)`", page.read_text("utf-8")):
        assert name in shipped()
