"""One run: a recipe becomes data, model and task, is trained, evaluated and written to its folder."""
