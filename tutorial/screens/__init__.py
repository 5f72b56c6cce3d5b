"""What ``infer workshop`` reads and shows: exercises, checks, and the classroom. Introduced in phase 1b."""
