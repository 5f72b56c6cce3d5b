"""How a batch is computed: uploaded, run or replayed, and isolated when it fails."""
