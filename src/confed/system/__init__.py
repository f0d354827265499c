"""Machine and files: processor, versions, folder locks, printable text."""
