"""The serving benchmark: contenders, arrivals, the experiments, and what is counted."""
