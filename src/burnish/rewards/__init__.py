"""Anything that scores a completion."""
