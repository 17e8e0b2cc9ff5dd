"""README, docs/ and CONTRIBUTING: recipes parse, Python compiles, rows are read, and what they name exists."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from burnish import cli
from burnish.config import Recipe, Stage, load, method_spec, shipped
from burnish.config.evaluation import load_evaluation
from burnish.config.loading import RECIPES
from burnish.config.parallel import Parallel
from burnish.config.schema import MethodChoice, any_spec
from burnish.config.yaml import read
from burnish.data.readers import parse
from burnish.generate.settings import GeneratorSettings
from burnish.methods import METHODS, ROW_METHODS
from burnish.methods.settings import preset_table
from burnish.types import Prompt, Row

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
FILE = re.compile(r"(?<![\w./-])(?:(?:runs/[\w-]+/\w+/)?data/)?[\w-]+\.(?:jsonl|json|csv|parquet)\b")
FUNCTION = re.compile(r"[\w./]+:[A-Za-z_]\w*")
STAGE_FOLDER = re.compile(r"\bruns/([a-z][\w-]*)/(\w+)(?:/model|/adapter)?\b(?!\.)")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def stages_that_pages_run() -> set[tuple[str, str]]:
    """Every (run, stage) of the shipped recipes and of the recipes on pages, the runs that a page may refer to."""
    texts = [path.read_text("utf-8") for path in RECIPES.glob("*.yaml")]
    texts += [block for page in ALL for block in blocks(page, "yaml") if block.startswith("name:")]
    recipes = [read(text, "docs").value for text in texts]
    # a recipe of one stage may leave out the level of stages; its stage is named after its method
    return {
        (recipe["name"], stage["name"] if "stages" in recipe else stage["method"]["name"])
        for recipe in recipes
        for stage in recipe.get("stages", [recipe])
        if "stages" in recipe or "method" in recipe
    }


def make_what_the_user_has(recipe: str) -> None:
    """Create the files, functions and runs that a reader has. Everything else that a recipe names must exist."""
    for name in FILE.findall(recipe):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}\n", "utf-8")
    known = stages_that_pages_run()
    for match in STAGE_FOLDER.finditer(recipe):
        assert match.groups() in known, f"{match[0]}: neither a shipped recipe nor a page makes this folder"
        Path(match[0]).mkdir(parents=True, exist_ok=True)
        (Path(match[0]) / "config.json").write_text("{}", "utf-8")
    for reference in FUNCTION.findall(recipe):
        place, _, function = reference.partition(":")
        if place.endswith(".py"):
            assert re.fullmatch(r"my_\w+\.py|rewards\.py", place), f"{place}: not a file of the user's own"
            with Path(place).open("a", encoding="utf-8") as code:
                code.write(f"def {function}(trajectories): ...\n")
        else:
            assert hasattr(importlib.import_module(place), function), reference


def part_of_one(block: str) -> MethodChoice | None:
    """The method in a few lines of a recipe."""
    part = read(block, "docs").value
    assert set(part) <= {*Stage.model_fields, *Recipe.model_fields}
    if "parallel" in part:
        Parallel(**part["parallel"])
    if "generator" in part:
        GeneratorSettings(**part["generator"])
    return MethodChoice(**part["method"]) if "method" in part else None


@pytest.mark.parametrize("method", [*METHODS, *ROW_METHODS])
def test_every_method_has_a_recipe_on_a_page(method: str) -> None:
    recipes = [block for page in PAGES for block in blocks(page, "yaml")]
    assert any(re.search(rf"method:\s*(\{{name:\s*)?{method}\b", recipe) for recipe in recipes)
    assert f"`{method}`" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipes_parse_and_their_settings_are_settings(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "yaml"):
        make_what_the_user_has(block)
        if page.stem == "inference":
            Path("evaluation.yaml").write_text(block, "utf-8")
            load_evaluation(["evaluation.yaml"])
            continue
        Path("recipe.yaml").write_text(block, "utf-8")
        whole = block.startswith("name:")
        methods = [stage.method for stage in load("recipe.yaml").stages] if whole else [part_of_one(block)]
        for method in filter(None, methods):
            any_spec(method.name).config(**method.settings)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_python_compiles_and_rows_are_read(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")
    kinds = method_spec(page.stem).kinds if page.stem in METHODS else Row.__args__
    for line in "".join(blocks(page, "json")).splitlines():
        row = json.loads(line)
        parse(row, (Prompt,) if set(row) == {"prompt"} or page.stem == "environments" else kinds, page.name)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text("utf-8")):
        there = (page.parent / target) if target else page
        assert there.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings]


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_files_names_commands_and_runs_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    quoted = re.findall(r"`([^`\n]+)`", prose(page))
    for name in quoted:
        if re.match(r"(src|tests|docs|benchmarks)/", name):
            assert (ROOT / name.split("::")[0]).exists(), name
        if re.fullmatch(r"burnish(\.\w+)+(:\w+)?", name):
            resolve(name)
    for name in re.findall(r"\bburnish run ([a-z][\w-]*)(?=[` \n])", text):
        assert name in shipped(), name
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for name in re.findall(r"`make ([a-z]+)", text):
        assert name in targets, name
    for match in STAGE_FOLDER.finditer(text):
        assert match.groups() in stages_that_pages_run() or match[0].startswith("runs/a/"), match[0]


def resolve(name: str) -> None:
    """Import the module, or find the object in it, that a dotted name stands for."""
    thing: Any = importlib.import_module("burnish")
    path = "burnish"
    for part in name.replace(":", ".").split(".")[1:]:
        path = f"{path}.{part}"
        thing = getattr(thing, part) if hasattr(thing, part) else importlib.import_module(path)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_commands_have_the_options_that_pages_give_them(page: Path) -> None:
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    texts = [*re.findall(r"`(burnish [^`\n]+)`", prose(page)), *"".join(blocks(page, "bash")).splitlines()]
    for text in texts:
        words = re.sub(r"^.*?\bburnish ", "", text).split("#")[0].split()
        if "burnish" in text:
            command = commands[words[0]]
            if len(words) > 1:
                command = getattr(command, "commands", {}).get(words[1], command)  # of a group such as serve
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, text


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_identifiers_are_those_of_the_code(page: Path) -> None:
    files = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text("utf-8") for path in files if path != Path(__file__))
    known = {*re.findall(r"\w+", code), *(path.stem for path in files)}
    quoted = re.findall(r"`([^`\n]+)`", prose(page))
    names = {name for text in quoted for name in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", text)}
    unknown = sorted(names - known)
    assert not unknown, "these names are not in the code"


def test_the_table_of_presets_is_that_of_the_settings() -> None:
    page = (DOCS / "policy_gradient.md").read_text("utf-8")
    rows = [
        line.strip("| ").split(" | ")
        for line in page.split("## Presets")[1].split("## ")[0].splitlines()
        if "|" in line
    ]
    (names, _, *settings) = [[cell.strip("` ") for cell in row] for row in rows]
    written = {name: {row[0]: row[i] for row in settings} for i, name in enumerate(names, 1)}
    expected = {
        name: {key: f"{value:g}" if isinstance(value, float) else str(value).lower() for key, value in values.items()}
        for name, values in preset_table().items()
    }
    assert written == expected
