"""What ``infer workshop`` reads and shows: one module for exercises, one for the classroom. Introduced in phase 1b."""
