"""Readers of the official files of multi-label pictures and texts, one module per dataset."""
