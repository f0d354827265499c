"""Intake of files as people have them: one normal form of values, one reader of tables, one account of rows."""
