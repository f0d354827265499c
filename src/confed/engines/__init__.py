"""Simulation in one or several processes, and federations across machines."""
