"""Federations across machines: certificates, server and site processes, checks before joining."""
