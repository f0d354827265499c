"""Building blocks that several methods share: split learning, parallel branches, modality slots, meta-learning."""
