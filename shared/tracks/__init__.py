"""What belongs to one side track alone, together."""
