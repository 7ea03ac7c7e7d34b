"""Recipes: one TOML a tested model."""
