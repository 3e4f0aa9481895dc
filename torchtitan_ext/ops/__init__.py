"""Arithmetic on tensors that the depth variants are made of."""
