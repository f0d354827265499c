"""Measures that come with confed, one file each."""
