"""Tracking: what run folders hold, sent to TensorBoard, MLflow, Weights & Biases or Trackio."""
