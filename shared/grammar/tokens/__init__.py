"""From bytes to tokens: which tokens of a vocabulary may follow, on the host and on a device."""
