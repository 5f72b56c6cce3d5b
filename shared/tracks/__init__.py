"""Components that belong to a single side track, one package each."""
