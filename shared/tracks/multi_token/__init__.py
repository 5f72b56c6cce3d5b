"""Multi-token prediction: the model drafts for itself, with mask tokens and gated additions. Phase 11.1."""
