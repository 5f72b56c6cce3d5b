"""How a batch is computed: uploaded, run or replayed, and isolated if it fails."""
