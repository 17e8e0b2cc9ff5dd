"""Policies, scalar heads and adapters, and the forward passes that training and scoring share."""
