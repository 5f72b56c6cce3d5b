"""Multi-token prediction: drafts by the model itself, through mask tokens and gated additions. Phase 11.1."""
