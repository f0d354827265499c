"""Examples, tables, partitions and readers of published file formats."""
