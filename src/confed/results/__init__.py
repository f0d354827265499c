"""What a run leaves behind: its folder, and tables, comparisons and reports made of it."""
