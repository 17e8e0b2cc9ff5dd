"""From prompts to completions to scored experience."""
