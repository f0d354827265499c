"""The core: tensors by name, messages, client and server state, rounds and local training."""
