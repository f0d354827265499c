"""Texts that ``confed federation new`` fills in: what every party has to do, and a Flower application."""
