"""One-off preparation, started by hand: checkpoints, embeddings, region features, pretraining of mini backbones."""
