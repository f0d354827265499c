"""confed."""
