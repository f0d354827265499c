"""Losses as pure functions of tensors; each names its paper and equation."""
