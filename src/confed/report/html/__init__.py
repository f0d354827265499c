"""HTML of the report and its galleries."""
