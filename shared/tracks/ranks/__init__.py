"""One model on several devices: shards of its weights, collectives, and the processes of the ranks."""
