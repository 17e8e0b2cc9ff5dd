"""Tokens to completions."""
