"""Optimizers for 16-bit weights: what 16 bits cannot hold is kept here."""
