"""Execution of one run: data, model and task of a recipe, training, evaluation and the run folder."""
