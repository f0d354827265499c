"""Transport over NVIDIA FLARE."""
