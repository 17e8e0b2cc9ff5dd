"""Attention and linear layers that are faster than those of the models."""
