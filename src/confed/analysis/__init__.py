"""Attacks and audits on finished runs: Trojans, backdoors, membership, recovery of answers and inputs."""
