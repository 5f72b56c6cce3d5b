"""How a GPU is timed: inputs that rotate, CUDA graphs, what the data sheets promise."""
