"""May this model leave? What a finished run gives away, what its sites gained, and limits that decide."""
