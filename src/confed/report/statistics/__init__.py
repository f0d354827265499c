"""Statistical comparison of a study's methods."""
