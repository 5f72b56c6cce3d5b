"""Trains an adapter on texts that the model generates."""
