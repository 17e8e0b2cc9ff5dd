"""The recipes in the pages of docs/ are recipes: every key of them is known and fits."""

import re
from pathlib import Path

import pytest

from burnish.recipe import loading
from burnish.recipe.blocks import Recipe
from burnish.recipe.checks import reference_problems, shape_problems
from burnish.recipe.places import complain, read

DOCS = Path(__file__).parent.parent / "docs"
BLOCKS = {
    f"{page.stem}-{number}": block
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.S))
    if block.startswith("name:")
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_recipe_of_a_page_is_one(block):
    document = loading._with_stages(read(block, "page"), "page")
    complain(document, list(shape_problems(document.value)))
    recipe = Recipe.model_validate(document.value)
    complain(document, list(reference_problems(recipe)))
    assert recipe.stages


def test_pages_have_recipes():
    assert {name.rpartition("-")[0] for name in BLOCKS} >= {"pretrain", "sft"}
