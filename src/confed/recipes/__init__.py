"""Recipes: TOML files, their overrides and checks."""
