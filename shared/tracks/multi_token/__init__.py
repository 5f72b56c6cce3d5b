"""Multi-token prediction: drafts by the model itself, using mask tokens and gated additions. Phase 11.1."""
