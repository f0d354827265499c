"""Federated learning methods, one module each."""
