"""Prompts to scored rollouts, and rollouts to optimizer steps."""
