"""Recipes: YAML and overrides to typed settings; every mistake is named by file, line and key."""

from burnish.config.loading import json_schema, load, shipped
from burnish.config.schema import (
    Data,
    Recipe,
    Stage,
    StageData,
    method_class,
    method_spec,
)
from burnish.models.settings import PackageModel, StageModel

__all__ = [
    "Data",
    "PackageModel",
    "Recipe",
    "Stage",
    "StageData",
    "StageModel",
    "json_schema",
    "load",
    "method_class",
    "method_spec",
    "shipped",
]
