"""Loads and checks recipes, lists the shipped ones, and creates their JSON schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.config.checks import file_problems, reference_problems, shape_problems
from burnish.config.rounds import NAME, Loop, write_out
from burnish.config.schema import Recipe
from burnish.config.yaml import LONGEST, Document, complain, override, read
from burnish.errors import UserError, did_you_mean
from burnish.files import expanded
from burnish.methods import METHODS, ROW_METHODS
from burnish.mistakes import find, shown
from burnish.types import Config

RECIPES = Path(__file__).parent.parent / "recipes"


def shipped() -> dict[str, str]:
    """The shipped recipes by name, each with the first line of its comment."""
    files = sorted(RECIPES.glob("*.yaml"))
    return {file.stem: file.read_text("utf-8").partition("\n")[0].lstrip("# ") for file in files}


def load(reference: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe from a file or by the name of a shipped one, apply ``key=value`` overrides, and check it.

    Models and rows are not loaded.

    Raises:
        UserError: one message that lists every mistake with its file, line and key.
    """
    written, file = document(reference)
    for text in overrides:
        written = override(written, text)
    written = _with_stages(written, file.stem)
    whole, problems = write_out(written.value)
    complain(written, problems)
    complain(written, whole.original(shape_problems(whole.value)))
    recipe = Recipe.model_validate(whole.value)
    recipe._home, recipe._loops = file.parent.resolve(), whole.loops
    complain(written, whole.original([*reference_problems(recipe), *file_problems(recipe)]))
    return recipe


def document(reference: str | Path) -> tuple[Document, Path]:
    """Read the keys of a recipe with their places. Also returns the path of the file.

    Raises:
        UserError: if there is no such file, or it is not YAML with keys.
    """
    file = _file(reference)
    try:
        with file.open("rb") as opened:
            data = opened.read(4 * LONGEST + 1)  # a character has at most 4 bytes
        if len(data) > 4 * LONGEST:
            raise UserError(f"{reference}: a recipe has at most {LONGEST:,} characters")
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{reference}: not a text file in UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"{reference}: cannot be read: {error.strerror}") from error
    written = read(text, str(reference))
    if not isinstance(written.value, dict):
        raise UserError(f"{reference}: expected keys such as name: and stages:, got {shown(written.value)}")
    return written, file


def _file(reference: str | Path) -> Path:
    path = expanded(reference)
    if path.is_file():
        return path
    if (RECIPES / f"{reference}.yaml").is_file():
        return RECIPES / f"{reference}.yaml"
    if path.is_dir():
        raise UserError(f"{reference}: this is a folder; a recipe is a YAML file or the name of a shipped one")
    near = did_you_mean(str(reference), [*shipped(), *(str(p) for p in path.parent.glob("*.y*ml"))])
    raise UserError(f"{reference}: no such recipe{near}; shipped recipes are {', '.join(shipped()) or 'none'}")


def _with_stages(document: Document, name: str) -> Document:
    """The document with ``name`` and ``stages``. A recipe with a single stage may omit both."""
    value = {"name": name, **document.value}
    if "stages" in value:
        return Document(value, document.places)
    top = {key: value[key] for key in value if key in Recipe.model_fields}
    rest = {key: value[key] for key in value if key not in top}
    method = find(rest, ("method", "name"))
    stage = method.rpartition(":")[2].lower() if isinstance(method, str) else "main"
    places = {path if not path or path[0] in top else ("stages", 0, *path): at for path, at in document.places.items()}
    return Document({**top, "stages": [{"name": stage, **rest}]}, places, hidden=("stages", 0))


def json_schema() -> dict[str, Any]:
    """The JSON schema of recipes, including loops and the settings of every method."""
    whole = Recipe.model_json_schema()
    blocks = whole["$defs"]
    methods = []
    for name, spec in {**METHODS, **ROW_METHODS}.items():
        block = _block(spec.config, blocks)
        block["properties"] = {"name": {"const": name}, **block.get("properties", {})}
        methods.append(block | {"required": ["name", *block.get("required", [])]})
    own = {"properties": {"name": {"type": "string", "pattern": ":"}}, "required": ["name"], "type": "object"}
    blocks["MethodChoice"] = {"oneOf": [*methods, own]}
    stage = blocks["Stage"]
    stage["properties"]["name"]["pattern"] = f"^{NAME}$"
    _add_loops(blocks)
    whole["properties"]["stages"]["items"] = {"anyOf": [{"$ref": "#/$defs/Stage"}, {"$ref": "#/$defs/Loop"}]}
    top = {name: value for name, value in whole["properties"].items() if name != "stages"}
    flat = stage | {"title": "Recipe of one stage", "properties": stage["properties"] | top, "required": []}
    several = {key: value for key, value in whole.items() if key != "$defs"} | {"required": ["stages"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": blocks, "anyOf": [several, flat]}


def _block(config: type[Config], blocks: dict[str, Any]) -> dict[str, Any]:
    """The schema of a block of settings. Those of its inner blocks are added to ``blocks``."""
    block = config.model_json_schema(ref_template="#/$defs/{model}")
    blocks |= block.pop("$defs", {})
    return block


def _add_loops(blocks: dict[str, Any]) -> None:
    """Add loops, and the keys that `write_out` replaces, which the classes of written-out stages do not have."""
    loop, stage = _block(Loop, blocks), blocks["Stage"]
    by_round = {
        "type": "object",
        "additionalProperties": {"type": "array"},
        "description": "Settings with one value a round: {trainer.learning_rate: [4.0e-5, 2.0e-5]}.",
    }
    blocks["LoopStage"] = stage | {"title": "LoopStage", "properties": stage["properties"] | {"by_round": by_round}}
    loop["properties"]["stages"]["items"] = {"$ref": "#/$defs/LoopStage"}
    blocks["Loop"] = loop
    for name, kinds in (("StageModel", ("StageModel", "PackageModel")), ("StageData", ("StageData",))):
        blocks[name]["properties"]["initial"] = {
            "anyOf": [{"type": "string"}, *({"$ref": f"#/$defs/{kind}"} for kind in kinds)],
            "description": "In a loop: what the first round reads, if the stage comes later in the round.",
        }
    blocks["StageData"]["properties"]["from_rounds"] = {
        "enum": ["this", "earlier", "all"],
        "default": "this",
        "description": "The rounds of a loop whose rows are read. After the loop: all.",
    }
