"""Rows to tokens: chat templates, loss masks, truncation."""
