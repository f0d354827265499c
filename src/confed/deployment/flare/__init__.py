"""Federations over NVIDIA FLARE: provisioning, jobs, and supervised server and site processes."""
