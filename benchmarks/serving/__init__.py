"""The serving benchmark: who serves, how requests come, the experiments, and what is counted."""
