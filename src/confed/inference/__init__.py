"""Finished runs in use: predictions, evaluation on new data, export and loading of exported models."""
