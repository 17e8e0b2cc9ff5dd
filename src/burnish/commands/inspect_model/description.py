"""What is known of a model, as text: facts in sections, and warnings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Description:
    """What is known of a model: facts by section and name, and warnings.

    ``Description({"head": {"shape": "1 x 64", "bias": "none"}}, ["..."])``
    """

    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, section: str, facts: Mapping[str, str | None]) -> None:
        """Add facts to a section, except those that are None."""
        self.facts.setdefault(section, {}).update({name: fact for name, fact in facts.items() if fact is not None})
