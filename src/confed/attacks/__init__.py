"""Attacks as pure functions: membership inference, Trojans, recovery of answers and inputs."""
