"""Transport over Flower."""
