"""What an attacker learns from a run, a file each; every module declares one ``PROBE``."""
