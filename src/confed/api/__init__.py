"""Python interface: runs and studies as objects, with progress displays for terminals and notebooks."""
