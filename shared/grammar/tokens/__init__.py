"""From bytes to tokens: which of a vocabulary's tokens may follow, on the host and on a device."""
