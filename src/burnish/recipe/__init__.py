"""Recipes: YAML and overrides to typed settings; every mistake is named by file, line and key."""

from burnish.recipe import sources
from burnish.recipe.blocks import Data, PackageModel, Recipe, RewardSource, Stage, StageData, StageModel, method_class
from burnish.recipe.loading import load, schema, shipped

__all__ = [
    "Data",
    "PackageModel",
    "Recipe",
    "RewardSource",
    "Stage",
    "StageData",
    "StageModel",
    "load",
    "method_class",
    "schema",
    "shipped",
    "sources",
]
