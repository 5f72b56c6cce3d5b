"""Trains an adapter on a model's own texts."""
